"""Attention steps over pools with scattered blocks, computed by our own CPU kernels and by torch."""

import ctypes
import random
from dataclasses import dataclass, replace

import numpy as np
import torch

from baton.kv_groups import NULL_BLOCK_ID
from engine.batch import StepBatch
from engine.group_blocks import GroupBlocks
from engine.kv_cache import KVBlockShape, KVPool
from engine.latent_config import LatentAttention
from engine.layers.attention import HeadNorm
from engine.layers.native_attention import NativeAttention
from engine.layers.paged_attention import PagedAttention
from engine.model_config import ModelArchitecture
from engine.native.library import native_library
from engine.rope_config import RopeConfig
from tests.factories.kv_blocks import block_array

CPU = torch.device("cpu")
Context = tuple[int, int]
"""The number of tokens up to the end of the step, and how many of them the step computes."""
MIXED: list[Context] = [(700, 1), (65, 1), (64, 1), (1, 1), (130, 130), (300, 77), (2, 2), (1100, 40)]


@dataclass(frozen=True)
class Heads:
    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass
class Layout:
    """A pool with the KV of earlier steps in scattered blocks, and a step over it. Unused slots are NaN."""

    architecture: ModelArchitecture
    pool: KVPool
    batch: StepBatch
    qkv_TPD: torch.Tensor  # noqa: N815 - carries its shape, like local names do
    heads: Heads

    def torch_out(
        self, layer: int, head_norm: HeadNorm | None = None, sinks_Q: torch.Tensor | None = None
    ) -> torch.Tensor:
        pool = self._copied_pool()
        architecture = replace(self.architecture, has_sinks=sinks_Q is not None)
        attention = PagedAttention(pool, architecture, self.heads.num_heads, self.qkv_TPD.dtype)
        return attention.prepare(self.batch)(layer, self.qkv_TPD.clone(), head_norm, sinks_Q)

    def native_out(
        self,
        layer: int,
        head_norm: HeadNorm | None = None,
        num_threads: int = 2,
        sinks_Q: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, KVPool]:
        pool = self._copied_pool()
        attention = NativeAttention(
            _library(), pool, self.architecture, self.heads.num_heads, self.qkv_TPD.dtype
        )
        before = torch.get_num_threads()
        torch.set_num_threads(num_threads)
        try:
            out = attention.prepare(self.batch)(layer, self.qkv_TPD.clone(), head_norm, sinks_Q)
        finally:
            torch.set_num_threads(before)
        return out.clone(), pool

    def _copied_pool(self) -> KVPool:
        pool = KVPool(self.pool.num_blocks, self.pool.shape, CPU)
        block_array(pool)[:] = block_array(self.pool)
        return pool


def _library() -> ctypes.CDLL:
    library = native_library()
    assert library is not None
    return library


def make_layout(
    contexts: list[Context],
    heads: Heads,
    dtype: torch.dtype,
    *,
    windows: tuple[int | None, ...] = (None, None),
    block_size: int = 16,
    pool_dtype: torch.dtype | None = None,
    seed: int = 0,
    is_latent: bool = False,
) -> Layout:
    """Makes a pool and a step. Requests that decode come first, as in a real step."""
    torch.manual_seed(seed)
    num_blocks = 2 + sum(-(-length // block_size) for length, _ in contexts)
    shape = KVBlockShape(
        len(windows), heads.num_kv_heads, block_size, heads.head_dim, pool_dtype or dtype, is_latent
    )
    pool = KVPool(num_blocks, shape, CPU)
    values = torch.full((num_blocks, *shape.dimensions), torch.nan)
    free = list(range(1, num_blocks))
    random.Random(seed).shuffle(free)
    tables = [[free.pop() for _ in range(-(-length // block_size))] for length, _ in contexts]
    for (length, new), table in zip(contexts, tables, strict=True):
        for position in range(length - new):
            at = values[table[position // block_size], :, :, :, position % block_size]
            at.copy_(torch.randn(at.shape))
    values[NULL_BLOCK_ID] = 0.0
    pool.blocks_NLKHTD.copy_(values.to(shape.dtype))
    num_tokens = sum(new for _, new in contexts)
    num_rows = heads.num_heads + shape.num_planes * heads.num_kv_heads
    return Layout(
        architecture=make_architecture(heads, windows),
        pool=pool,
        batch=step_batch(contexts, tables, block_size),
        qkv_TPD=torch.randn(num_tokens, num_rows, heads.head_dim).to(dtype),
        heads=heads,
    )


def make_architecture(heads: Heads, windows: tuple[int | None, ...]) -> ModelArchitecture:
    return ModelArchitecture(
        vocab_size=1,
        hidden_size=1,
        intermediate_size=1,
        num_layers=len(windows),
        num_heads=heads.num_heads,
        num_kv_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
        max_position_embeddings=100_000,
        rms_norm_eps=1e-5,
        ropes=(RopeConfig(),) * len(windows),
        sliding_windows=windows,
        mixtures=(None,) * len(windows),
        attention_scale=heads.head_dim**-0.5,
        tie_word_embeddings=True,
        has_qkv_bias=False,
        has_o_bias=False,
        has_mlp_bias=False,
        has_qk_norm=False,
    )


def step_batch(contexts: list[Context], tables: list[list[int]], block_size: int) -> StepBatch:
    positions = [position for length, new in contexts for position in range(length - new, length)]
    rows = [table for (_, new), table in zip(contexts, tables, strict=True) for _ in range(new)]
    slots = [
        table[position // block_size] * block_size + position % block_size
        for position, table in zip(positions, rows, strict=True)
    ]
    lengths, num_tokens = (np.array(column) for column in zip(*contexts, strict=True))
    table_BM = np.zeros((len(tables), max(map(len, tables))), np.int64)
    for row, block_ids in zip(table_BM, tables, strict=True):
        row[: len(block_ids)] = block_ids
    tails = tuple(
        (table[-1], length % block_size)
        for (length, _), table in zip(contexts, tables, strict=True)
        if length % block_size
    )
    none = np.empty(0, dtype=np.int64)
    return StepBatch(
        input_ids_T=none,
        sources_T=none,
        positions_T=np.array(positions),
        num_decodes=int((num_tokens == 1).sum()),
        starts_B=np.cumsum(num_tokens) - num_tokens,
        num_tokens_B=num_tokens,
        context_lens_B=lengths,
        num_blocks_B=-(-lengths // block_size),
        blocks=(GroupBlocks(np.array(slots), table_BM, tails),),
        sampling_rows_R=none,
        sampling_requests=(),
    )


def make_latents(
    contexts: list[Context],
    num_heads: int,
    rank: int,
    rotated: int,
    dtype: torch.dtype,
    pool_dtype: torch.dtype | None = None,
) -> Layout:
    layout = make_layout(
        contexts, Heads(num_heads, 1, rank + rotated), dtype, pool_dtype=pool_dtype, is_latent=True
    )
    latent = LatentAttention(
        rank=rank, rotary_dim=rotated, plain_dim=1, value_dim=1, query_rank=None, is_interleaved=True
    )
    layout.architecture = replace(layout.architecture, latent=latent)
    return layout
