"""DeviceParts: forward pass and sampler for a device that works by itself; the one module that knows Triton is there.

Shape suffixes: R rows that sample, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import triton

from baton.sampling import MAX_LOGPROBS, SamplingParams
from baton.step import NewRequestData
from engine.batch import RunnerRequest
from engine.device import mark
from engine.gpu.device_sampler import DeviceSampler
from engine.gpu.graphs import Recorder, decode_sizes, mixed_sizes
from engine.gpu.product_timer import GpuTimer
from engine.gpu.staged_forward import StagedForward
from engine.grammars.compiler import GrammarCompiler
from engine.kernels.copy_blocks import copy_blocks
from engine.kernels.switches import kernel_switches
from engine.kv_cache import NULL_BLOCK, HostBlocks, KVPool, copy_one_by_one
from engine.layers.few_rows import NUM_ROWS
from engine.layers.timed_products import TimedProducts
from engine.layers.triton_attention import TritonAttention
from engine.layers.triton_backend import TritonBackend
from engine.loading.loader import LoadedModel
from engine.runner import ModelRunner
from engine.step_limits import StepLimits

MIN_COPY_BYTES = 512 * 1024
"""Blocks from this size on are swapped by the copy engine, one copy each: it needs some 10 us for each, in which PCIe
moves as much, and no multiprocessor. Smaller ones go by one launch of our own for all."""

# Products and sums are fused, as ever; Triton 3.9 warns where nobody says so, and later versions will not do it.
triton.knobs.language.default_fp_fusion = True

REHEARSED = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.7, top_k=50, top_p=0.9, min_p=0.01, seed=0),
    SamplingParams(
        temperature=1.0, seed=0, repetition_penalty=1.1, logit_bias={0: -1.0}, logprobs=MAX_LOGPROBS
    ),
)
"""Steps all of whose requests ask for one of these need every kernel of sampling, and the last as much memory as any:
what a kernel is compiled for depends on whether any row of a step is drawn, or processed."""


@dataclass(frozen=True, slots=True)
class DeviceParts:
    """What a rank computes steps with. All of it works on one stream, the current one."""

    forward: StagedForward
    sampler: DeviceSampler
    timed_products: TimedProducts
    limits: StepLimits

    def rehearse(self) -> None:
        """Runs the largest step that there can be, and each kind of step: kernels are compiled, memory is taken.

        What is not compiled now would be while requests wait for it, a second or more for a kernel.
        """
        limits = self.limits
        num_requests = max(1, min(limits.max_num_seqs, limits.max_num_batched_tokens // 2))
        num_tokens = min(limits.max_num_batched_tokens // num_requests, limits.max_model_len)
        logits_RV = self.forward.rehearse(num_requests, num_tokens)
        for params in REHEARSED:
            self.sampler(logits_RV, [_rehearsed(row, params) for row in range(num_requests)]).wait()
        self.forward.rehearse(num_requests, 1)
        for count in NUM_ROWS:
            self.forward.rehearse(1, min(count, limits.max_num_batched_tokens, limits.max_model_len))
            self.forward.rehearse(min(count, num_requests), 1)
        # Contexts that are long for their number are split, and those of chunks put together by a kernel of its own.
        for num_tokens in (1, min(2, limits.max_num_batched_tokens, limits.max_model_len)):
            self.forward.rehearse(1, num_tokens, limits.max_model_len)
        self.choose_products()

    def choose_products(self) -> None:
        """Times the products of few rows that steps had so far; torch's library computes those at which it is faster.

        For ever: what is chosen is not timed again. Nothing is where there is no GPU, or where the switch is off.
        """
        if self.sampler.sampled_R.device.type == "cuda" and kernel_switches().timed_products:
            self.timed_products.choose(GpuTimer())

    def record(self, recorder: Recorder, on_progress: Callable[[int, int], None] | None = None) -> None:
        """Records steps of decodes, and small ones with prompts in them, the largest first: others fit in its memory.

        `on_progress` hears how many of how many are done.
        """
        mixed = mixed_sizes(self.limits.max_num_batched_tokens)
        decodes = decode_sizes(self.limits.max_num_seqs)

        def report(done: int) -> None:
            if on_progress is not None:
                on_progress(done, len(mixed) + len(decodes))

        self.forward.record(mixed, recorder, report, has_chunks=True)
        self.forward.record(decodes, recorder, lambda done: report(len(mixed) + done), has_chunks=False)

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
        if num_swap_blocks:
            host_blocks.swap(((NULL_BLOCK, 0),), ())  # compiles what copies
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
    assert isinstance(model.backend, TritonBackend), "loaded to be computed by torch alone"
    return DeviceParts(forward, sampler, model.backend.timed_products, limits)


def copy_by_kernel(
    source_NB: torch.Tensor, target_MB: torch.Tensor, pairs: Sequence[tuple[int, int]]
) -> None:
    """Satisfies CopyBlocks: one launch for all pairs."""
    device = source_NB.device if source_NB.device.type == "cuda" else target_MB.device
    pairs_P2 = torch.tensor(pairs, dtype=torch.int32, pin_memory=device.type == "cuda")
    copy_blocks(source_NB, target_MB, pairs_P2.to(device, non_blocking=True))


def _rehearsed(row: int, params: SamplingParams) -> RunnerRequest:
    return RunnerRequest(NewRequestData(f"rehearsal-{row}", (0,), (), params, frozenset(), (), 0))
