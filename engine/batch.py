"""RequestBatch: what the runner remembers about requests, and a step flattened to arrays; knows no model, no device.

Shape suffixes: T tokens of a step, R rows that sample.
"""
# ruff: noqa: N815 - fields that are arrays carry their shape, like local names do

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from baton.step import NewRequestData, SchedulerOutput
from engine.grammar import Matcher

IntArray = npt.NDArray[np.int64]


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
        "sampled_row",
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
        self.sampled_row: int | None = None
        """Where the last token stands among those that the step under way samples; None: all tokens are known."""
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

    def append_unknown(self, row: int) -> int:
        """Room for the token that the step under way samples in its row `row`; the token's index, for `settle`."""
        self._tokens.extend((0,))
        self.sampled_row = row
        return self.num_tokens - 1

    def settle(self, index: int, token_id: int) -> None:
        """Now it is known. Of requests that are gone or were set back, nobody asks any more."""
        if index < self.num_tokens:
            self._tokens.values[index] = token_id
        if index == self.num_tokens - 1:
            self.sampled_row = None

    def resume(self, block_ids: tuple[int, ...], num_tokens: int) -> None:
        """Back from preemption: blocks that hold nothing of its own past `num_computed_tokens`, and so many tokens."""
        self.block_ids = GrowingArray(block_ids)
        self.cleared_block = None
        assert self.sampled_row is None, "it was preempted before the step that sampled for it had ended"
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
class BatchedRequest:
    """One request's rows of a step, `start` to `start + num_tokens`: consecutive tokens of it."""

    start: int
    num_tokens: int
    num_computed_tokens: int
    """Tokens of the request before these, all in the KV cache."""
    block_ids: IntArray
    """The blocks of everything up to the last of these tokens; a view."""

    @property
    def context_len(self) -> int:
        """Tokens that the last of these attends to, itself included."""
        return self.num_computed_tokens + self.num_tokens


@dataclass(frozen=True, slots=True)
class StepBatch:
    """A step, flattened: decodes first, those with the longest contexts in front, then prefill chunks."""

    input_ids_T: IntArray
    """0 where the token is not known here yet; see `sources_T`."""
    sources_T: IntArray
    """Where the token is the one that the previous step sampled, and is known to the device only: its row among that
    step's sampled tokens; else -1."""
    positions_T: IntArray
    slots_T: IntArray
    """Where each token's KV goes: block id x block size + offset."""
    decodes: tuple[BatchedRequest, ...]
    """Of one token each: request i is row i of the step."""
    prefills: tuple[BatchedRequest, ...]
    sampling_rows_R: IntArray
    """The last token of each request that has no known next token."""
    sampling_requests: tuple[RequestState, ...]
    new_tails: tuple[tuple[int, int], ...]
    """(block, offset) from where on a request's last block may hold garbage: to be zeroed before it is attended to, for
    kernels read whole blocks. Masking is not enough, since 0 x NaN is NaN: a block's former owner, or a peer, may have
    left one."""


class RequestBatch:
    """Follows the plans step by step; every request in a plan is new in it or known from an earlier one."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
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
        """The step's arrays, after `update` with the same plan."""
        scheduled = [(self._requests[request_id], n) for request_id, n in plan.num_scheduled_tokens.items()]
        for request, n in scheduled:
            assert 0 < n <= request.num_tokens - request.num_computed_tokens, (
                f"{n} tokens scheduled for {request.request_id}, which has {request.num_tokens} "
                f"and computed {request.num_computed_tokens}"
            )
        decodes = sorted((r for r, n in scheduled if n == 1), key=lambda r: -r.num_computed_tokens)
        rows = [(r, 1) for r in decodes] + [(r, n) for r, n in scheduled if n > 1]
        starts = list(itertools.accumulate((n for _, n in rows), initial=0))
        batched = tuple(self._batched(r, n, start) for (r, n), start in zip(rows, starts, strict=False))
        token_ids, positions, slots = zip(*(self._tokens_of(request, n) for request, n in rows), strict=True)
        samples = [r.num_computed_tokens + n == r.num_tokens for r, n in rows]
        return StepBatch(
            input_ids_T=np.concatenate(token_ids),
            sources_T=self._sources(rows, starts),
            positions_T=np.concatenate(positions),
            slots_T=np.concatenate(slots),
            decodes=batched[: len(decodes)],
            prefills=batched[len(decodes) :],
            sampling_rows_R=np.array(starts[1:])[samples] - 1,
            sampling_requests=tuple(itertools.compress((r for r, _ in rows), samples)),
            new_tails=tuple(self._new_tails(batched, [request for request, _ in rows])),
        )

    def _batched(self, request: RequestState, n: int, start: int) -> BatchedRequest:
        num_blocks = -(-(request.num_computed_tokens + n) // self._block_size)
        return BatchedRequest(start, n, request.num_computed_tokens, request.block_ids.values[:num_blocks])

    def _tokens_of(self, request: RequestState, n: int) -> tuple[IntArray, IntArray, IntArray]:
        """Ids, positions and slots of the request's next `n` tokens."""
        span = request.scheduled_slice(n)
        positions = np.arange(span.start, span.stop)
        block_ids = request.block_ids.values[positions // self._block_size]
        return request.token_ids[span], positions, block_ids * self._block_size + positions % self._block_size

    def _sources(self, rows: list[tuple[RequestState, int]], starts: list[int]) -> IntArray:
        sources_T = np.full(starts[-1], -1, dtype=np.int64)
        for (request, n), start in zip(rows, starts, strict=False):
            if request.sampled_row is not None and request.num_computed_tokens + n == request.num_tokens:
                sources_T[start + n - 1] = request.sampled_row
        return sources_T

    def _new_tails(
        self, batched: tuple[BatchedRequest, ...], requests: list[RequestState]
    ) -> Iterator[tuple[int, int]]:
        for rows, request in zip(batched, requests, strict=True):
            block_id, offset = int(rows.block_ids[-1]), rows.context_len % self._block_size
            if request.cleared_block != block_id:
                request.cleared_block = block_id
                if offset:
                    yield block_id, offset
