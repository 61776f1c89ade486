"""Attention by our own CPU kernels against the torch path, over random paged layouts."""

from dataclasses import replace

import pytest
import torch

from engine.batch import StepBatch
from engine.group_blocks import GroupBlocks
from engine.kv_cache import KVBlockShape
from engine.layers.attention import HeadNorm
from engine.layers.fp8 import FP8
from engine.layers.native_attention import is_supported
from engine.native.library import native_library
from engine.rope_config import RopeConfig
from tests.factories.attention_steps import (
    MIXED,
    Context,
    Heads,
    Layout,
    make_latents,
    make_layout,
    step_batch,
)

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}

pytestmark = pytest.mark.skipif(native_library() is None, reason="needs a C++ compiler")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("windows", [(None, None), (70, 3), (None, 500)], ids=str)
def test_a_mixed_step_equals_the_torch_path(dtype: torch.dtype, windows: tuple[int | None, ...]) -> None:
    layout = make_layout(MIXED, Heads(6, 2, 64), dtype, windows=windows)
    for layer in range(len(windows)):
        out, _ = layout.native_out(layer)
        error = (out.float() - layout.torch_out(layer).float()).abs().max().item()
        assert error < TOLERANCE[dtype], layer


@pytest.mark.parametrize(
    ("dtype", "scale", "cap"),
    [*((dtype, 0.5, cap) for dtype in DTYPES for cap in (None, 3.0)), (torch.float32, 2.0, None)],
    ids=str,
)
def test_scores_are_scaled_and_capped(dtype: torch.dtype, scale: float, cap: float | None) -> None:
    layout = make_layout(MIXED, Heads(6, 2, 64), dtype, windows=(None, 70))
    layout.architecture = replace(layout.architecture, attention_scale=scale, attention_cap=cap)
    for layer in range(2):
        out, _ = layout.native_out(layer)
        error = (out.float() - layout.torch_out(layer).float()).abs().max().item()
        assert error < 4 * TOLERANCE[dtype], layer  # larger scores are rounded in larger steps


def test_layers_rotate_by_their_own_tables() -> None:
    layout = make_layout(MIXED, Heads(6, 2, 64), torch.float32, windows=(None,) * 4)
    ropes = (RopeConfig(), None, RopeConfig(theta=100.0), RopeConfig(rotary_dim=24))
    layout.architecture = replace(layout.architecture, ropes=ropes)
    outs = [layout.native_out(layer)[0] for layer in range(4)]
    for layer, out in enumerate(outs):
        torch.testing.assert_close(out, layout.torch_out(layer), rtol=0, atol=2e-5)


def test_a_window_larger_than_any_context_is_none() -> None:
    contexts = [(300, 1), (90, 40)]
    windows = (None, 2**32 - 1, 2**62)
    layout = make_layout(contexts, Heads(4, 2, 64), torch.float32, windows=windows)
    for layer in range(len(windows)):
        torch.testing.assert_close(layout.native_out(layer)[0], layout.torch_out(layer), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "heads",
    [
        Heads(9, 3, 64),
        Heads(32, 8, 128),
        Heads(1, 1, 16),
        Heads(7, 1, 80),
        Heads(4, 4, 96),
        Heads(10, 2, 256),
    ],
    ids=str,
)
@pytest.mark.parametrize("block_size", [1, 3, 16, 32])
def test_heads_and_blocks_of_many_sizes(heads: Heads, block_size: int, dtype: torch.dtype) -> None:
    layout = make_layout([(150, 1), (33, 1), (97, 35), (40, 40)], heads, dtype, block_size=block_size)
    out, _ = layout.native_out(1)
    assert (out.float() - layout.torch_out(1).float()).abs().max().item() < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_pool_of_8_bit_floats(dtype: torch.dtype) -> None:
    layout = make_layout(MIXED, Heads(6, 2, 32), dtype, pool_dtype=FP8)
    out, pool = layout.native_out(0)
    # A last bit of a rotated key may become a whole unit of its 8 bits.
    assert (out.float() - layout.torch_out(0).float()).abs().mean().item() < 4e-3
    stored = pool.layers[0].slot_rows_RD[
        layout.pool.slot_rows(torch.from_numpy(layout.batch.blocks[0].slots_T))
    ]
    values = layout.qkv_TPD[:, -2:].reshape(-1, 32).to(FP8)
    assert torch.equal(stored.view(-1, 4, 32)[:, 2:].reshape(-1, 32).float(), values.float())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("num_heads", "rank", "rotated"), [(16, 512, 64), (4, 24, 8), (3, 60, 4), (96, 32, 16)]
)
def test_heads_that_share_a_latent(dtype: torch.dtype, num_heads: int, rank: int, rotated: int) -> None:
    """The rotated part is no value, so its part of the result may be anything."""
    layout = make_latents(MIXED, num_heads, rank, rotated, dtype)
    for layer in range(2):
        out, pool = layout.native_out(layer)
        expected = layout.torch_out(layer)
        by_head = (-1, num_heads, rank + rotated)
        error = (out.float() - expected.float()).view(by_head)[..., :rank].abs().max().item()
        assert error < TOLERANCE[dtype], layer
        assert torch.equal(layout.native_out(layer, num_threads=1)[0], out)
    stored = pool.layers[1].slot_rows_RD[
        layout.pool.slot_rows(torch.from_numpy(layout.batch.blocks[0].slots_T))
    ]
    assert torch.equal(stored[:, :rank], layout.qkv_TPD[:, -1, :rank]), "latents are stored as they are"


def test_latents_in_8_bits() -> None:
    layout = make_latents(MIXED, 4, 56, 8, torch.float32, pool_dtype=FP8)
    difference = (layout.native_out(1)[0] - layout.torch_out(1)).view(-1, 4, 64)[..., :56]
    # A last bit of a rotated key may become a whole unit of its 8 bits.
    assert difference.abs().mean().item() < 4e-3


@pytest.mark.parametrize("windows", [(None, None), (70, 3)], ids=str)
def test_a_pool_of_16_bits_beside_float32(windows: tuple[int | None, ...]) -> None:
    layout = make_layout(
        MIXED, Heads(6, 2, 32), torch.float32, windows=windows, pool_dtype=torch.bfloat16, block_size=3
    )
    out, pool = layout.native_out(1)
    # A last bit of a rotated key may become a whole unit of its 16 bits.
    torch.testing.assert_close(out, layout.torch_out(1), rtol=0, atol=2e-3)
    assert (out - layout.torch_out(1)).abs().mean().item() < 2e-5
    stored = pool.layers[1].slot_rows_RD[
        layout.pool.slot_rows(torch.from_numpy(layout.batch.blocks[0].slots_T))
    ]
    values = layout.qkv_TPD[:, -2:].reshape(-1, 32).bfloat16()
    assert torch.equal(stored.view(-1, 4, 32)[:, 2:].reshape(-1, 32), values)
    assert torch.equal(layout.native_out(1, num_threads=1)[0], out)


def test_heads_are_normed_before_the_rotation() -> None:
    layout = make_layout(MIXED, Heads(6, 2, 64), torch.float32)
    head_norm = HeadNorm(torch.rand(64) + 0.5, torch.rand(64) + 0.5, 6, 2, 1e-6)
    out, _ = layout.native_out(0, head_norm)
    torch.testing.assert_close(out, layout.torch_out(0, head_norm), rtol=0, atol=2e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [None, 128])
def test_sinks_take_weight_and_have_no_value(dtype: torch.dtype, window: int | None) -> None:
    """The sink of one head takes all weight, that of another one none. Threads may share a context, which
    changes no bit."""
    layout = make_layout([(2500, 1), *MIXED], Heads(6, 2, 64), dtype, windows=(window, None))
    sinks_Q = torch.tensor([300.0, -300.0, -2.0, 0.0, 1.5, 6.0])
    out_TX, _ = layout.native_out(0, sinks_Q=sinks_Q)
    expected_TX = layout.torch_out(0, sinks_Q=sinks_Q)
    torch.testing.assert_close(out_TX, expected_TX, rtol=0, atol=TOLERANCE[dtype])
    assert not out_TX[:, :64].any()
    plain_TX, _ = layout.native_out(0)
    assert torch.equal(out_TX[:, 64:128], plain_TX[:, 64:128])
    assert (out_TX - plain_TX)[:, 128:].abs().amax(0).unflatten(0, (4, 64)).amax(1).gt(0.01).all()
    for num_threads in (1, 3):
        assert torch.equal(layout.native_out(0, num_threads=num_threads, sinks_Q=sinks_Q)[0], out_TX)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("contexts", [[(2500, 1)], [(3000, 20)], MIXED], ids=str)
def test_the_number_of_threads_does_not_matter(contexts: list[Context], dtype: torch.dtype) -> None:
    """One long context is cut among threads, with the same result bit for bit."""
    layout = make_layout(contexts, Heads(3, 1, 64), dtype)
    alone, _ = layout.native_out(0, num_threads=1)
    for num_threads in (2, 3):
        assert torch.equal(layout.native_out(0, num_threads=num_threads)[0], alone)
    assert (alone.float() - layout.torch_out(0).float()).abs().max().item() < TOLERANCE[dtype]


def test_other_requests_of_the_step_do_not_matter() -> None:
    together = make_layout([(300, 1), (90, 1), (500, 60)], Heads(6, 2, 64), torch.float32)
    out, _ = together.native_out(0)
    (blocks,) = together.batch.blocks
    alone = StepBatch(
        input_ids_T=together.batch.input_ids_T,
        sources_T=together.batch.sources_T,
        positions_T=together.batch.positions_T[2:],
        num_decodes=0,
        starts_B=together.batch.starts_B[2:] - 2,
        num_tokens_B=together.batch.num_tokens_B[2:],
        context_lens_B=together.batch.context_lens_B[2:],
        num_blocks_B=together.batch.num_blocks_B[2:],
        blocks=(GroupBlocks(blocks.slots_T[2:], blocks.block_ids_BM[2:], ()),),
        sampling_rows_R=together.batch.sampling_rows_R,
        sampling_requests=(),
    )
    layout = Layout(together.architecture, together.pool, alone, together.qkv_TPD[2:], together.heads)
    assert torch.equal(layout.native_out(0)[0], out[2:])


@pytest.mark.parametrize(
    ("dtype", "pool_dtype"),
    [
        *((dtype, dtype) for dtype in DTYPES),
        (torch.bfloat16, FP8),
        (torch.float32, FP8),
        (torch.float32, torch.bfloat16),
    ],
    ids=str,
)
@pytest.mark.parametrize("window", [None, 100, 300], ids=str)
def test_neither_chunks_nor_decodes_matter(
    dtype: torch.dtype, pool_dtype: torch.dtype, window: int | None
) -> None:
    """A token's result is the same bit for bit as part of any chunk, or alone."""
    heads, length = Heads(6, 2, 64), 1500
    whole = make_layout([(length, length)], heads, dtype, windows=(window,), pool_dtype=pool_dtype)
    expected, pool = whole.native_out(0)
    table = whole.batch.blocks[0].block_ids_BM[0].tolist()
    chunks = [(0, 2), (31, 200), (333, 1030), (1490, 1500)]
    decodes = [(end - 1, end) for end in (1, 2, 64, 65, 100, 101, 255, 256, 257, 300, 777, 1500)]
    for start, end in (*chunks, *decodes):
        batch = step_batch([(end, end - start)], [table[: -(-end // 16)]], 16)
        part = Layout(whole.architecture, pool, batch, whole.qkv_TPD[start:end], heads)
        for num_threads in (1, 3):
            out, _ = part.native_out(0, num_threads=num_threads)
            assert torch.equal(out, expected[start:end]), (start, end)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "heads", [Heads(1, 1, 16), Heads(7, 1, 80), Heads(10, 2, 256), Heads(8, 8, 96)], ids=str
)
def test_decodes_of_any_heads_equal_a_chunk(heads: Heads, dtype: torch.dtype) -> None:
    whole = make_layout([(400, 400)], heads, dtype, block_size=3)
    expected, pool = whole.native_out(1)
    table = whole.batch.blocks[0].block_ids_BM[0].tolist()
    for end in (1, 17, 399):
        batch = step_batch([(end, 1)], [table[: -(-end // 3)]], 3)
        part = Layout(whole.architecture, pool, batch, whole.qkv_TPD[end - 1 : end], heads)
        assert torch.equal(part.native_out(1)[0], expected[end - 1 : end]), end


@pytest.mark.parametrize("size", [1e-39, 3e-38, 1e-36])
def test_neither_decodes_nor_threads_matter_if_results_are_nearly_zero(size: float) -> None:
    """Instructions for bfloat16 take subnormal numbers as 0."""
    heads, length = Heads(2, 1, 64), 1000  # several ranges, which are added up
    whole = make_layout([(length, length)], heads, torch.bfloat16)
    whole.qkv_TPD[:, -1] *= size
    expected, pool = whole.native_out(0, num_threads=1)
    assert torch.equal(whole.native_out(0, num_threads=3)[0], expected)
    batch = step_batch(
        [(length, 1)], [whole.batch.blocks[0].block_ids_BM[0].tolist()[: -(-length // 16)]], 16
    )
    part = Layout(whole.architecture, pool, batch, whole.qkv_TPD[-1:], heads)
    for num_threads in (1, 3):
        assert torch.equal(part.native_out(0, num_threads=num_threads)[0], expected[-1:])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_small_numbers_in_8_bits_are_not_zero(dtype: torch.dtype) -> None:
    """The smallest are subnormal."""
    layout = make_layout([(200, 200)], Heads(2, 1, 64), dtype, pool_dtype=FP8)
    layout.qkv_TPD[:, -1] *= 0.005
    out, expected = layout.native_out(0)[0].float(), layout.torch_out(0).float()
    assert (out - expected).abs().max() < 0.05 * expected.abs().max()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_wrong_numbers_stay_wrong(dtype: torch.dtype) -> None:
    """A NaN of the model must reach its logits, where it is noticed; other requests do not see it."""
    layout = make_layout([(100, 1), (90, 1), (80, 20)], Heads(6, 2, 64), dtype)
    for token in (0, 10):
        layout.qkv_TPD[token, 0, 0] = torch.nan
        out = layout.native_out(0)[0]
        assert out[token].isnan().any()
        assert not out[1].isnan().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_scores_whose_rounding_is_larger_than_weights_can_be_are_no_numbers(dtype: torch.dtype) -> None:
    layout = make_layout([(300, 1), (300, 300)], Heads(2, 1, 64), dtype)
    layout.qkv_TPD[:, :-1] *= 1e6
    out = layout.native_out(0)[0]
    assert out[1:].isnan().float().mean() > 0.9


def test_heads_that_the_kernels_cannot_compute() -> None:
    def shape(head_dim: int) -> KVBlockShape:
        return KVBlockShape(1, 1, 16, head_dim, torch.float32)

    assert is_supported(shape(64), 96)
    assert not is_supported(shape(64), 97)
    assert not is_supported(shape(8), 1)
    assert is_supported(shape(576), 96)
    assert not is_supported(shape(592), 1)
