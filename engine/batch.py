"""RequestBatch: what the runner remembers about requests, and the flattened tensors of a step; knows no model.

Shape suffixes: T tokens of a step, B requests of a group, M blocks of a padded table, R rows that sample.
"""
# ruff: noqa: N815 - fields that are tensors carry their shape, like local names do

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from baton.step import NewRequestData, SchedulerOutput
from engine.grammar import Matcher
from engine.kv_cache import NULL_BLOCK

IntArray = npt.NDArray[np.int64]

MIN_GROUP_BLOCKS = 8
"""Decodes of up to this many blocks share a group: padding costs less there than another kernel call."""


class RequestState:
    """One request between steps. `token_ids` grows by doubling, so a decode step appends without copying."""

    __slots__ = (
        "_tokens",
        "block_ids",
        "cleared_block",
        "matcher",
        "num_computed_tokens",
        "num_prompt_tokens",
        "request_id",
        "sampling_params",
        "stop_token_ids",
    )

    def __init__(self, data: NewRequestData) -> None:
        self.request_id = data.request_id
        self.sampling_params = data.sampling_params
        self.stop_token_ids = data.stop_token_ids
        self.num_prompt_tokens = len(data.prompt_token_ids)
        self.num_computed_tokens = data.num_computed_tokens
        self.block_ids = GrowingArray(data.block_ids)
        self.cleared_block: int | None = None
        """The last block whose slots past the request's end are known to be zero; see `StepBatch.new_tails`."""
        self.matcher: Matcher | None = None
        """Guides what it samples, if its output is to be structured."""
        self._tokens = GrowingArray((*data.prompt_token_ids, *data.output_token_ids))

    @property
    def token_ids(self) -> IntArray:
        """Prompt and output so far; a view."""
        return self._tokens.values

    @property
    def num_tokens(self) -> int:
        return len(self._tokens)

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    def append_token(self, token_id: int) -> None:
        self._tokens.extend((token_id,))

    def resume(self, block_ids: tuple[int, ...], num_tokens: int) -> None:
        """Back from preemption: blocks that hold nothing of its own past `num_computed_tokens`, and so many tokens."""
        self.block_ids = GrowingArray(block_ids)
        self.cleared_block = None
        self._tokens.truncate(num_tokens)
        if self.matcher is not None:
            self.matcher.rewind(self.num_output_tokens)

    def scheduled_slice(self, num_scheduled: int) -> slice:
        """Positions of the next `num_scheduled` tokens to compute."""
        return slice(self.num_computed_tokens, self.num_computed_tokens + num_scheduled)


class GrowingArray:
    """An int64 array with amortised O(1) append."""

    __slots__ = ("_buffer", "_length")

    def __init__(self, values: tuple[int, ...]) -> None:
        self._buffer = np.array(values, dtype=np.int64)
        self._length = len(values)

    def __len__(self) -> int:
        return self._length

    @property
    def values(self) -> IntArray:
        """A view of what it holds now."""
        return self._buffer[: self._length]

    def extend(self, values: tuple[int, ...]) -> None:
        length = self._length + len(values)
        if length > len(self._buffer):
            self._buffer = np.resize(self._buffer, max(2 * len(self._buffer), length, 16))
        self._buffer[self._length : length] = values
        self._length = length

    def truncate(self, length: int) -> None:
        assert length <= self._length, f"{length} of {self._length} values"
        self._length = length


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Rows `start` to `start + B` of the step: one token each, with contexts of similar length."""

    start: int
    block_ids_BM: torch.Tensor
    """Padded with the null block."""
    context_lens_B: torch.Tensor
    """Tokens to attend to, the step's own included."""


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Rows `start` to `start + num_tokens` of the step: consecutive tokens of one request."""

    start: int
    num_tokens: int
    num_computed_tokens: int
    """Tokens of the request before this chunk, all in the KV cache."""
    block_ids_1M: torch.Tensor
    """The blocks of everything up to the chunk's end."""


@dataclass(frozen=True, slots=True)
class StepBatch:
    """A step, flattened: decodes first, then prefill chunks. Tensors are on the device."""

    input_ids_T: torch.Tensor
    positions_T: torch.Tensor
    slots_T: torch.Tensor
    """Where each token's KV goes: block id x block size + offset."""
    decode_groups: tuple[DecodeGroup, ...]
    prefill_chunks: tuple[PrefillChunk, ...]
    sampling_rows_R: torch.Tensor
    """The last token of each request that has no known next token."""
    sampling_requests: tuple[RequestState, ...]
    new_tails: tuple[tuple[int, int], ...]
    """(block, offset) from where on a decode's last block may hold garbage: to be zeroed before it is attended to.

    Masking is not enough, since 0 x NaN is NaN: a block's former owner, or a peer, may have left one.
    """


class RequestBatch:
    """Follows the plans step by step; every request in a plan is new in it or known from an earlier one."""

    def __init__(self, block_size: int, device: torch.device) -> None:
        self._block_size = block_size
        self._device = device
        self._requests: dict[str, RequestState] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __getitem__(self, request_id: str) -> RequestState:
        return self._requests[request_id]

    def update(self, plan: SchedulerOutput) -> None:
        """Takes over who is gone, who is new and what changed for the others. Preempted requests keep their tokens."""
        for request_id in plan.finished_req_ids:
            self._requests.pop(request_id, None)  # it may have ended before it ever ran
        for new in plan.scheduled_new_reqs:
            assert new.request_id not in self._requests, f"request {new.request_id} is known already"
            self._requests[new.request_id] = RequestState(new)
        cached = plan.scheduled_cached_reqs
        for request_id, block_ids, num_computed in zip(
            cached.request_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            request = self._requests[request_id]
            request.num_computed_tokens = num_computed
            if request_id in cached.resumed_num_tokens:
                request.resume(block_ids, cached.resumed_num_tokens[request_id])
            elif block_ids:
                request.block_ids.extend(block_ids)

    def build(self, plan: SchedulerOutput) -> StepBatch:
        """The step's tensors, after `update` with the same plan."""
        scheduled = [(self._requests[request_id], n) for request_id, n in plan.num_scheduled_tokens.items()]
        for request, n in scheduled:
            assert 0 < n <= request.num_tokens - request.num_computed_tokens, (
                f"{n} tokens scheduled for {request.request_id}, which has {request.num_tokens} "
                f"and computed {request.num_computed_tokens}"
            )
        decodes = sorted((r for r, n in scheduled if n == 1), key=lambda r: -r.num_computed_tokens)
        prefills = [(request, n) for request, n in scheduled if n > 1]
        rows = [(request, 1) for request in decodes] + prefills
        token_ids, positions, slots = zip(*(self._tokens_of(request, n) for request, n in rows), strict=True)
        last_rows = np.cumsum([n for _, n in rows]) - 1
        samples = [r.num_computed_tokens + n == r.num_tokens for r, n in rows]
        return StepBatch(
            input_ids_T=self._tensor(np.concatenate(token_ids)),
            positions_T=self._tensor(np.concatenate(positions)),
            slots_T=self._tensor(np.concatenate(slots)),
            decode_groups=tuple(self._decode_groups(decodes)),
            prefill_chunks=tuple(self._prefill_chunks(prefills, len(decodes))),
            sampling_rows_R=self._tensor(last_rows[samples]),
            sampling_requests=tuple(itertools.compress((r for r, _ in rows), samples)),
            new_tails=tuple(self._new_tails(decodes)),
        )

    def _tokens_of(self, request: RequestState, n: int) -> tuple[IntArray, IntArray, IntArray]:
        """Ids, positions and slots of the request's next `n` tokens."""
        span = request.scheduled_slice(n)
        positions = np.arange(span.start, span.stop)
        block_ids = request.block_ids.values[positions // self._block_size]
        return request.token_ids[span], positions, block_ids * self._block_size + positions % self._block_size

    def _decode_groups(self, decodes: list[RequestState]) -> Iterator[DecodeGroup]:
        """Longest first; a group ends at the first context of half its longest one, so at most half is padding."""
        start = 0
        while start < len(decodes):
            most = self._num_blocks(decodes[start])
            limit = 0 if most <= MIN_GROUP_BLOCKS else most // 2
            end = start + 1
            while end < len(decodes) and self._num_blocks(decodes[end]) > limit:
                end += 1
            tables = np.full((end - start, most), NULL_BLOCK, dtype=np.int32)
            for row, request in zip(tables, decodes[start:end], strict=True):
                num_blocks = self._num_blocks(request)
                row[:num_blocks] = request.block_ids.values[:num_blocks]
            lengths = np.array([r.num_computed_tokens + 1 for r in decodes[start:end]], dtype=np.int64)
            yield DecodeGroup(start, self._tensor(tables), self._tensor(lengths))
            start = end

    def _prefill_chunks(self, prefills: list[tuple[RequestState, int]], start: int) -> Iterator[PrefillChunk]:
        for request, n in prefills:
            num_blocks = -(-(request.num_computed_tokens + n) // self._block_size)
            table = request.block_ids.values[:num_blocks].astype(np.int32)
            yield PrefillChunk(start, n, request.num_computed_tokens, self._tensor(table[None]))
            start += n

    def _new_tails(self, decodes: list[RequestState]) -> Iterator[tuple[int, int]]:
        for request in decodes:
            block_id = int(request.block_ids.values[request.num_computed_tokens // self._block_size])
            if request.cleared_block != block_id:
                request.cleared_block = block_id
                offset = request.num_computed_tokens % self._block_size + 1
                if offset < self._block_size:
                    yield block_id, offset

    def _num_blocks(self, request: RequestState) -> int:
        """Blocks that hold a decode's context."""
        return request.num_computed_tokens // self._block_size + 1

    def _tensor(self, array: npt.NDArray[np.int32] | IntArray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)
