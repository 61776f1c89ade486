"""Samples on the device with Baton's own kernels, as in `engine/sampler.py`, without waiting for the tokens.

The host sends the parameters of all rows in one copy, and the edits of processed rows in another. The device
draws the tokens, leaves them where the next step's embedding reads them, and copies them to the host
asynchronously.

Shape suffixes: R rows, V vocabulary, P rows that are processed, L rows that want log-probabilities, F fields, N top
tokens.
"""
# ruff: noqa: N815 - fields that are tensors carry their shape, like local names do

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from baton.request import TokenLogprobs
from engine.batch import SampledRequest
from engine.collectives import SINGLE_RANK, Collectives
from engine.counter_rng import keys_at, seed_states
from engine.device import Mark, mark, pinned, to_host
from engine.gpu.logit_edits import list_edits
from engine.kernels.logprobs import token_logprobs
from engine.kernels.process_logits import process_logits
from engine.kernels.sample import sample
from engine.kernels.sampling_parts import (
    CHUNK,
    CHUNKS_PER_PART,
    KEY_0,
    MIN_P,
    NUM_FIELDS,
    PROCESSED_ROW,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    allocate_workspace,
)
from engine.sampler import MIN_TEMPERATURE, SampledToken, is_processed


class DeviceSampler:
    """A `Sampler` (engine/sampler.py) on a GPU. Steps are drawn in the order of the calls, all on one stream.

    Pinned memory comes from torch's caching host allocator, which reuses memory only after its copies are done. So any
    number of steps may be under way.
    """

    def __init__(
        self,
        vocab_size: int,
        max_num_rows: int,
        device: torch.device,
        chunk: int = CHUNK,
        chunks_per_part: int = CHUNKS_PER_PART,
        collectives: Collectives = SINGLE_RANK,
    ) -> None:
        num_columns = -(-max_num_rows // 4) * 4  # both rows at a multiple of 16 bytes, as in `_processed`
        self._results_2R = torch.zeros((2, num_columns), dtype=torch.int32, device=device)
        """The last step's tokens, and which rows are not finite, together so that one copy to the host is
        enough."""
        self.sampled_R = self._results_2R[0, :max_num_rows]
        """The last step's tokens, row by row; always the same memory."""
        self._workspace = allocate_workspace(max_num_rows, vocab_size, device, chunk, chunks_per_part)
        self._params_RF = torch.empty((max_num_rows, NUM_FIELDS), dtype=torch.int32, device=device)
        self._vocab_size = vocab_size
        self._device = device
        self._collectives = collectives
        self._batch = _Batch([], vocab_size, device)

    def __call__(
        self, logits_RV: torch.Tensor | None, requests: Sequence[SampledRequest]
    ) -> "DeviceSampledTokens":
        """Rank 0 draws and broadcasts the tokens; log-probabilities stay on rank 0, which reports them.

        If penalties or a grammar apply to a request, its earlier tokens must be known.
        """
        tokens_R = self.sampled_R[: len(requests)]
        logprobs: _Logprobs | None = None
        if self._collectives.rank == 0:
            assert logits_RV is not None, "nothing to sample from"
            logprobs = self._sample(logits_RV, requests, tokens_R)
        self._collectives.broadcast_(tokens_R)
        return DeviceSampledTokens(
            num_rows=len(requests),
            results_2R=to_host(self._results_2R),
            logprobs=logprobs,
            event=mark(self._device),
        )

    def _sample(
        self, logits_RV: torch.Tensor, requests: Sequence[SampledRequest], tokens_R: torch.Tensor
    ) -> "_Logprobs | None":
        """Writes the drawn tokens to `tokens_R`; returns log-probabilities if a request wants any."""
        assert len(requests) == len(logits_RV), f"{len(requests)} requests for {len(logits_RV)} rows"
        if self._batch.requests != list(requests):
            self._batch = _Batch(list(requests), self._vocab_size, self._device)
        batch = self._batch
        processed_rows = [row for row in batch.processable_rows if is_processed(requests[row])]
        params_RF = self._params_RF[: len(requests)]
        params_RF.copy_(pinned(batch.params(processed_rows), self._device), non_blocking=True)
        processed_PV = self._processed(logits_RV, requests, processed_rows) if processed_rows else None
        is_non_finite_R = self._results_2R[1, : len(requests)]
        sample(
            logits_RV, processed_PV, params_RF, tokens_R, is_non_finite_R, self._workspace, batch.is_greedy
        )
        return _logprobs(logits_RV, tokens_R, batch) if batch.num_top_tokens else None

    def _processed(
        self, logits_RV: torch.Tensor, requests: Sequence[SampledRequest], rows: list[int]
    ) -> torch.Tensor:
        """The processed logits of these rows: P x V, float32."""
        edits = list_edits(requests, rows, self._vocab_size)
        arrays = (edits.rows_P, edits.mask_rows_P, edits.edits_EF, edits.masks_GW)
        # Each array begins at a multiple of 16 bytes: for other alignments Triton would compile another
        # variant.
        starts = np.cumsum([0] + [-(-array.size // 4) * 4 for array in arrays])
        host = np.zeros(starts[-1], dtype=np.int32)
        for array, start in zip(arrays, starts, strict=False):
            host[start : start + array.size] = array.ravel()
        flat = pinned(host, self._device).to(self._device, non_blocking=True)
        rows_P, mask_rows_P, edits_EF, masks_GW = (
            flat[start : start + array.size].view(array.shape)
            for array, start in zip(arrays, starts.tolist(), strict=False)
        )
        processed_PV = torch.empty((len(rows), self._vocab_size), dtype=torch.float32, device=self._device)
        process_logits(logits_RV, rows_P, masks_GW, mask_rows_P, edits_EF, processed_PV)
        return processed_PV


class _Batch:
    """Values that stay the same while the same requests sample in the same rows."""

    def __init__(self, requests: list[SampledRequest], vocab_size: int, device: torch.device) -> None:
        all_params = [request.sampling_params for request in requests]
        self.requests = requests
        self.is_greedy = all(p.is_greedy for p in all_params)
        self.processable_rows = [
            row
            for row, (p, request) in enumerate(zip(all_params, requests, strict=True))
            if is_processed(request) or p.min_tokens or p.structured_output is not None
        ]
        """Rows that may need processing; whether they do can change from token to token."""
        self.num_top_tokens = {row: p.logprobs for row, p in enumerate(all_params) if p.logprobs is not None}
        """For each row that wants log-probabilities, in order: how many of the likeliest tokens it wants."""
        rows_L = np.array(list(self.num_top_tokens), dtype=np.int32)
        self.rows_L = pinned(rows_L, device).to(device, non_blocking=True)
        self._states_R = seed_states([p.seed or 0 for p in all_params])
        self._params_RF = np.zeros((len(requests), NUM_FIELDS), dtype=np.int32)
        floats_RF = self._params_RF.view(np.float32)
        for row, p in enumerate(all_params):
            floats_RF[row, TEMPERATURE.value] = 0.0 if p.is_greedy else max(p.temperature, MIN_TEMPERATURE)
            self._params_RF[row, TOP_K.value] = min(p.top_k or vocab_size, vocab_size)
            floats_RF[row, TOP_P.value] = p.top_p
            floats_RF[row, MIN_P.value] = p.min_p

    def params(self, processed_rows: list[int]) -> npt.NDArray[np.int32]:
        """R x F, with the keys of this step. The next call overwrites it."""
        positions_R = np.array([request.num_output_tokens for request in self.requests], dtype=np.uint64)
        self._params_RF[:, KEY_0.value : KEY_0.value + 2] = keys_at(self._states_R, positions_R)
        self._params_RF[:, PROCESSED_ROW.value] = -1
        self._params_RF[processed_rows, PROCESSED_ROW.value] = np.arange(len(processed_rows))
        return self._params_RF


@dataclass(frozen=True, slots=True)
class _Logprobs:
    """Log-probabilities that are being copied to the host, for the rows that want them."""

    num_top_tokens: dict[int, int]
    """See `_Batch`."""
    logprobs_L: torch.Tensor
    ranks_L: torch.Tensor
    top_ids_LN: torch.Tensor
    top_logprobs_LN: torch.Tensor

    def by_row(self, token_ids: list[int]) -> dict[int, TokenLogprobs]:
        """The log-probabilities of the drawn tokens, by row. Call it only when the copies have ended."""
        columns = zip(
            self.num_top_tokens.items(),
            self.logprobs_L.tolist(),
            self.ranks_L.tolist(),
            self.top_ids_LN.tolist(),
            self.top_logprobs_LN.tolist(),
            strict=True,
        )
        return {
            row: TokenLogprobs(
                token_id=token_ids[row],
                logprob=logprob,
                rank=rank,
                top=tuple(zip(top_ids[:num_top], top_logprobs[:num_top], strict=True)),
            )
            for (row, num_top), logprob, rank, top_ids, top_logprobs in columns
        }


@dataclass(frozen=True, slots=True)
class DeviceSampledTokens:
    """Tokens that are being copied to the host; a `SampledTokens` of engine/sampler.py."""

    num_rows: int
    results_2R: torch.Tensor
    """The tokens of at least `num_rows` rows, then whether each of these rows is not finite."""
    logprobs: _Logprobs | None
    event: Mark | None
    """The point after the copies to the host; None if there is nothing to wait for."""

    def wait(self) -> list[SampledToken]:
        if self.event is not None:
            self.event.synchronize()
        token_ids, is_non_finite = self.results_2R[:, : self.num_rows].tolist()
        found = {} if self.logprobs is None else self.logprobs.by_row(token_ids)
        return [
            SampledToken(token_id, found.get(row), not is_non_finite[row])
            for row, token_id in enumerate(token_ids)
        ]


def _logprobs(logits_RV: torch.Tensor, tokens_R: torch.Tensor, batch: _Batch) -> _Logprobs:
    """The log-probabilities, from the logits before any processing."""
    logprobs_L, ranks_L, log_totals_L = token_logprobs(logits_RV, batch.rows_L, tokens_R)
    num_top = min(max(batch.num_top_tokens.values()), logits_RV.shape[1])
    top = logits_RV.index_select(0, batch.rows_L).to(torch.float32).topk(num_top)
    return _Logprobs(
        num_top_tokens=batch.num_top_tokens,
        logprobs_L=to_host(logprobs_L),
        ranks_L=to_host(ranks_L),
        top_ids_LN=to_host(top.indices),
        top_logprobs_LN=to_host(
            (top.values - top.values[:, :1]) - log_totals_L.unsqueeze(1)
        ),  # as the kernel does
    )
