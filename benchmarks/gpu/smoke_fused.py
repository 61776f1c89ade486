"""Smoke tests of fused products of few rows, experts' products, and launches that begin before others end.

Shape suffixes: T tokens, I input features, O output features, P pairs of outputs, E hidden size, K experts of
a token, N pairs of token and expert, X experts.
"""

from collections.abc import Iterator
from functools import partial

import torch

from benchmarks.gpu.smoke_case import Maker, Outputs, Shapes, SmokeCase
from engine.kernels.expert_linear import ExpertMatrices, expert_linear
from engine.kernels.routing import route_rows
from engine.kernels.skinny_epilogue import InputNorm
from engine.kernels.skinny_linear import norms_input, skinny_add_, skinny_gate_mul, skinny_linear
from engine.kernels.sort_pairs import ExpertPairs
from engine.kernels.sum_pairs import sum_pairs
from engine.layers.mixture import route
from engine.mixture_config import Mixture
from tests.kernels.references import (
    expert_linear_reference,
    gate_mul_reference,
    rms_norm_reference,
    skinny_linear_reference,
)

EPS = 1e-5
NUM_LINKS = 4
"""Number of pairs of products in a chain."""


def makers(shapes: Shapes) -> list[Maker]:
    """Makers of cases. One token is multiplied by sums and products, 4 and 16 tokens by the matrix units."""
    found = [
        partial(_fused, shapes, num_tokens, is_fp8) for num_tokens in (1, 4, 16) for is_fp8 in (False, True)
    ]
    found += [partial(_chain, shapes, num_tokens) for num_tokens in (1, 16)]
    counts = (1, 16, 40) if shapes.device.type == "cpu" else (1, 16, 40, 1000)
    return [*found, *(partial(_experts, shapes, num_tokens) for num_tokens in counts)]


def _fused(shapes: Shapes, num_tokens: int, is_fp8: bool) -> Iterator[SmokeCase]:
    """Products that normalize their input if possible, apply the activation to pairs, or add to the output."""
    # No kernel multiplies float32 with float8.
    dtype = torch.float16 if is_fp8 and shapes.dtype is torch.float32 else shapes.dtype
    x_TI = shapes.randn(num_tokens, shapes.hidden, dtype=dtype)
    weight_OI, scales_O = _weight(shapes, 2 * shapes.intermediate, shapes.hidden, dtype, is_fp8)
    is_fma = norms_input(num_tokens, shapes.hidden, weight_OI.dtype.itemsize)
    norm = InputNorm(shapes.randn(shapes.hidden, dtype=dtype), EPS) if is_fma else None
    file = "skinny_linear_fma" if is_fma else "skinny_linear_dot"
    name = f"{file}, {num_tokens} tokens" + (", float8" if is_fp8 else "")
    max_error = max(shapes.max_error, 1e-2 if is_fp8 else 0.0)
    add_OI = weight_OI[: shapes.hidden]
    add_scales_O = None if scales_O is None else scales_O[: shapes.hidden]

    def product(given_OI: torch.Tensor, given_O: torch.Tensor | None) -> torch.Tensor:
        normed_TI = x_TI if norm is None else rms_norm_reference(x_TI, norm.weight_I, EPS)
        return skinny_linear_reference(normed_TI, given_OI, None, given_O)

    def added(is_reference: bool) -> Outputs:
        y_TO = x_TI.flip(0).contiguous()
        if is_reference:
            return (y_TO + skinny_linear_reference(x_TI, add_OI, None, add_scales_O),)
        skinny_add_(y_TO, x_TI, add_OI, None, add_scales_O)
        return (y_TO,)

    yield SmokeCase(
        f"{name}, silu" + (" and norm" if norm else ""),
        (file, "skinny_epilogue"),
        lambda: (skinny_gate_mul(x_TI, weight_OI, None, scales_O, norm=norm),),
        lambda: (gate_mul_reference(product(weight_OI, scales_O)),),
        max_error,
    )
    yield SmokeCase(
        f"{name}, added",
        (file, "skinny_epilogue"),
        partial(added, False),
        partial(added, True),
        max_error,
    )
    if norm is not None:
        yield SmokeCase(
            f"{name}, norm",
            (file,),
            lambda: (skinny_linear(x_TI, add_OI, None, add_scales_O, norm=norm),),
            lambda: (product(add_OI, add_scales_O),),
            max_error,
        )


def _chain(shapes: Shapes, num_tokens: int) -> Iterator[SmokeCase]:
    """A chain of launches.

    Each reads what the previous launch wrote, and may begin before that launch has ended.
    """
    rows_TE = shapes.randn(num_tokens, shapes.hidden)
    gate_up_OE, _ = _weight(shapes, 2 * shapes.intermediate, shapes.hidden, shapes.dtype, False)
    down_EP, _ = _weight(shapes, shapes.hidden, shapes.intermediate, shapes.dtype, False)

    def chained(is_reference: bool) -> Outputs:
        residual_TE = rows_TE.clone()
        for _ in range(NUM_LINKS):
            if is_reference:
                gated_TP = gate_mul_reference(skinny_linear_reference(residual_TE, gate_up_OE))
                residual_TE += skinny_linear_reference(gated_TP, down_EP)
            else:
                skinny_add_(residual_TE, skinny_gate_mul(residual_TE, gate_up_OE), down_EP)
        return (residual_TE,)

    yield SmokeCase(
        f"{2 * NUM_LINKS} dependent launches, {num_tokens} tokens",
        ("dependent_launch",),
        partial(chained, False),
        partial(chained, True),
        shapes.max_error,
    )


def _experts(shapes: Shapes, num_tokens: int) -> Iterator[SmokeCase]:
    """A mixture of eight experts, two of them for each token: routes, multiplies twice and adds up."""
    mixture = Mixture(num_experts=8, num_chosen=2, intermediate_size=shapes.hidden, is_normalized=True)
    x_TE = shapes.randn(num_tokens, shapes.hidden)
    logits_TX = shapes.randn(num_tokens, mixture.num_experts)
    scale = shapes.hidden**-0.5
    gate_up = ExpertMatrices(shapes.randn(8, 2 * shapes.hidden, shapes.hidden) * scale)
    down = ExpertMatrices(shapes.randn(8, shapes.hidden, shapes.hidden) * scale)

    def ours() -> Outputs:
        experts_TK, weights_TK = route_rows(logits_TX, mixture)
        pairs = ExpertPairs.of(experts_TK, mixture.num_experts, mixture.num_experts)
        x_NI = expert_linear(x_TE, gate_up, pairs, activation=mixture.activation)
        y_NE = expert_linear(x_NI, down, pairs, factors_N=weights_TK.flatten())
        return (weights_TK, sum_pairs(y_NE, pairs))

    def torchs() -> Outputs:
        experts_TK, weights_TK = route(logits_TX, mixture)
        x_NI = gate_mul_reference(expert_linear_reference(x_TE, gate_up, experts_TK, None))
        y_NE = expert_linear_reference(x_NI, down, experts_TK, weights_TK.flatten())
        return (weights_TK, y_NE.float().unflatten(0, (num_tokens, 2)).sum(1).to(x_TE.dtype))

    yield SmokeCase(
        f"a mixture of experts, {num_tokens} tokens",
        ("routing", "sort_pairs", "expert_linear", "sum_pairs"),
        ours,
        torchs,
        shapes.max_error,
    )


def _weight(
    shapes: Shapes, num_outputs: int, num_inputs: int, dtype: torch.dtype, is_fp8: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A weight whose products are about as large as their inputs.

    In float8 it has a scale for each output.
    """
    weight_OI = shapes.randn(num_outputs, num_inputs, dtype=dtype)
    if not is_fp8:
        return weight_OI * num_inputs**-0.5, None
    scales_O = torch.linspace(0.5, 1.5, num_outputs, device=shapes.device) * num_inputs**-0.5
    return weight_OI.to(torch.float8_e4m3fn), scales_O
