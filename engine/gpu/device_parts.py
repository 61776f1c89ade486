"""DeviceParts: forward pass and sampler for an asynchronous device, computed by Triton kernels.

Shape suffixes: R rows that sample, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import triton

from baton.kv_groups import NULL_BLOCK_ID
from baton.sampling import MAX_LOGPROBS, SamplingParams
from baton.step import NewRequestData
from engine.batch import RunnerRequest, StepLimits
from engine.device import mark
from engine.drafts import Drafter
from engine.gpu.device_sampler import DeviceSampler
from engine.gpu.graphs import Recorder, decode_sizes, mixed_sizes
from engine.gpu.product_timer import GpuTimer
from engine.gpu.staged_forward import StagedForward
from engine.grammars.compiler import GrammarCompiler
from engine.kernels.copy_blocks import copy_blocks
from engine.kernels.switches import kernel_switches
from engine.kv_cache import HostBlocks, KVPool, copy_one_by_one
from engine.layers.triton_attention import TritonAttention
from engine.layers.triton_backend import TritonBackend
from engine.layers.triton_linear import NUM_ROWS
from engine.loading.loader import LoadedModel
from engine.runner import ModelRunner
from engine.step_logits import ROWS_AT_ONCE

MIN_COPY_BYTES = 512 * 1024
"""The copy engine swaps blocks of at least this size, with one copy per block. A copy takes at least about 10
us, in which PCIe moves this many bytes, and needs no multiprocessor. Smaller blocks are all copied by one
kernel launch."""

# Fuses products and sums. Triton 3.9 warns if this default is not set, and later versions will change the default.
triton.knobs.language.default_fp_fusion = True

REHEARSED = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.7, top_k=50, top_p=0.9, min_p=0.01, seed=0),
    SamplingParams(
        temperature=1.0, seed=0, repetition_penalty=1.1, logit_bias={0: -1.0}, logprobs=MAX_LOGPROBS
    ),
)
"""Three steps, one with each of these parameters, compile every sampling kernel; the last step needs the most memory.
Kernels have variants for steps with and without rows that are drawn, and with and without rows that are processed."""


@dataclass(frozen=True, slots=True)
class DeviceParts:
    """The parts with which a rank computes steps. Everything runs on the current stream."""

    forward: StagedForward
    sampler: DeviceSampler
    backend: TritonBackend
    limits: StepLimits
    mixed_sizes: Sequence[int]
    """Numbers of tokens for which steps with prompts are recorded."""

    def rehearse(self) -> None:
        """Runs the largest possible step and each kind of step, so that kernels are compiled and memory is allocated.

        A kernel that is not compiled now would delay later requests by a second or more.
        """
        limits = self.limits
        num_requests = max(1, min(limits.max_num_seqs, limits.max_num_batched_tokens // 2))
        num_tokens = min(limits.max_num_batched_tokens // num_requests, limits.max_model_len)
        self.forward.rehearse(num_requests, num_tokens)
        num_decodes = min(limits.max_num_seqs, limits.max_num_batched_tokens)
        logits_RV = self.forward.rehearse(num_decodes, 1)
        for params in REHEARSED:
            self.sampler(logits_RV, [_rehearsed(row, params) for row in range(num_decodes)]).wait()
        for count in NUM_ROWS:
            self.forward.rehearse(min(count, num_requests), 1)
        # Few requests sample, but prompt logprobs may be wanted for many tokens of a prompt.
        for count in (*NUM_ROWS, ROWS_AT_ONCE):
            self.forward.rehearse_prompt_logprobs(
                min(count, limits.max_num_batched_tokens, limits.max_model_len)
            )
        counts = {min(count, limits.max_num_batched_tokens) for count in self.backend.token_counts}
        for count in sorted(counts):
            self._rehearse_prompts(count)
        # With few requests, long contexts are split. For chunks, a separate kernel merges the parts.
        for num_tokens in (1, min(2, limits.max_num_batched_tokens, limits.max_model_len)):
            self.forward.rehearse(1, num_tokens, limits.max_model_len)
        self.choose_products()

    def _rehearse_prompts(self, num_tokens: int) -> None:
        """Runs a step of about `num_tokens` tokens, in as few prompts of equal length as possible.
        Does nothing if this would be more prompts than a step can have.
        """
        limits = self.limits
        num_requests = -(-num_tokens // limits.max_model_len)
        if num_requests <= limits.max_num_seqs:
            most_each = limits.max_num_batched_tokens // num_requests
            self.forward.rehearse(num_requests, min(-(-num_tokens // num_requests), most_each))

    def choose_products(self) -> None:
        """Times the products with few rows that steps have computed so far, by Baton's kernel and by torch's library.
        From then on, the faster of the two computes such a product.

        A choice is final. Nothing is timed without a GPU, or if the switch is off.
        """
        if self.sampler.sampled_R.device.type == "cuda" and kernel_switches().timed_products:
            self.backend.timed_products.choose(GpuTimer())

    def record(self, recorder: Recorder, on_progress: Callable[[int, int], None] | None = None) -> None:
        """Records decode steps, and small steps with prompts. The largest step is first; all others share its memory.

        `on_progress` receives the number of recorded graphs and their total.
        """
        decodes, num_mixed = decode_sizes(self.limits.max_num_seqs), len(self.mixed_sizes)

        def report(done: int) -> None:
            if on_progress is not None:
                on_progress(done, num_mixed + len(decodes))

        self.forward.record(self.mixed_sizes, recorder, report, has_chunks=True)
        self.forward.record(decodes, recorder, lambda done: report(num_mixed + done), has_chunks=False)

    def runner(
        self,
        pool: KVPool,
        num_swap_blocks: int = 0,
        grammars: GrammarCompiler | None = None,
        drafter: Drafter | None = None,
        *,
        samples: bool = True,
    ) -> ModelRunner:
        """Makes the runner of these parts; for the parameters, see ModelRunner."""
        is_small = pool.shape.size_bytes < MIN_COPY_BYTES
        host_blocks = HostBlocks(num_swap_blocks, pool, copy_by_kernel if is_small else copy_one_by_one)
        if num_swap_blocks:
            host_blocks.swap(((NULL_BLOCK_ID, 0),), ())  # compiles the copying kernel
        device = pool.blocks_NLKHTD.device
        return ModelRunner(
            self.forward,
            self.sampler,
            host_blocks,
            pool.shape.block_size,
            grammars,
            drafter=drafter,
            samples=samples,
            kv_groups=self.forward.groups,
            mark=lambda: mark(device),
        )


def make_device_parts(
    model: LoadedModel,
    pool: KVPool,
    limits: StepLimits,
    num_multiprocessors: int | None = None,
) -> DeviceParts:
    """Makes the parts of a rank. `num_multiprocessors` decides how many programs attention launches; None: the number
    that the model's GPU has."""
    if num_multiprocessors is None:
        num_multiprocessors = torch.cuda.get_device_properties(model.device).multi_processor_count
    attention = TritonAttention(
        pool,
        model.architecture,
        model.layer_groups,
        model.num_heads,
        model.dtype,
        limits,
        num_multiprocessors,
    )
    sampler = DeviceSampler(
        model.vocab_size, limits.max_num_seqs, model.device, collectives=model.collectives
    )
    forward = StagedForward(model.decoder, attention, limits, sampler.sampled_R, model.device)
    assert isinstance(model.backend, TritonBackend), "loaded to be computed by torch alone"
    return DeviceParts(
        forward,
        sampler,
        model.backend,
        limits,
        mixed_sizes(limits.max_num_batched_tokens, model.architecture, model.collectives.size),
    )


def copy_by_kernel(
    source_NB: torch.Tensor, target_MB: torch.Tensor, pairs: Sequence[tuple[int, int]]
) -> None:
    """Copies all pairs of blocks with one kernel launch; a `CopyBlocks` of engine/kv_cache.py."""
    device = source_NB.device if source_NB.device.type == "cuda" else target_MB.device
    pairs_P2 = torch.tensor(pairs, dtype=torch.int32, pin_memory=device.type == "cuda")
    copy_blocks(source_NB, target_MB, pairs_P2.to(device, non_blocking=True))


def _rehearsed(row: int, params: SamplingParams) -> RunnerRequest:
    return RunnerRequest(NewRequestData(f"rehearsal-{row}", (0,), (), params, frozenset(), (), 0))
