"""check_attention: compares a worker's assembled attention kernels with torch, on this GPU.

Some assemblers silently produce wrong code for the kernels (engine/gpu/compiler.py). Only a test on this GPU can detect
this. So before a worker serves, it computes a prefill step and a decode step for each attention window, over random
numbers in its own pool. Each step runs NUM_RUNS times.

Shape suffixes: T tokens of the step, B its requests, M blocks of a table, Q query heads, P query, key and value heads,
N blocks, K the pair (keys, values), H kv heads, S tokens of a block, D head dimension.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from baton.errors import ConfigError
from engine.batch import StepBatch
from engine.gpu.compiler import Compiler
from engine.gpu.device_parts import DeviceParts
from engine.gpu.staged_forward import unstored_step
from engine.kernels.paged_attention import Softmax, paged_attention_reference
from engine.kv_cache import KVPool
from engine.layers.fp8 import as_bytes
from engine.loading.loader import LoadedModel

NUM_RUNS = 3
"""How often each step runs, since registers that are reused too early have wrong values only in some runs."""
CONTEXT = 700
"""Number of keys: enough to use every buffer several times, with a last block that is not full."""
CHUNK = 100
"""Tokens of the prefill step: at least one tile; the last tile is not full."""
NUM_DECODES = 4
QUERY_SCALE = 4.0
"""Standard deviation of queries. It makes the attention weights unequal: if they were equal, the check would not find
swapped weights."""
TOLERANCES = {torch.float32: 2**-13, torch.float16: 2**-9, torch.bfloat16: 2**-6}
"""Tolerances by dtype of queries and output, as shares of the weighted sum of |values|.

A 16-bit kernel rounds each weight and each result once, by at most half a unit in the last place. Together
this is one unit, 2^-10 or 2^-7 of the sum; the tolerance is twice as much. A float32 product is computed as
three TF32 products, so a score of 40 may be wrong by 1e-5, and its weight by the same share. An 8-bit cache
needs no other tolerance: both sides read the same 8-bit numbers, and the kernel's float16 represents them
exactly.
"""


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """One step's attention in one layer."""

    name: str
    run: Callable[[], torch.Tensor]
    """Computes the attention by the kernels: T x Q x D; for latents, without the rotated part."""
    expect: Callable[[], tuple[torch.Tensor, torch.Tensor]]
    """Computes the attention by torch in float64; also returns each number's tolerance. Both are float32 with the
    same shape."""


def check_attention(model: LoadedModel, parts: DeviceParts, pool: KVPool, compiler: Compiler) -> None:
    """ConfigError if a kernel's result differs from torch's by more than its tolerance in any of NUM_RUNS runs.

    The pool must be all zeros, and is all zeros again afterwards. Call `DeviceParts.rehearse` first: it compiles
    every kernel.
    """
    for case in attention_cases(model, parts, pool):
        want_TQD, allowed_TQD = case.expect()
        for run in range(NUM_RUNS):
            differences_TQD = (case.run().to(torch.float32) - want_TQD).abs()
            if bool((differences_TQD <= allowed_TQD).all()):  # and not NaN
                continue
            worst = int((differences_TQD - allowed_TQD).argmax())  # argmax takes NaN for the largest
            difference, allowed = differences_TQD.flatten()[worst].item(), allowed_TQD.flatten()[worst].item()
            raise ConfigError(
                f"attention, {case.name}: the Triton kernels differ from torch by {difference:.3g} in run {run + 1} of "
                f"{NUM_RUNS}, where rounding explains at most {allowed:.3g}, so this worker would give wrong tokens. "
                f"{compiler.advice}"
            )


def attention_cases(model: LoadedModel, parts: DeviceParts, pool: KVPool) -> Iterator[AttentionCase]:
    """A prefill step and a decode step for every window that layers have.

    While a case runs, the pool's blocks hold random numbers in that layer; they are zeros again before the next one.
    """
    windows, places = model.architecture.sliding_windows, model.layer_groups.places
    room = min(CONTEXT, parts.limits.max_model_len, (pool.num_blocks - 1) * pool.shape.block_size)
    generator = torch.Generator(model.device).manual_seed(0)
    for window in dict.fromkeys(windows):
        layer = windows.index(window)
        suffix = "" if window is None else f", window of {window}"
        for name, batch in (
            (f"prefill{suffix}", _chunk(room, parts)),
            (f"decode{suffix}", _decodes(room, parts)),
        ):
            num_blocks = 1 + int(batch.blocks[0].block_ids_BM.max())
            kv_NKHSD = pool.blocks_NLKHTD[:num_blocks, places[layer][1]]
            random = torch.randn(kv_NKHSD[1:].shape, generator=generator, device=model.device)
            kv_NKHSD[1:].copy_(random.to(pool.shape.dtype))
            try:
                yield _case(name, model, parts, kv_NKHSD, layer, batch, generator)
            finally:
                as_bytes(kv_NKHSD).zero_()


def _case(
    name: str,
    model: LoadedModel,
    parts: DeviceParts,
    kv_NKHSD: torch.Tensor,
    layer: int,
    batch: StepBatch,
    generator: torch.Generator,
) -> AttentionCase:
    """One case with random queries, which lie within the output of the projection, as in the model. `kv_NKHSD`: the
    layer's KV in the pool."""
    a, num_heads = model.architecture, model.num_heads
    _, num_planes, num_kv_heads, _, head_dim = kv_NKHSD.shape
    shape_TPD = (batch.num_tokens, num_heads + num_planes * num_kv_heads, head_dim)
    qkv_TPD = torch.randn(shape_TPD, generator=generator, device=model.device).mul_(QUERY_SCALE)
    q_TQD = qkv_TPD.to(model.dtype)[:, :num_heads]
    softmax = Softmax(a.attention_scale, a.sliding_windows[layer], a.attention_cap)
    sinks_Q = None
    if a.has_sinks:
        sinks_Q = torch.randn(num_heads, generator=generator, device=model.device).mul_(QUERY_SCALE)
    block_ids_BM = torch.from_numpy(batch.blocks[0].block_ids_BM).to(model.device)

    def expect() -> tuple[torch.Tensor, torch.Tensor]:
        exact_NKHSD = kv_NKHSD.to(torch.float32, copy=True)
        if a.latent is not None:  # keys that are values, too
            exact_NKHSD = exact_NKHSD.repeat(1, 2, 1, 1, 1)
        step = (block_ids_BM, batch.num_tokens_B.tolist(), batch.context_lens_B.tolist(), softmax, sinks_Q)
        want_TQD = paged_attention_reference(q_TQD.to(torch.float32), exact_NKHSD, *step)
        exact_NKHSD[:, 1].abs_()
        sum_TQD = paged_attention_reference(q_TQD.to(torch.float32), exact_NKHSD, *step)
        num_values = head_dim if a.latent is None else a.latent.rank
        return want_TQD[..., :num_values], sum_TQD.mul_(TOLERANCES[model.dtype])[..., :num_values]

    return AttentionCase(name, lambda: parts.forward.attend(batch, layer, q_TQD, sinks_Q), expect)


def _chunk(room: int, parts: DeviceParts) -> StepBatch:
    """The last tokens of one prompt of `room` tokens."""
    num_tokens = min(CHUNK, room, parts.limits.max_num_batched_tokens)
    return _step([num_tokens], [room], parts)


def _decodes(room: int, parts: DeviceParts) -> StepBatch:
    """A few decodes, with contexts of `room` tokens and fewer."""
    limits = parts.limits
    count = min(NUM_DECODES, room, limits.max_num_seqs, limits.max_num_batched_tokens)
    return _step([1] * count, [room - room * row // count for row in range(count)], parts)


def _step(num_tokens: list[int], context_lens: list[int], parts: DeviceParts) -> StepBatch:
    """Requests that share blocks 1, 2, ..., each in its own order."""
    num_tokens_B, context_lens_B = np.array(num_tokens), np.array(context_lens)
    block_size = parts.forward.block_size
    num_blocks_B = -(-context_lens_B // block_size)
    block_ids_BM = np.zeros((len(num_tokens), int(num_blocks_B.max())), np.int64)
    generator = np.random.default_rng(0)
    for ids_M, count in zip(block_ids_BM, num_blocks_B, strict=True):
        ids_M[:count] = generator.permutation(count) + 1
    return unstored_step(num_tokens_B, context_lens_B, block_ids_BM, block_size, parts.forward.groups)
