"""Smoke tests of attention to latents: split decodes, a chunk, float8 caches, and how latents are stored.

Shape suffixes: T tokens, P queries and latent of a token, D numbers of each, X positions, R rotated part, N
blocks, S tokens of a block.
"""

from collections.abc import Iterator
from functools import partial

import torch

from benchmarks.gpu.smoke_attention import NUM_PROGRAMS
from benchmarks.gpu.smoke_case import Maker, Outputs, Shapes, SmokeCase
from engine.kernels.attention_tuning import AttentionShape, latent_tuning
from engine.kernels.latent_store import latent_store
from tests.kernels.attention_steps import PLAIN, Case, LatentStep
from tests.kernels.test_latent_store import latent_store_reference

DEEPSEEK = (576, 512)
"""Length of a key, and of a latent."""
TINY = (48, 32)


def makers(shapes: Shapes) -> list[Maker]:
    """Makers for DeepSeek-V2-Lite's 16 heads, and for V3's 128 heads on four ranks and on one."""
    if shapes.device.type == "cpu":
        kinds = [(4, has_chunks, shapes.dtype, shapes.kv_dtype) for has_chunks in (False, True)]
    else:
        caches = (shapes.kv_dtype, torch.float8_e4m3fn)
        kinds = [
            (heads, has_chunks, shapes.dtype, kv_dtype)
            for heads in (16, 32, 128)
            for has_chunks in (False, True)
            for kv_dtype in caches
        ]
        kinds.append((16, False, torch.float32, torch.float32))
    return [*(partial(_attention, shapes, *kind) for kind in kinds), partial(_store, shapes)]


def _attention(
    shapes: Shapes, num_heads: int, has_chunks: bool, dtype: torch.dtype, kv_dtype: torch.dtype
) -> Iterator[SmokeCase]:
    is_dry = shapes.device.type == "cpu"
    size, rank = TINY if is_dry else DEEPSEEK
    shape = AttentionShape(
        num_heads, 1, size, shapes.block_size, dtype.itemsize, kv_dtype.itemsize, latent_rank=rank
    )
    if has_chunks:
        queries, contexts = ([3], [5]) if is_dry else ([300], [900])
    else:
        contexts = [3, 600] if is_dry else [1, 64, 700, 9000]
        queries = [1] * len(contexts)
    tuning, programs = latent_tuning(shape, has_chunks=has_chunks), 8 if is_dry else NUM_PROGRAMS
    case = Case(queries, contexts, shape, tuning, PLAIN, programs, dtype, kv_dtype)
    step = LatentStep(case, shapes.device, torch.Generator(shapes.device).manual_seed(0))
    assert has_chunks or step.plan.merges_RF.size, "nothing is split"

    def launch() -> Outputs:
        step.out_TQD.fill_(torch.nan)
        step.run()
        return (step.out_TQD.clone(),)

    names = [str(each).removeprefix("torch.") for each in (dtype, kv_dtype)]
    yield SmokeCase(
        f"latents, {'chunk' if has_chunks else 'decode'}, {num_heads} heads, {names[0]} over {names[1]}",
        ("latent_attention", "merge_partials"),
        launch,
        lambda: (step.reference(),),
        2e-5 if dtype is torch.float32 else 1e-2,
    )


def _store(shapes: Shapes) -> Iterator[SmokeCase]:
    size, rank = TINY if shapes.device.type == "cpu" else DEEPSEEK
    num_tokens, block_size = shapes.tokens, shapes.block_size
    rows_TPD = shapes.randn(num_tokens, 17, size)
    positions_T = shapes.int32(list(range(num_tokens)))
    slots_T = shapes.int32([block_size + 3 * token for token in range(num_tokens)])
    cos_sin_XR = shapes.randn(num_tokens, size - rank, dtype=torch.float32)

    def stored(is_reference: bool) -> Outputs:
        rotated_TPD = rows_TPD.clone()
        latents_NSD = torch.zeros(3, block_size, size, dtype=shapes.dtype, device=shapes.device)
        store = latent_store_reference if is_reference else latent_store
        store(rotated_TPD, positions_T, slots_T, cos_sin_XR, latents_NSD)
        return rotated_TPD, latents_NSD

    yield SmokeCase(
        "latent_store", ("latent_store",), partial(stored, False), partial(stored, True), shapes.max_error
    )
