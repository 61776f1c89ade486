"""NativeBackend: the parts of a decoder layer by Baton's CPU kernels, each in one pass over reused memory.

Shape suffixes: T tokens of a step, E hidden size, V vocabulary, I intermediate size, M = 2 x I.
"""

import ctypes
from collections.abc import Sequence

import torch

from engine.activation import Activation, Gate
from engine.layers.backend import Activations, InputTokens, LinearLayer, Matrix, MixtureLayer
from engine.layers.fp8 import Fp8Weight
from engine.layers.grouped_weight import GroupedWeight
from engine.layers.merged_linear import parts_of
from engine.layers.mixture import ExpertChoice
from engine.layers.native_linear import NativeLinear, NativeLinears
from engine.layers.native_mixture import NativeMixture
from engine.layers.torch_backend import TorchBackend
from engine.layers.workspace import Workspace
from engine.native.elementwise import ElementwiseKernels
from engine.native.products import Products

CPU = torch.device("cpu")


class NativeBackend(TorchBackend):
    """A `Backend` of engine/layers/backend.py, for CPUs.

    Results share memory: those of the norms have one buffer, those of `gated` and of mixtures another. A decoder uses
    each result before the next one overwrites it. So only one step may run at a time.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        self._kernels = ElementwiseKernels(library)
        self._products = Products(library)
        self._embedded, self._normed, self._gated = Workspace(CPU), Workspace(CPU), Workspace(CPU)
        self._experts_products = Workspace(CPU)

    def linear(self, weight_OI: Matrix, bias_O: torch.Tensor | None) -> LinearLayer:
        if isinstance(weight_OI, GroupedWeight):
            return NativeLinear.of_groups(self._products, weight_OI, bias_O)
        if isinstance(weight_OI, Fp8Weight):
            return super().linear(weight_OI, bias_O)
        return NativeLinear.of_floats(self._products, weight_OI, bias_O)

    def mixture_of(
        self, choice: ExpertChoice, experts: Sequence[tuple[LinearLayer, LinearLayer]], own_experts: range
    ) -> MixtureLayer:
        gate_ups, downs = [parts_of(gate_up) for gate_up, _ in experts], [down for _, down in experts]
        if len({len(parts) for parts in gate_ups}) != 1:
            return super().mixture_of(choice, experts, own_experts)
        by_part = [NativeLinears.joined(parts) for parts in zip(*gate_ups, strict=True)]
        joined = [part for part in by_part if part is not None]
        if len(joined) < len(by_part) or (joined_downs := NativeLinears.joined(downs)) is None:
            return super().mixture_of(choice, experts, own_experts)
        return NativeMixture(
            choice,
            joined,
            joined_downs,
            choice.mixture.activation,
            self._kernels,
            self._experts_products,
            self._gated,
            own_experts,
        )

    def embed(self, tokens: InputTokens, weight_VE: Matrix, first_token: int) -> torch.Tensor:
        if not isinstance(weight_VE, torch.Tensor):
            return super().embed(tokens, weight_VE, first_token)
        assert tokens.sources_T is None, "without a device sampler the host knows all tokens"
        out_TE = self._embedded.borrow(weight_VE.dtype, len(tokens.ids_T), weight_VE.shape[1])
        self._kernels.embed(tokens.ids_T, weight_VE, first_token, out_TE)
        return out_TE

    def rms_norm(self, x_TE: torch.Tensor, weight_E: torch.Tensor, eps: float) -> torch.Tensor:
        out_TE = self._normed.borrow(x_TE.dtype, *x_TE.shape)
        self._kernels.add_rms_norm(None, x_TE, weight_E, eps, out_TE)
        return out_TE

    def add_rms_norm(
        self, x_TE: torch.Tensor, residual_TE: torch.Tensor, weight_E: torch.Tensor, eps: float
    ) -> torch.Tensor:
        out_TE = self._normed.borrow(x_TE.dtype, *x_TE.shape)
        self._kernels.add_rms_norm(x_TE, residual_TE, weight_E, eps, out_TE)
        return out_TE

    def add_normed(
        self, x_TE: torch.Tensor, residual_TE: torch.Tensor, weight_E: torch.Tensor, eps: float
    ) -> None:
        self._kernels.add_normed(x_TE, residual_TE, weight_E, eps)

    def gated(self, gate_up: LinearLayer, x_TE: Activations, gate: Activation = Gate.SILU) -> torch.Tensor:
        if gate is Gate.SILU and isinstance(gate_up, NativeLinear) and gate_up.can_gate:
            assert isinstance(x_TE, torch.Tensor)
            out_TI = self._gated.borrow(x_TE.dtype, len(x_TE), gate_up.num_outputs // 2)
            gate_up.gated(x_TE, out_TI)
            return out_TI
        gate_up_TM = gate_up(x_TE)
        out_TI = self._gated.borrow(gate_up_TM.dtype, len(gate_up_TM), gate_up_TM.shape[1] // 2)
        self._kernels.gate_mul(gate_up_TM, gate, out_TI)
        return out_TI

    def try_add(self, linear: LinearLayer, x_TI: Activations, residual_TE: torch.Tensor) -> bool:
        if isinstance(linear, NativeLinear):
            linear.add_(residual_TE, x_TI)
            return True
        return False
