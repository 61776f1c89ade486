"""Smoke tests of the kernels around attention and sampling: norms, activations, products, rotation, embedding, copies.

Shape suffixes: T tokens, E hidden size, M columns of the gate and up projection, I input features, O output features, X
heads of the qkv projection, D head size, P positions, V vocabulary, N blocks, B bytes of a block.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from benchmarks.gpu.smoke_case import Maker, Outputs, Shapes, SmokeCase
from engine.kernels.copy_blocks import copy_blocks
from engine.kernels.embedding import embed
from engine.kernels.gate_mul import gate_mul, gate_mul_fp8
from engine.kernels.quantize_fp8 import quantize_fp8
from engine.kernels.rms_norm import add_rms_norm_, add_rms_norm_fp8_, rms_norm
from engine.kernels.rope_store import rope_store
from engine.kernels.skinny_linear import choose_launch, skinny_linear
from engine.kernels.skinny_linear_fma import FmaLaunch
from engine.layers.fp8 import quantize_rows
from tests.kernels.references import (
    add_rms_norm_reference_,
    copy_blocks_reference,
    embed_reference,
    gate_mul_fp8_reference,
    gate_mul_reference,
    rms_norm_fp8_reference,
    rms_norm_reference,
    rope_store_reference,
    skinny_linear_reference,
)

EPS = 1e-5


def makers(shapes: Shapes) -> list[Maker]:
    return [partial(make, shapes) for make in (_norms, _activations, _products, _rope, _embedding, _copy)]


def _norms(shapes: Shapes) -> Iterator[SmokeCase]:
    x_TE, weight_E = shapes.randn(shapes.tokens, shapes.hidden), shapes.randn(shapes.hidden)

    def added(is_reference: bool) -> Outputs:
        residual_TE = 2 * x_TE
        add = add_rms_norm_reference_ if is_reference else add_rms_norm_
        return add(x_TE, residual_TE, weight_E, EPS), residual_TE

    yield SmokeCase(
        "rms_norm",
        ("rms_norm",),
        lambda: (rms_norm(x_TE, weight_E, EPS),),
        lambda: (rms_norm_reference(x_TE, weight_E, EPS),),
        shapes.max_error,
    )
    yield SmokeCase(
        "add_rms_norm", ("rms_norm",), partial(added, False), partial(added, True), shapes.max_error
    )
    yield SmokeCase(
        "add_rms_norm, float8",
        ("rms_norm",),
        lambda: add_rms_norm_fp8_(x_TE, torch.zeros_like(x_TE), weight_E, EPS),
        lambda: rms_norm_fp8_reference(x_TE, weight_E, EPS),
        shapes.max_error_fp8,
    )
    yield SmokeCase(
        "quantize_fp8",
        ("quantize_fp8",),
        lambda: quantize_fp8(x_TE),
        lambda: quantize_rows(x_TE),
        shapes.max_error_fp8,
    )


def _activations(shapes: Shapes) -> Iterator[SmokeCase]:
    x_TM = shapes.randn(shapes.tokens, 2 * shapes.intermediate)
    yield SmokeCase(
        "gate_mul",
        ("gate_mul",),
        lambda: (gate_mul(x_TM),),
        lambda: (gate_mul_reference(x_TM),),
        shapes.max_error,
    )
    yield SmokeCase(
        "gate_mul_fp8",
        ("gate_mul",),
        lambda: gate_mul_fp8(x_TM),
        lambda: gate_mul_fp8_reference(x_TM),
        shapes.max_error_fp8,
    )


def _products(shapes: Shapes) -> Iterator[SmokeCase]:
    """Products: one token by sums and products, sixteen tokens on the matrix units."""
    weight_OI = shapes.randn(shapes.hidden, shapes.hidden)
    for num_tokens in (1, 16):
        x_TI = shapes.randn(num_tokens, shapes.hidden)
        launch = choose_launch(num_tokens, shapes.hidden, shapes.hidden, weight_OI.dtype.itemsize)
        file = "skinny_linear_fma" if isinstance(launch, FmaLaunch) else "skinny_linear_dot"
        yield SmokeCase(
            f"{file}, {num_tokens} tokens",
            (file,),
            partial(_product, skinny_linear, x_TI, weight_OI),
            partial(_product, skinny_linear_reference, x_TI, weight_OI),
            shapes.max_error,
        )


def _product(product: Callable[..., torch.Tensor], x_TI: torch.Tensor, weight_OI: torch.Tensor) -> Outputs:
    return (product(x_TI, weight_OI),)


def _rope(shapes: Shapes) -> Iterator[SmokeCase]:
    """Rotation with a padded row, whose slot is -1."""
    num_q_heads, num_kv_heads, head_dim = shapes.heads
    qkv_TXD = shapes.randn(shapes.tokens, num_q_heads + 2 * num_kv_heads, head_dim)
    positions_T = shapes.int32([5 * token for token in range(shapes.tokens)])
    slots_T = shapes.int32([*range(1, shapes.tokens), -1])
    angles_PF = torch.outer(torch.arange(64), 10_000.0 ** -torch.linspace(0, 1, head_dim // 2))
    cos_sin_PD = torch.cat((angles_PF.cos(), angles_PF.sin()), -1).to(shapes.device)

    def stored(is_reference: bool) -> Outputs:
        pool = (2, 2, num_kv_heads, shapes.block_size, head_dim)
        kv_NKHSD = torch.zeros(pool, dtype=shapes.kv_dtype, device=shapes.device)
        heads_TXD = qkv_TXD.clone()
        store = rope_store_reference if is_reference else rope_store
        store(heads_TXD, positions_T, slots_T, cos_sin_PD, kv_NKHSD)
        return heads_TXD, kv_NKHSD

    yield SmokeCase(
        "rope_store", ("rope_store",), partial(stored, False), partial(stored, True), shapes.max_error
    )


def _embedding(shapes: Shapes) -> Iterator[SmokeCase]:
    """The embedding. Every other id exists only on the device."""
    weight_VE = shapes.randn(shapes.vocab, shapes.hidden)
    ids_T = shapes.int32([7 * token % shapes.vocab for token in range(shapes.tokens)])
    sources_T = shapes.int32([0 if token % 2 else -1 for token in range(shapes.tokens)])
    sampled_R = shapes.int32([shapes.vocab - 1])
    yield SmokeCase(
        "embed",
        ("embedding",),
        lambda: (embed(ids_T, sources_T, sampled_R, weight_VE),),
        lambda: (embed_reference(ids_T, sources_T, sampled_R, weight_VE),),
        0.0,
    )


def _copy(shapes: Shapes) -> Iterator[SmokeCase]:
    size_bytes = 64 if shapes.device.type == "cpu" else 2**20
    source_NB = torch.arange(4 * size_bytes, device=shapes.device).remainder(251).to(torch.uint8).view(4, -1)
    pairs_P2 = shapes.int32([[1, 3], [2, 0]])

    def copied(is_reference: bool) -> Outputs:
        target_NB = torch.zeros_like(source_NB)
        (copy_blocks_reference if is_reference else copy_blocks)(source_NB, target_NB, pairs_P2)
        return (target_NB,)

    yield SmokeCase("copy_blocks", ("copy_blocks",), partial(copied, False), partial(copied, True), 0.0)
