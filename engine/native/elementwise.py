"""Calls the functions of elementwise.cpp with tensors. The tensors must be on the CPU, and contiguous.

Shape suffixes: T tokens, P pairs of a token and one of its experts, E hidden size, I intermediate size, M = 2 x I, V
vocabulary (this rank's share).
"""

import ctypes

import torch

from engine.activation import Activation, ClampedSwiglu, Gate
from engine.native.types import TYPE_CODES


class ElementwiseKernels:
    """Writes results to tensors of the caller.

    All tensors of a call have the same dtype, but a norm's weights may be float32."""

    def __init__(self, library: ctypes.CDLL) -> None:
        address, number = ctypes.c_void_p, ctypes.c_int64
        self._add_rms_norm = library.baton_add_rms_norm
        self._add_rms_norm.argtypes = (
            *(number, number, address, address, address, address),
            *(number, number, ctypes.c_float, ctypes.c_int),
        )
        self._add_normed = library.baton_add_normed
        self._add_normed.argtypes = (
            *(number, number, address, address, address),
            *(number, number, ctypes.c_float, ctypes.c_int),
        )
        self._gate_mul = {Gate.SILU: library.baton_gate_mul_silu, Gate.GELU_TANH: library.baton_gate_mul_gelu}
        for function in self._gate_mul.values():
            function.argtypes = (number, address, address, number, number, ctypes.c_int)
        self._gate_mul_swiglu = library.baton_gate_mul_swiglu
        self._gate_mul_swiglu.argtypes = (
            *(number, address, address, number, number, ctypes.c_int),
            *(ctypes.c_float, ctypes.c_float),
        )
        self._embed = library.baton_embed
        self._embed.argtypes = (number, *(address,) * 3, *(number,) * 4, ctypes.c_int)
        self._sum_pairs = library.baton_sum_pairs
        self._sum_pairs.argtypes = (number, *(address,) * 4, *(number,) * 3, ctypes.c_int)
        gates = (*self._gate_mul.values(), self._gate_mul_swiglu)
        for function in (self._add_rms_norm, self._add_normed, *gates, self._embed, self._sum_pairs):
            function.restype = None

    def add_rms_norm(
        self,
        branch_TE: torch.Tensor | None,
        residual_TE: torch.Tensor,
        weight_E: torch.Tensor,
        eps: float,
        out_TE: torch.Tensor,
    ) -> None:
        """Adds the branch, if there is one, to the residual stream, in place; writes the norm of the sum."""
        assert residual_TE.is_contiguous()
        assert branch_TE is None or branch_TE.is_contiguous()
        self._add_rms_norm(
            TYPE_CODES[residual_TE.dtype],
            TYPE_CODES[weight_E.dtype],
            None if branch_TE is None else branch_TE.data_ptr(),
            residual_TE.data_ptr(),
            weight_E.data_ptr(),
            out_TE.data_ptr(),
            *residual_TE.shape,
            eps,
            torch.get_num_threads(),
        )

    def add_normed(
        self, x_TE: torch.Tensor, residual_TE: torch.Tensor, weight_E: torch.Tensor, eps: float
    ) -> None:
        """Norms the rows of `x_TE`, and adds the result to the residual stream, in place."""
        assert residual_TE.is_contiguous()
        assert x_TE.is_contiguous()
        self._add_normed(
            TYPE_CODES[residual_TE.dtype],
            TYPE_CODES[weight_E.dtype],
            x_TE.data_ptr(),
            residual_TE.data_ptr(),
            weight_E.data_ptr(),
            *residual_TE.shape,
            eps,
            torch.get_num_threads(),
        )

    def gate_mul(self, gate_up_TM: torch.Tensor, gate: Activation, out_TI: torch.Tensor) -> None:
        """Combines gates (the first I columns) and ups (the other I columns) by the activation; writes the result."""
        assert gate_up_TM.is_contiguous()
        what = (
            TYPE_CODES[gate_up_TM.dtype],
            gate_up_TM.data_ptr(),
            out_TI.data_ptr(),
            *out_TI.shape,
            torch.get_num_threads(),
        )
        if isinstance(gate, ClampedSwiglu):
            self._gate_mul_swiglu(*what, gate.alpha, gate.limit)
        else:
            self._gate_mul[gate](*what)

    def embed(
        self, ids_T: torch.Tensor, weight_VE: torch.Tensor, first_token: int, out_TE: torch.Tensor
    ) -> None:
        """Writes each token's row of `weight_VE`, whose first row is that of token `first_token`; zeros for tokens of
        other ranks."""
        assert weight_VE.is_contiguous()
        self._embed(
            weight_VE.dtype.itemsize,
            ids_T.data_ptr(),
            weight_VE.data_ptr(),
            out_TE.data_ptr(),
            *out_TE.shape,
            first_token,
            len(weight_VE),
            torch.get_num_threads(),
        )

    def sum_pairs(
        self, y_PE: torch.Tensor, tokens_P: torch.Tensor, weights_P: torch.Tensor, out_TE: torch.Tensor
    ) -> None:
        """Writes the weighted sum of each token's pairs, added in the order of the pairs in float32.

        `tokens_P` (int64): the token of each pair. `weights_P` (float32): the weight of each pair.
        """
        assert y_PE.is_contiguous()
        assert weights_P.is_contiguous()
        self._sum_pairs(
            TYPE_CODES[y_PE.dtype],
            y_PE.data_ptr(),
            tokens_P.data_ptr(),
            weights_P.data_ptr(),
            out_TE.data_ptr(),
            len(y_PE),
            *out_TE.shape,
            torch.get_num_threads(),
        )
