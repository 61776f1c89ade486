"""Every kernel over the shapes and dtypes of real models (`--shapes many`, for a GPU), and over a small one anywhere.

What each kernel does at its edges is tested in the file of its name; here only sizes differ.
"""

from typing import Any
from zlib import crc32

import pytest
import torch
import torch.nn.functional as F

from engine.activation import Gate
from engine.kernels.attention_tuning import AttentionShape, decode_tuning, prefill_tuning
from engine.kernels.copy_blocks import copy_blocks
from engine.kernels.embedding import embed
from engine.kernels.expert_linear import ExpertMatrices, expert_linear
from engine.kernels.gate_mul import gate_mul
from engine.kernels.logprobs import token_logprobs
from engine.kernels.paged_attention import Softmax
from engine.kernels.quantize_fp8 import quantize_fp8
from engine.kernels.rms_norm import add_rms_norm_, rms_norm
from engine.kernels.rope_store import rope_store
from engine.kernels.sample import sample
from engine.kernels.sampling_parts import allocate_workspace
from engine.kernels.skinny_epilogue import InputNorm
from engine.kernels.skinny_linear import norms_input, skinny_add_, skinny_gate_mul, skinny_linear
from engine.kernels.sort_pairs import ExpertPairs
from engine.layers.fp8 import quantize_rows
from tests.kernels.attention_steps import Case, PagedStep
from tests.kernels.float8 import assert_same_float8
from tests.kernels.references import (
    add_rms_norm_reference_,
    embed_reference,
    gate_mul_reference,
    rms_norm_reference,
    rope_store_reference,
    sample_reference,
    token_logprobs_reference,
)
from tests.kernels.test_sample import params

F32, F16, BF16, FP8 = torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn
DTYPES = (BF16, F16, F32)
TOKENS = (1, 7, 64, 511, 4096)
HEADS = (
    (32, 8, 128),
    (28, 4, 128),
    (14, 2, 64),
    (40, 8, 128),
    (16, 16, 96),
    (12, 4, 80),
    (8, 1, 256),
    (9, 3, 64),
)
"""Query heads, kv heads, head size."""

PRODUCTS = ((576, 960), (896, 1152), (4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096), (12288, 4096))
"""Inputs and outputs of linear layers."""

Shapes = dict[str, tuple[list[Any], list[Any]]]


def _attention_cases() -> list[Any]:
    """(heads, block size, KV dtype, query dtype, queries and contexts of each request, window)."""
    steps = {
        "decodes": ([1] * 5, [1, 64, 1000, 4097, 30000]),
        "many decodes": ([1] * 256, [1 + 17 * i % 1500 for i in range(256)]),
        "a chunk": ([700], [1500]),
        "a prompt": ([2048], [2048]),
        "mixed": ([1, 300, 1, 64, 5, 1], [900, 300, 33, 640, 2000, 4096]),
    }
    kinds: list[Any] = [(heads, block_size, BF16, BF16, None) for heads in HEADS for block_size in (16, 64)]
    for heads in HEADS[:3]:
        kinds += [(heads, 64, F16, F16, None), (heads, 64, BF16, BF16, 333), (heads, 16, BF16, BF16, 333)]
        kinds += [(heads, 128, BF16, BF16, None), (heads, 64, FP8, BF16, None), (heads, 32, F32, F32, 100)]
    return [
        (heads, block_size, kv_dtype, dtype, step, window)
        for heads, block_size, kv_dtype, dtype, window in kinds
        for step in steps.values()
    ]


SHAPES: Shapes = {
    "test_gate_mul": (
        [(1, 32, F32)],
        [
            (tokens, width, dtype)
            for tokens in TOKENS
            for width in (1536, 4864, 12288, 14336)
            for dtype in DTYPES
        ],
    ),
    "test_rms_norm": (
        [(1, 32, F32)],
        [
            (tokens, width, dtype)
            for tokens in TOKENS
            for width in (576, 896, 4096, 5120, 16384)
            for dtype in DTYPES
        ],
    ),
    "test_quantize_fp8": (
        [(1, 32, F32)],
        [(tokens, width, dtype) for tokens in TOKENS for width in (576, 4096, 14336) for dtype in DTYPES],
    ),
    "test_embed": (
        [(2, 32, 50, F32)],
        [(t, e, v, d) for t in TOKENS for e, v in ((4096, 128_256), (896, 151_936)) for d in DTYPES],
    ),
    "test_rope_store": (
        [((2, 1, 16), 2, F32, F32, True)],
        [
            (heads, tokens, dtype, kv_dtype, norm)
            for heads in HEADS
            for tokens in (1, 7, 256, 2048)
            for dtype, kv_dtype in ((BF16, BF16), (F16, F16), (F32, F32), (BF16, FP8))
            for norm in (False, True)
        ],
    ),
    "test_attention": ([((2, 1, 16), 16, F32, F32, ([1, 2], [3, 20]), None)], _attention_cases()),
    "test_greedy_rows": (
        [(1, 60, F32)],
        [
            (rows, vocab, d)
            for rows in (1, 8, 64, 256)
            for vocab in (49_152, 128_256, 151_936)
            for d in DTYPES
        ],
    ),
    "test_random_rows": (
        [(2, 60, F32)],
        [(rows, vocab, dtype) for rows in (1, 32) for vocab in (128_256, 151_936) for dtype in (BF16, F32)],
    ),
    "test_logprobs": (
        [(2, 60, F32)],
        [(rows, vocab, dtype) for rows in (1, 64) for vocab in (128_256, 151_936) for dtype in DTYPES],
    ),
    "test_skinny_linear": (
        [(2, 32, 20, F32)],
        [
            (tokens, inputs, outputs, dtype)
            for tokens in (1, 2, 3, 4, 5, 8, 15, 16)
            for inputs, outputs in (*PRODUCTS, (896, 151_936), (4096, 128_256))
            for dtype in DTYPES
        ],
    ),
    "test_fused_products": (
        [(2, 32, 20, F32), (16, 32, 20, F32)],
        [
            (tokens, inputs, outputs, dtype)
            for tokens in (1, 2, 3, 4, 5, 16)
            for inputs, outputs in PRODUCTS
            for dtype in DTYPES
        ],
    ),
    "test_expert_linear": (
        [(2, 32, 20, (3, 2), F32)],
        [
            (tokens, inputs, outputs, experts, dtype)
            for tokens in (1, 16, 17, 100, 500, 2000)
            for inputs, outputs, experts in (
                (2048, 1536, (128, 8)),
                (768, 2048, (128, 8)),
                (4096, 7168, (8, 2)),
            )
            for dtype in DTYPES
        ],
    ),
    "test_copy_blocks": (
        [(3, 64)],
        [(count, size) for count in (1, 64, 300) for size in (2**15, 2**20, 8 * 2**20)],
    ),
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    few, many = SHAPES[metafunc.function.__name__]
    # The option exists only if pytest was called with this folder.
    shapes = many if metafunc.config.getoption("--shapes", default="few") == "many" else few
    metafunc.parametrize("shape", shapes, ids=[_name(shape) for shape in shapes])


def _name(shape: tuple[Any, ...]) -> str:
    text = "-".join(str(part).removeprefix("torch.") for part in shape)
    return text if len(text) < 120 else f"{text[:100]}-{crc32(text.encode()):08x}"


def test_gate_mul(shape: Any, device: torch.device, generator: torch.Generator) -> None:
    tokens, width, dtype = shape
    x_TM = _randn(generator, device, dtype, tokens, 2 * width)
    torch.testing.assert_close(gate_mul(x_TM), gate_mul_reference(x_TM))


def test_rms_norm(shape: Any, device: torch.device, generator: torch.Generator) -> None:
    tokens, width, dtype = shape
    x_TE, residual_TE = (_randn(generator, device, dtype, tokens, width) for _ in range(2))
    weight_E = _randn(generator, device, dtype, width)
    torch.testing.assert_close(rms_norm(x_TE, weight_E, 1e-5), rms_norm_reference(x_TE, weight_E, 1e-5))
    expected_residual_TE = residual_TE.clone()
    expected_TE = add_rms_norm_reference_(x_TE, expected_residual_TE, weight_E, 1e-5)
    torch.testing.assert_close(add_rms_norm_(x_TE, residual_TE, weight_E, 1e-5), expected_TE)
    torch.testing.assert_close(residual_TE, expected_residual_TE)


def test_quantize_fp8(shape: Any, device: torch.device, generator: torch.Generator) -> None:
    tokens, width, dtype = shape
    x_TE = _randn(generator, device, dtype, tokens, width)
    q_TE, scales_T1 = quantize_fp8(x_TE)
    expected_TE, expected_scales_T1 = quantize_rows(x_TE)
    torch.testing.assert_close(scales_T1, expected_scales_T1, rtol=0, atol=0)
    assert_same_float8(q_TE, expected_TE)


def test_embed(shape: Any, device: torch.device, generator: torch.Generator) -> None:
    tokens, width, vocab, dtype = shape
    weight_VE = _randn(generator, device, dtype, vocab, width)
    ids_T = _randint(generator, device, 0, vocab, tokens)
    sources_T = _randint(generator, device, -1, 8, tokens)
    sampled_R = _randint(generator, device, 0, vocab, 8)
    for first_token in (0, vocab // 2):
        actual_TE = embed(ids_T, sources_T, sampled_R, weight_VE, first_token)
        expected_TE = embed_reference(ids_T, sources_T, sampled_R, weight_VE, first_token)
        torch.testing.assert_close(actual_TE, expected_TE, rtol=0, atol=0)


def test_rope_store(shape: Any, device: torch.device, generator: torch.Generator) -> None:
    (num_q_heads, num_kv_heads, head_dim), tokens, dtype, kv_dtype, has_norm = shape
    block_size, num_blocks = 16, tokens // 16 + 2
    qkv_TXD = _randn(generator, device, dtype, tokens, num_q_heads + 2 * num_kv_heads, head_dim)
    kv_NKHSD = torch.zeros(
        num_blocks, 2, num_kv_heads, block_size, head_dim, dtype=torch.float32, device=device
    ).to(kv_dtype)
    positions_T = _randint(generator, device, 0, 4096, tokens)
    slots_T = (
        (torch.randperm(num_blocks * block_size, generator=generator)[:tokens]).to(torch.int32).to(device)
    )
    slots_T[tokens // 2 :: 5] = -1
    angles_PF = torch.outer(torch.arange(4096), 500_000.0 ** -torch.linspace(0, 1, head_dim // 2))
    cos_sin_PD = torch.cat((angles_PF.cos(), angles_PF.sin()), -1).to(device)
    norm_D = _randn(generator, device, dtype, head_dim) if has_norm else None
    expected_TXD, expected_NKHSD = qkv_TXD.clone(), kv_NKHSD.clone()
    rope_store(qkv_TXD, positions_T, slots_T, cos_sin_PD, kv_NKHSD, q_norm_D=norm_D, k_norm_D=norm_D)
    rope_store_reference(
        expected_TXD, positions_T, slots_T, cos_sin_PD, expected_NKHSD, q_norm_D=norm_D, k_norm_D=norm_D
    )
    torch.testing.assert_close(qkv_TXD, expected_TXD)
    if kv_dtype is FP8:
        assert_same_float8(kv_NKHSD, expected_NKHSD, max_share=0.01)
    else:
        torch.testing.assert_close(kv_NKHSD, expected_NKHSD)


def test_attention(shape: Any, device: torch.device, generator: torch.Generator) -> None:
    """Both tunings. The grid is that of a graph for a whole device, so long contexts are split."""
    (num_q_heads, num_kv_heads, head_dim), block_size, kv_dtype, dtype, (queries, contexts), window = shape
    attention = AttentionShape(
        num_q_heads, num_kv_heads, head_dim, block_size, dtype.itemsize, kv_dtype.itemsize
    )
    tuning = decode_tuning(attention) if max(queries) == 1 else prefill_tuning(attention)
    num_programs = 2 if device.type == "cpu" else 132 * tuning.programs_per_multiprocessor
    softmax = Softmax(head_dim**-0.5, window)
    step = PagedStep(
        Case(queries, contexts, attention, tuning, softmax, num_programs, dtype, kv_dtype), device, generator
    )
    step.run()
    assert not step.out_TQD.isnan().any(), "rows that were not written"
    want = step.reference().double()
    error = (step.out_TQD.double() - want).norm() / want.norm()
    assert error < (2e-5 if dtype is F32 else 2e-3 if dtype is F16 else 1e-2)


def test_greedy_rows(shape: Any, device: torch.device, generator: torch.Generator) -> None:
    rows, vocab, dtype = shape
    logits_RV = _randn(generator, device, dtype, rows, vocab)
    tokens_R = _sampled(logits_RV, params(rows, temperature=0.0), is_greedy=True)
    assert tokens_R.tolist() == logits_RV.cpu().float().argmax(-1).tolist()


def test_random_rows(shape: Any, device: torch.device, generator: torch.Generator) -> None:
    """Rows have all kinds of filters. Logarithms differ in the last place, so one row in many hundreds may change."""
    rows, vocab, dtype = shape
    logits_RV = 3 * _randn(generator, device, dtype, rows, vocab)
    filters: list[dict[str, Any]] = [
        {},
        {"top_k": 50},
        {"top_p": 0.9},
        {"top_k": 100, "top_p": 0.8, "min_p": 0.01},
    ]
    num_wrong = 0
    for filter_ in filters:
        params_RF = params(rows, **filter_)
        expected_R = sample_reference(logits_RV.cpu(), params_RF)
        num_wrong += int((_sampled(logits_RV, params_RF, is_greedy=False).cpu() != expected_R).sum())
    assert num_wrong <= rows * len(filters) // 50


def test_logprobs(shape: Any, device: torch.device, generator: torch.Generator) -> None:
    rows, vocab, dtype = shape
    logits_RV = 3 * _randn(generator, device, dtype, rows, vocab)
    rows_L = torch.arange(rows, dtype=torch.int32, device=device)
    tokens_R = _randint(generator, device, 0, vocab, rows)
    actual, expected = (
        compute(logits_RV, rows_L, tokens_R) for compute in (token_logprobs, token_logprobs_reference)
    )
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-4)


def test_skinny_linear(shape: Any, device: torch.device, generator: torch.Generator) -> None:
    tokens, inputs, outputs, dtype = shape
    x_TI = _randn(generator, device, dtype, tokens, inputs)
    weight_OI, bias_O = (
        _randn(generator, device, dtype, outputs, inputs),
        _randn(generator, device, dtype, outputs),
    )
    want = x_TI.double() @ weight_OI.double().T + bias_O.double()
    error = (skinny_linear(x_TI, weight_OI, bias_O).double() - want).norm() / want.norm()
    assert error < (1e-5 if dtype is F32 else 1e-3 if dtype is F16 else 5e-3)


def test_fused_products(shape: Any, device: torch.device, generator: torch.Generator) -> None:
    """Products that activate pairs, norm x if it is in registers, or add to the output."""
    tokens, inputs, outputs, dtype = shape
    x_TI = _randn(generator, device, dtype, tokens, inputs)
    weight_OI = _randn(generator, device, dtype, outputs, inputs) * inputs**-0.5
    norm = InputNorm(_randn(generator, device, dtype, inputs), 1e-5)
    if norms_input(tokens, inputs, dtype.itemsize):
        gated_TP = skinny_gate_mul(x_TI, weight_OI, norm=norm)
    else:
        gated_TP = skinny_gate_mul(rms_norm(x_TI, norm.weight_I, norm.eps), weight_OI)
    normed_TI = rms_norm_reference(x_TI, norm.weight_I, norm.eps).double()
    gate_TP, up_TP = (normed_TI @ weight_OI.double().T).chunk(2, -1)
    y_TO = _randn(generator, device, dtype, tokens, outputs)
    want_TO = y_TO.double() + x_TI.double() @ weight_OI.double().T
    skinny_add_(y_TO, x_TI, weight_OI)
    for got, want in ((gated_TP, F.silu(gate_TP) * up_TP), (y_TO, want_TO)):
        error = (got.double() - want).norm() / want.norm()
        assert error < (1e-5 if dtype is F32 else 1e-3 if dtype is F16 else 1e-2)


def test_expert_linear(shape: Any, device: torch.device, generator: torch.Generator) -> None:
    tokens, inputs, outputs, (num_experts, num_chosen), dtype = shape
    x_TI = _randn(generator, device, dtype, tokens, inputs)
    weight_XOI = _randn(generator, device, dtype, num_experts, outputs, inputs) * inputs**-0.5
    experts_TK = torch.rand(tokens, num_experts, generator=generator).argsort(-1)[:, :num_chosen]
    experts_TK = experts_TK.to(torch.int32).contiguous().to(device)
    pairs = ExpertPairs.of(experts_TK, num_experts, num_experts)
    found_NO = expert_linear(x_TI, ExpertMatrices(weight_XOI), pairs)
    gated_NP = expert_linear(x_TI, ExpertMatrices(weight_XOI), pairs, activation=Gate.SILU)
    want_NO = torch.empty_like(found_NO, dtype=torch.float64)
    for expert in range(num_experts):
        is_its_N = (experts_TK == expert).flatten()
        rows_R = is_its_N.nonzero().squeeze(1) // num_chosen
        want_NO[is_its_N] = x_TI[rows_R].double() @ weight_XOI[expert].double().T
    gate_NP, up_NP = want_NO.chunk(2, -1)
    for found, want in ((found_NO, want_NO), (gated_NP, F.silu(gate_NP) * up_NP)):
        error = (found.double() - want).norm() / want.norm()
        assert error < (1e-5 if dtype is F32 else 1e-3 if dtype is F16 else 1e-2)


def test_copy_blocks(shape: Any, device: torch.device, generator: torch.Generator) -> None:
    count, size = shape
    source_NB = (
        _randint(generator, device, 0, 2**31 - 1, count * size // 4).view(torch.uint8).view(count, size)
    )
    target_NB = torch.zeros_like(source_NB)
    order_N = torch.randperm(count, generator=generator)
    pairs_P2 = torch.stack((order_N, torch.arange(count)), 1).to(torch.int32).to(device)
    copy_blocks(source_NB, target_NB, pairs_P2)
    assert torch.equal(target_NB, source_NB[order_N.to(device)])


def _sampled(logits_RV: torch.Tensor, params_RF: torch.Tensor, *, is_greedy: bool) -> torch.Tensor:
    rows, vocab = logits_RV.shape
    workspace = allocate_workspace(rows, vocab, logits_RV.device)
    tokens_R = torch.full((rows,), -1, dtype=torch.int32, device=logits_RV.device)
    flags_R = torch.full_like(tokens_R, -1)
    sample(logits_RV, None, params_RF.to(logits_RV.device), tokens_R, flags_R, workspace, is_greedy)
    assert not flags_R.any(), "these logits are finite"
    return tokens_R


def _randn(generator: torch.Generator, device: torch.device, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    made: torch.Tensor = torch.randn(
        *shape, dtype=dtype, device=device, generator=_on_device(generator, device)
    )
    return made


def _randint(
    generator: torch.Generator, device: torch.device, low: int, high: int, count: int
) -> torch.Tensor:
    return torch.randint(
        low, high, (count,), dtype=torch.int32, device=device, generator=_on_device(generator, device)
    )


def _on_device(generator: torch.Generator, device: torch.device) -> torch.Generator:
    """Seeded by the CPU's generator: drawn on the host, large tensors take seconds."""
    return torch.Generator(device).manual_seed(int(torch.randint(2**31, (), generator=generator)))
