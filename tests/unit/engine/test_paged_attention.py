"""Mixed steps over scattered, dirty blocks against attention written out."""

import itertools
import math

import pytest
import torch

from engine.kv_cache import KVBlockShape, KVPool
from engine.layers.chunk_attention import TILE, ChunkAttention, FusedAttention, TiledAttention
from engine.layers.paged_attention import PagedAttention
from engine.layers.rope import RotaryEmbedding, rotate_
from engine.layers.workspace import Workspace
from engine.rope_config import RopeConfig
from tests.factories.attention_steps import Heads, make_architecture, step_batch

CPU = torch.device("cpu")
KV_HEADS, PER_KV_HEAD, HEAD_DIM, BLOCK_SIZE = 2, 3, 8, 4
TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None) -> torch.Tensor:
    """q: N x Q x D, the last N of S positions; k, v: H x S x D."""
    num_queries, num_keys = q.shape[0], k.shape[1]
    k, v = (x.double().repeat_interleave(PER_KV_HEAD, 0) for x in (k, v))
    scores = torch.einsum("nqd,qsd->qns", q.double(), k) / math.sqrt(HEAD_DIM)
    for n, s in itertools.product(range(num_queries), range(num_keys)):
        position = num_keys - num_queries + n
        if s > position or (window is not None and s <= position - window):
            scores[:, n, s] = -math.inf
    return torch.einsum("qns,qsd->nqd", scores.softmax(-1), v)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("windows", [(None, None), (5, 5), (None, 3)], ids=str)
def test_a_mixed_step_equals_attention_written_out(
    dtype: torch.dtype, windows: tuple[int | None, ...]
) -> None:
    """Decodes in two groups, a first chunk and a later chunk, in a pool whose unused slots are all NaN."""
    torch.manual_seed(0)
    contexts = [
        (9, 1),
        (8, 1),
        (1, 1),
        (6, 6),
        (11, 5),
    ]  # (tokens to the end of the step, tokens of the step)
    pool = KVPool(40, KVBlockShape(2, KV_HEADS, BLOCK_SIZE, HEAD_DIM, dtype), CPU)
    pool.blocks_NLKHTD[1:] = torch.nan
    free = torch.randperm(39).add(1).tolist()
    tables = [[free.pop() for _ in range(-(-length // BLOCK_SIZE))] for length, _ in contexts]
    kv = [
        torch.randn(2, 2, KV_HEADS, length, HEAD_DIM).to(dtype) for length, _ in contexts
    ]  # layer, pair, ...
    for (length, new), table, values in zip(contexts, tables, kv, strict=True):
        for position in range(length - new):
            pool.blocks_NLKHTD[table[position // BLOCK_SIZE], :, :, :, position % BLOCK_SIZE] = values[
                :, :, :, position
            ]

    num_tokens = sum(new for _, new in contexts)
    q = torch.randn(num_tokens, KV_HEADS * PER_KV_HEAD, HEAD_DIM).to(dtype)
    architecture = make_architecture(Heads(KV_HEADS * PER_KV_HEAD, KV_HEADS, HEAD_DIM), windows)
    attention = PagedAttention(pool, architecture, KV_HEADS * PER_KV_HEAD)
    batch = step_batch(contexts, tables, BLOCK_SIZE)
    step = attention.prepare(batch)
    angles = RotaryEmbedding(RopeConfig(), HEAD_DIM, CPU).angles(torch.from_numpy(batch.positions_T), dtype)
    for layer, window in enumerate(windows):
        new_kv = torch.cat(
            [v[layer, :, :, length - n :] for v, (length, n) in zip(kv, contexts, strict=True)], dim=2
        ).permute(2, 0, 1, 3)
        qkv = torch.cat([q, new_kv.flatten(1, 2)], dim=1)
        rotate_(
            qkv[:, : (PER_KV_HEAD + 1) * KV_HEADS], angles[0], -angles[1]
        )  # so that it is q and k once rotated
        out = step(layer, qkv, None).view(q.shape)
        start = 0
        for (_, new), values in zip(contexts, kv, strict=True):
            rows = slice(start, start + new)
            expected = reference(q[rows], values[layer, 0], values[layer, 1], window)
            error = (out[rows].double() - expected).abs().max().item()
            assert error < TOLERANCE[dtype], (layer, window, start)
            start += new


@pytest.mark.parametrize("window", [None, 1, 7, 40, TILE + 1, 10_000])
@pytest.mark.parametrize("scale", [HEAD_DIM**-0.5, 0.7])
@pytest.mark.parametrize(("num_queries", "num_keys"), [(2, 2), (5, 30), (TILE, TILE), (TILE + 3, TILE + 50)])
def test_both_chunk_kernels_equal_attention_written_out(
    num_queries: int, num_keys: int, window: int | None, scale: float
) -> None:
    torch.manual_seed(1)
    q = torch.randn(num_queries, KV_HEADS * PER_KV_HEAD, HEAD_DIM)
    k, v = torch.randn(2, KV_HEADS, num_keys, HEAD_DIM)
    scores, weights = Workspace(CPU), Workspace(CPU)
    kernels: list[ChunkAttention] = [
        FusedAttention(num_queries, num_keys, window, torch.float32, CPU, scale=scale),
        TiledAttention(num_queries, num_keys, window, scores, weights, torch.float32, CPU, scale=scale),
    ]
    expected = fast_reference(q, k, v, window, scale)
    for kernel in kernels:
        out = torch.full_like(q, torch.nan)
        kernel(q, k, v, out)
        torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("window", [None, 7])
def test_scores_of_a_chunk_are_capped(window: int | None) -> None:
    torch.manual_seed(1)
    q, (k, v) = 4 * torch.randn(9, KV_HEADS * PER_KV_HEAD, HEAD_DIM), torch.randn(2, KV_HEADS, 30, HEAD_DIM)
    kernel = TiledAttention(
        9, 30, window, Workspace(CPU), Workspace(CPU), torch.float32, CPU, scale=0.7, cap=2.0
    )
    out = torch.full_like(q, torch.nan)
    kernel(q, k, v, out)
    expected = fast_reference(q, k, v, window, 0.7, cap=2.0)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-5)
    assert (expected - fast_reference(q, k, v, window, 0.7)).abs().max() > 0.1


def fast_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    window: int | None,
    scale: float,
    cap: float = math.inf,
) -> torch.Tensor:
    num_queries, num_keys = q.shape[0], k.shape[1]
    positions = torch.arange(num_keys - num_queries, num_keys).unsqueeze(1)
    hidden = torch.arange(num_keys) > positions
    if window is not None:
        hidden |= torch.arange(num_keys) <= positions - window
    k, v = (x.double().repeat_interleave(PER_KV_HEAD, 0) for x in (k, v))
    scores = torch.einsum("nqd,qsd->qns", q.double(), k) * scale
    if cap < math.inf:
        scores = cap * torch.tanh(scores / cap)
    return torch.einsum("qns,qsd->nqd", scores.masked_fill(hidden, -math.inf).softmax(-1), v)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_the_workspace_held_before_does_not_matter(dtype: torch.dtype) -> None:
    q, (k, v) = torch.randn(9, 6, HEAD_DIM).to(dtype), torch.randn(2, KV_HEADS, 20, HEAD_DIM).to(dtype)
    scores, weights = Workspace(CPU), Workspace(CPU)
    kernel = TiledAttention(9, 20, None, scores, weights, dtype, CPU, scale=1.0)
    outs = []
    for garbage in (0.0, torch.nan, torch.inf):
        for workspace in (scores, weights):
            workspace.borrow(dtype, 10_000).fill_(garbage)
        outs.append(torch.empty_like(q))
        kernel(q, k, v, outs[-1])
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])
