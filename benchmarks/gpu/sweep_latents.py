"""Cases of attention to latents for a sweep: decodes and chunks of DeepSeek-V2-Lite, and of V3 on one rank."""

from collections.abc import Iterator
from functools import partial

import torch

from benchmarks.gpu.setting import Setting
from benchmarks.gpu.sweep_attention import Step as Sizes
from benchmarks.gpu.sweep_case import Candidate, Launch, SweepCase, copies_beyond_cache, neighbours
from engine.kernels.attention_tuning import AttentionShape, AttentionTuning, latent_tuning
from tests.kernels.attention_steps import PLAIN, Case, LatentStep

ALTERNATIVES: dict[str, tuple[int, ...]] = {
    "block_m": (16, 32, 64),
    "block_n": (16, 32, 64),
    "num_warps": (4, 8),
    "num_stages": (2, 3, 4),
    "programs_per_multiprocessor": (1, 2),
}
SHAPES = {
    "V2-Lite": AttentionShape(16, 1, 576, 64, 2, 2, latent_rank=512),
    "V3": AttentionShape(128, 1, 576, 64, 2, 2, latent_rank=512),
}
TINY = {"tiny": AttentionShape(4, 1, 48, 32, 4, 4, latent_rank=32)}
STEPS = (Sizes(1, 1, 8192), Sizes(64, 1, 2048), Sizes(64, 1, 8192), Sizes(1, 512, 2048), Sizes(1, 2048, 2048))
TINY_STEPS = (Sizes(2, 1, 40), Sizes(1, 4, 6))


def cases(setting: Setting) -> Iterator[SweepCase]:
    for name, shape in (TINY if setting.is_dry else SHAPES).items():
        for sizes in TINY_STEPS if setting.is_dry else STEPS:
            num_bytes = sizes.num_requests * sizes.context * shape.head_dim * shape.kv_dtype_bytes
            copies = 2 if setting.is_dry else min(4, copies_beyond_cache(num_bytes))
            make = partial(_candidates, setting, shape, sizes)
            yield SweepCase(f"latents of {name}, {sizes.name}", copies, num_bytes, 1e-2, make)


def _candidates(setting: Setting, shape: AttentionShape, sizes: Sizes) -> dict[str, Candidate]:
    chosen = latent_tuning(shape, has_chunks=sizes.num_queries > 1)
    alternatives: dict[str, tuple[int, ...]] = {"num_stages": (3,)} if setting.is_dry else ALTERNATIVES
    # A load of the copy engine must stay within a block, and a tile has at least all heads of a token.
    return {
        name: partial(_launch, setting, shape, sizes, tuning)
        for name, tuning in neighbours(chosen, alternatives)
        if not (shape.uses_tma and tuning.block_n > shape.block_size) and tuning.block_m >= shape.group_size
    }


def _launch(
    setting: Setting, shape: AttentionShape, sizes: Sizes, tuning: AttentionTuning, copy: int
) -> Launch:
    """Launches attention and, if contexts are split, the merge, as a step does.

    All copies have the same numbers.
    """
    del copy
    dtype = torch.float32 if setting.is_dry else torch.bfloat16
    num_programs = tuning.grid(shape, setting.num_multiprocessors).num_programs
    queries, contexts = [sizes.num_queries] * sizes.num_requests, [sizes.context] * sizes.num_requests
    case = Case(queries, contexts, shape, tuning, PLAIN, num_programs, dtype, dtype)
    step = LatentStep(case, setting.device, torch.Generator().manual_seed(0))

    def launch() -> torch.Tensor:
        step.attend()
        if step.plan.merges_RF.size:
            step.merge()
        return step.out_TQD

    return launch
