"""StagedForward: computes a step's logits from its arrays on an asynchronous device; knows no request.

A step is staged (one copy to the device), then queued kernel by kernel. A small step is padded to the next
larger number of tokens that has a graph, and this graph is replayed. Nothing here waits for the device.

Shape suffixes: T tokens of a step, E hidden size, R rows that sample, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from baton.kv_groups import NULL_BLOCK_ID, KVGroups
from baton.sampling import MAX_LOGPROBS
from engine.batch import StepBatch, StepLimits
from engine.gpu.graphs import Recorder, Replay
from engine.gpu.staging import ALIGNMENT, StagedArray, StepStaging
from engine.group_blocks import GroupBlocks
from engine.layers.attention import Attention
from engine.layers.backend import InputTokens
from engine.layers.triton_attention import TritonAttention, TritonStepAttention
from engine.models.decoder import Decoder
from engine.prompt_rows import PromptRows
from engine.request_table import NONE, IntArray
from engine.step_logits import StepLogits, start_prompt_logprobs

NO_SLOT = -1


class StagedForward:
    """Runs staged steps, and replays graphs; a `Forward` of engine/forward.py."""

    def __init__(
        self,
        decoder: Decoder,
        attention: TritonAttention,
        limits: StepLimits,
        sampled_R: torch.Tensor,
        device: torch.device,
    ) -> None:
        """`sampled_R` (int32) holds the previous step's tokens when the device begins a step."""
        self._decoder = decoder
        self._attention = attention
        self._device = device
        self.block_size, self.groups = attention.block_size, attention.groups
        self._sampled_R = sampled_R
        most = max(limits.max_num_batched_tokens, limits.max_num_seqs)
        num_groups = self.groups.num_groups
        self._staging = StepStaging((4 + num_groups) * (most + ALIGNMENT) + attention.max_staged, device)
        self._max_num_seqs = limits.max_num_seqs
        self._recorded: dict[bool, list[_Recorded]] = {False: [], True: []}
        """Recorded steps by size, for steps without chunks (False) and with chunks (True)."""

    @torch.inference_mode()
    def record(
        self,
        sizes: Sequence[int],
        recorder: Recorder,
        on_progress: Callable[[int], None] = lambda _: None,
        *,
        has_chunks: bool,
    ) -> None:
        """Records steps of these numbers of tokens, the largest first; the other steps share its memory.

        `has_chunks`: steps that contain prompts, else steps of decodes only. `on_progress` receives the number of
        recorded sizes. The recording reads the pool's null block and writes nothing.
        """
        recorded = []
        none_BM = _NO_REQUESTS.reshape(0, 0)
        idle_step = unstored_step(_NO_REQUESTS, _NO_REQUESTS, none_BM, self.block_size, self.groups)
        for count, size in enumerate(sorted(sizes, reverse=True), start=1):
            tokens, attention, _ = self._stage(idle_step, size, has_chunks=has_chunks)

            def work(tokens: InputTokens = tokens, attention: Attention = attention) -> torch.Tensor:
                hidden_TE = self._decoder.forward(tokens, attention)
                return hidden_TE if has_chunks else self._decoder.logits(hidden_TE)

            recorded.append(_Recorded(size, *recorder.record(work)))
            on_progress(count)
        self._recorded[has_chunks] = recorded[::-1]

    @torch.inference_mode()
    def rehearse(self, num_requests: int, num_tokens: int, context_len: int | None = None) -> torch.Tensor:
        """Runs a step of requests with `num_tokens` tokens each; returns their logits, num_requests x V.

        The tokens are the last ones of contexts of `context_len` tokens; None: they are the whole contexts. The step
        leaves only compiled kernels and allocated memory behind.
        """
        context_len = context_len or num_tokens
        logits_RV = self(self._step_of(num_requests, num_tokens, context_len)).sampling_RV
        assert logits_RV is not None
        return logits_RV

    def rehearse_prompt_logprobs(self, num_tokens: int) -> None:
        """Runs a step with one prompt, whose log-probabilities are all wanted."""
        rows = PromptRows("", 0, 1, np.zeros(num_tokens, np.int64), MAX_LOGPROBS)
        self(replace(self._step_of(1, num_tokens, num_tokens), prompt_rows=(rows,)))

    def _step_of(self, num_requests: int, num_tokens: int, context_len: int) -> StepBatch:
        null_blocks_BM = np.full((num_requests, -(-context_len // self.block_size)), NULL_BLOCK_ID)
        num_tokens_B, context_lens_B = np.full(num_requests, num_tokens), np.full(num_requests, context_len)
        return unstored_step(num_tokens_B, context_lens_B, null_blocks_BM, self.block_size, self.groups)

    @torch.inference_mode()
    def attend(
        self, batch: StepBatch, layer: int, q_TQD: torch.Tensor, sinks_Q: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Only one layer's attention, with the caller's queries and sinks: T x Q x D, or T x Q x C over latents."""
        _, attention, _ = self._stage(batch, None, has_chunks=bool(batch.prefills))
        return attention.attend(layer, q_TQD, sinks_Q).view(*q_TQD.shape[:2], -1)

    @torch.inference_mode()
    def __call__(self, batch: StepBatch) -> StepLogits:
        self._attention.clear_tails(batch)
        has_chunks = bool(batch.prefills)
        recorded = next((r for r in self._recorded[has_chunks] if r.size >= batch.num_tokens), None)
        tokens, attention, rows_R = self._stage(
            batch, None if recorded is None else recorded.size, has_chunks=has_chunks
        )
        if recorded is None:
            hidden_TE = self._decoder.forward(tokens, attention)
        else:
            recorded.replay()
            if not has_chunks:
                logits_TV = recorded.result
                prompt_logprobs = start_prompt_logprobs(
                    batch.prompt_rows, logits_TV.__getitem__, self._device
                )
                return StepLogits(_rows_of(logits_TV, rows_R, batch), prompt_logprobs)
            hidden_TE = recorded.result
        prompt_logprobs = start_prompt_logprobs(
            batch.prompt_rows, lambda rows: self._decoder.logits(hidden_TE[rows]), self._device
        )
        return StepLogits(self._decoder.logits(hidden_TE[rows_R]) if len(rows_R) else None, prompt_logprobs)

    def _stage(
        self, batch: StepBatch, size: int | None, *, has_chunks: bool
    ) -> tuple[InputTokens, TritonStepAttention, torch.Tensor]:
        """Copies the step to the device.

        With a `size`, pads the step to that many tokens, and puts each array at the same place each time.
        """
        num_tokens = size or batch.num_tokens
        num_rows = min(size, self._max_num_seqs) if size else len(batch.sampling_rows_R)
        sections = [
            StagedArray(_padded(batch.input_ids_T, num_tokens, 0), num_tokens),
            StagedArray(_padded(batch.sources_T, num_tokens, NONE), num_tokens),
            StagedArray(_padded(batch.positions_T, num_tokens, 0), num_tokens),
            StagedArray(batch.sampling_rows_R, num_rows),
            *[StagedArray(_padded(each.slots_T, num_tokens, NO_SLOT), num_tokens) for each in batch.blocks],
            *self._attention.sections(batch, has_chunks=has_chunks, room=size),
        ]
        ids_T, sources_T, positions_T, rows_R, *rest = self._staging.stage(sections)
        num_groups = len(batch.blocks)
        slots_GT, rest = rest[:num_groups], rest[num_groups:]
        attention = self._attention.bind(positions_T, slots_GT, rest, has_chunks=has_chunks)
        tokens = InputTokens(ids_T, sources_T, self._sampled_R)
        return tokens, attention, rows_R[: len(batch.sampling_rows_R)]


@dataclass(frozen=True, slots=True)
class _Recorded:
    """Steps of up to `size` tokens."""

    size: int
    result: torch.Tensor
    """The result of a replay: logits of every decode, or hidden states of every token."""
    replay: Replay


def _rows_of(logits_TV: torch.Tensor, rows_R: torch.Tensor, batch: StepBatch) -> torch.Tensor | None:
    """The logits of the rows that sample. In most steps of decodes, every row samples."""
    if len(rows_R) == batch.num_decodes:
        return logits_TV[: len(rows_R)]
    return logits_TV[rows_R] if len(rows_R) else None


def _padded(values_T: IntArray, size: int, filler: int) -> IntArray:
    if len(values_T) == size:
        return values_T
    return np.concatenate([values_T, np.full(size - len(values_T), filler)])


def unstored_step(
    num_tokens_B: IntArray,
    context_lens_B: IntArray,
    block_ids_BM: IntArray,
    block_size: int,
    groups: KVGroups,
) -> StepBatch:
    """A step in which every token is 0, and that stores nothing. The last token of each request samples.

    All KV groups read the same blocks.
    """
    ends_B = num_tokens_B.cumsum()
    starts_B, num_rows = ends_B - num_tokens_B, int(num_tokens_B.sum())
    blocks = GroupBlocks(np.full(num_rows, NO_SLOT), block_ids_BM, new_tails=())
    return StepBatch(
        input_ids_T=np.zeros(num_rows, np.int64),
        sources_T=np.full(num_rows, NONE),
        positions_T=np.arange(num_rows) + (context_lens_B - ends_B).repeat(num_tokens_B),
        num_decodes=len(num_tokens_B) if (num_tokens_B == 1).all() else 0,
        starts_B=starts_B,
        num_tokens_B=num_tokens_B,
        context_lens_B=context_lens_B,
        num_blocks_B=-(-context_lens_B // block_size),
        blocks=(blocks,) * groups.num_groups,
        sampling_rows_R=ends_B - 1,
        sampling_requests=(),
    )


_NO_REQUESTS: IntArray = np.empty(0, dtype=np.int64)
