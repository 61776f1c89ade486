"""DeviceParts: forward pass and sampler for a device that works by itself; the one module that knows Triton is there.

Shape suffixes: R rows that sample, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import triton

from baton.sampling import SamplingParams
from baton.step import NewRequestData
from engine.batch import RequestState
from engine.device import mark
from engine.device_sampler import DeviceSampler
from engine.grammar import GrammarCompiler
from engine.graphs import Recorder, decode_sizes
from engine.kernels.copy_blocks import copy_blocks
from engine.kv_cache import HostBlocks, KVPool, copy_one_by_one
from engine.layers.triton_attention import TritonAttention
from engine.loader import LoadedModel
from engine.runner import ModelRunner
from engine.staged_forward import StagedForward
from engine.step_limits import StepLimits

MIN_COPY_BYTES = 512 * 1024
"""Blocks from this size on are swapped by the copy engine, one copy each: it needs some 10 us for each, in which PCIe
moves as much, and no multiprocessor. Smaller ones go by one launch of our own for all."""

# Products and sums are fused, as ever; Triton 3.9 warns where nobody says so, and later versions will not do it.
triton.knobs.language.default_fp_fusion = True

REHEARSED = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.7, top_k=50, top_p=0.9, min_p=0.01, seed=0),
    SamplingParams(temperature=1.0, seed=0, repetition_penalty=1.1, logit_bias={0: -1.0}, logprobs=1),
)
"""Between them they need every kernel of sampling."""


@dataclass(frozen=True, slots=True)
class DeviceParts:
    """What a rank computes steps with. All of it works on one stream, the current one."""

    forward: StagedForward
    sampler: DeviceSampler
    limits: StepLimits

    def rehearse(self) -> None:
        """Runs the largest step that there can be, and each kind of step: kernels are compiled, memory is taken."""
        limits = self.limits
        num_requests = max(1, min(limits.max_num_seqs, limits.max_num_batched_tokens // 2))
        num_tokens = min(limits.max_num_batched_tokens // num_requests, limits.max_model_len)
        for count, tokens in ((num_requests, num_tokens), (num_requests, 1), (1, num_tokens)):
            logits_RV = self.forward.rehearse(count, tokens)
            self.sampler(logits_RV, [_rehearsed(row) for row in range(count)]).wait()

    def record(self, recorder: Recorder, on_progress: Callable[[int, int], None] | None = None) -> None:
        """Records every size of step that consists of decodes. `on_progress` hears how many of how many are done."""
        sizes = decode_sizes(self.limits.max_num_seqs)
        self.forward.record_decodes(
            sizes, recorder, lambda done: None if on_progress is None else on_progress(done, len(sizes))
        )

    def runner(
        self,
        pool: KVPool,
        num_swap_blocks: int = 0,
        grammars: GrammarCompiler | None = None,
        *,
        samples: bool = True,
    ) -> ModelRunner:
        """See ModelRunner."""
        is_small = pool.shape.size_bytes < MIN_COPY_BYTES
        host_blocks = HostBlocks(num_swap_blocks, pool, copy_by_kernel if is_small else copy_one_by_one)
        device = pool.blocks_NLKHTD.device
        return ModelRunner(
            self.forward,
            self.sampler,
            host_blocks,
            pool.shape.block_size,
            grammars,
            samples=samples,
            mark=lambda: mark(device),
        )


def make_device_parts(
    model: LoadedModel,
    pool: KVPool,
    limits: StepLimits,
    num_multiprocessors: int | None = None,
) -> DeviceParts:
    """`num_multiprocessors` is how many programs run side by side; None: as many as the model's GPU has."""
    if num_multiprocessors is None:
        num_multiprocessors = torch.cuda.get_device_properties(model.device).multi_processor_count
    attention = TritonAttention(
        pool, model.architecture, model.num_heads, model.dtype, limits, num_multiprocessors
    )
    sampler = DeviceSampler(
        model.vocab_size, limits.max_num_seqs, model.device, collectives=model.collectives
    )
    forward = StagedForward(model.decoder, attention, limits, sampler.sampled_R, model.device)
    return DeviceParts(forward, sampler, limits)


def copy_by_kernel(
    source_NB: torch.Tensor, target_MB: torch.Tensor, pairs: Sequence[tuple[int, int]]
) -> None:
    """Satisfies CopyBlocks: one launch for all pairs."""
    device = source_NB.device if source_NB.device.type == "cuda" else target_MB.device
    pairs_P2 = torch.tensor(pairs, dtype=torch.int32, pin_memory=device.type == "cuda")
    copy_blocks(source_NB, target_MB, pairs_P2.to(device, non_blocking=True))


def _rehearsed(row: int) -> RequestState:
    params = REHEARSED[row % len(REHEARSED)]
    return RequestState(NewRequestData(f"rehearsal-{row}", (0,), (), params, frozenset(), (), 0))
