"""RequestBatch: the runner's state of its requests, and a step as flat arrays; knows no model and no device.

Shape suffixes: T tokens of a step, B its sequences, M blocks of the longest context, R rows that sample.
"""
# ruff: noqa: N815 - fields that are arrays carry their shape, like local names do

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from baton.kv_groups import ONE_GROUP, KVGroups
from baton.sampling import SamplingParams
from baton.step import NewRequestData, SchedulerOutput
from engine.acceptance import Acceptance
from engine.grammars.compiler import Matcher
from engine.group_blocks import GroupBlocks, group_blocks
from engine.prompt_rows import PromptRows, prompt_rows_of
from engine.request_table import NONE, GrowingArray, IntArray, RequestTable
from engine.token_counts import TokenCounts


class RunnerRequest:
    """The state of one request between steps. The array of its tokens grows by doubling."""

    __slots__ = (
        "_tokens",
        "acceptance",
        "matcher",
        "num_drafting_tokens",
        "num_given_tokens",
        "num_prompt_tokens",
        "output_counts",
        "request_id",
        "row",
        "sampling_params",
        "stop_token_ids",
        "token_counts",
    )

    def __init__(self, data: NewRequestData, row: int | None = None) -> None:
        self.request_id = data.request_id
        self.sampling_params = data.sampling_params
        self.stop_token_ids = data.stop_token_ids
        self.num_prompt_tokens = len(data.prompt_token_ids)
        self.row = row
        """The request's row in the batch's table; None once the request is removed."""
        self.matcher: Matcher | None = None
        """Guides sampling if the output is structured; else None."""
        self.token_counts, self.output_counts = TokenCounts(), TokenCounts()
        """Counts of all tokens, and of output tokens only, as of the last time that penalties needed them."""
        self.acceptance = Acceptance()
        """How often the request's drafts are right."""
        self.num_drafting_tokens = 0
        """How many of the first tokens have their KV in the draft model's own pool."""
        self._tokens = GrowingArray((*data.prompt_token_ids, *data.output_token_ids))
        self.num_given_tokens = self.num_tokens
        """How many tokens the request had when it arrived."""

    @property
    def token_ids(self) -> IntArray:
        """The tokens of prompt and output so far, as a view. A token that a step under way still samples has id 0."""
        return self._tokens.values

    @property
    def num_tokens(self) -> int:
        return len(self._tokens)

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def num_own_tokens(self) -> int:
        """How many tokens this worker has added."""
        return self.num_tokens - self.num_given_tokens

    @property
    def num_tokens_left(self) -> int:
        """How many more tokens may be sampled; 0 if the last token ended the request."""
        has_ended = int(self.token_ids[-1]) in self.stop_token_ids
        return 0 if has_ended else self.sampling_params.max_tokens - self.num_output_tokens

    @property
    def drafts(self) -> tuple[int, ...]:
        """Always empty; DraftedRequest has drafts."""
        return ()

    def count_tokens(self) -> TokenCounts:
        """How often each token id occurs in prompt and output."""
        self.token_counts.follow(self.token_ids)
        return self.token_counts

    def count_outputs(self) -> TokenCounts:
        self.output_counts.follow(self.token_ids[self.num_prompt_tokens :])
        return self.output_counts

    def append_token(self, token_id: int) -> None:
        self._tokens.append(token_id)

    def truncate(self, num_tokens: int) -> None:
        """Keeps only the first `num_tokens` tokens, when the request resumes after preemption."""
        self._tokens.truncate(num_tokens)
        self.num_drafting_tokens = 0
        self.token_counts, self.output_counts = TokenCounts(), TokenCounts()  # the counted tokens may be gone
        if self.matcher is not None:
            self.matcher.rewind(self.num_output_tokens)


class DraftedRequest:
    """A request as it would be if `drafts` were right. The token sampled after the last draft depends on all drafts.

    The matcher is that of the request without drafts.
    """

    __slots__ = ("_request", "drafts")

    def __init__(self, request: RunnerRequest, drafts: tuple[int, ...]) -> None:
        self._request = request
        self.drafts = drafts

    @property
    def request_id(self) -> str:
        return self._request.request_id

    @property
    def row(self) -> int | None:
        return self._request.row

    @property
    def sampling_params(self) -> SamplingParams:
        return self._request.sampling_params

    @property
    def stop_token_ids(self) -> frozenset[int]:
        return self._request.stop_token_ids

    @property
    def num_output_tokens(self) -> int:
        return self._request.num_output_tokens + len(self.drafts)

    @property
    def matcher(self) -> Matcher | None:
        return self._request.matcher

    def count_tokens(self) -> TokenCounts:
        return self._request.count_tokens().with_tokens(self.drafts)

    def count_outputs(self) -> TokenCounts:
        return self._request.count_outputs().with_tokens(self.drafts)


SampledRequest = RunnerRequest | DraftedRequest
"""The state of a request at one of its positions in a step: as it is, or with some of its drafts added."""


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The largest sizes of a step."""

    max_num_seqs: int
    """The most sequences; StepBatch explains what a sequence is."""
    max_num_batched_tokens: int
    max_model_len: int


@dataclass(frozen=True, slots=True)
class StepBatch:
    """A step as flat arrays: first decodes, with the longest context first, then prefill chunks.

    A decode is a sequence with one token in the step, so decode i is row i. If a request has drafts, its last
    known token and each draft are separate decodes, one after another. Each of them attends to the request's
    tokens up to its own position, so its results are the same as in a step without drafts.
    """

    input_ids_T: IntArray
    """Token ids; 0 if the host does not know the token yet, see `sources_T`."""
    sources_T: IntArray
    """For a token that only the device knows, since the previous step sampled it: its row among the sampled
    tokens of that step. For all other tokens -1."""
    positions_T: IntArray
    num_decodes: int
    starts_B: IntArray
    """First row of each sequence; its tokens are in consecutive rows."""
    num_tokens_B: IntArray
    context_lens_B: IntArray
    """How many tokens the last token of each sequence attends to, including itself."""
    num_blocks_B: IntArray
    """How many blocks of each KV group the context of each sequence has."""
    blocks: tuple[GroupBlocks, ...]
    """The blocks of each KV group."""
    sampling_rows_R: IntArray
    """The rows from which a token is sampled. For a request: the row of its last token. For a request with
    drafts: the rows of its last known token and of each draft."""
    sampling_requests: tuple[SampledRequest, ...]
    """The request of each row in `sampling_rows_R`. DraftedRequests follow their request."""
    prompt_rows: tuple[PromptRows, ...] = ()
    """Rows of prompts whose log-probabilities are wanted."""

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids_T)

    @property
    def prefills(self) -> range:
        """The indices of sequences with chunks."""
        return range(self.num_decodes, len(self.starts_B))


class RequestBatch:
    """Follows the plans step by step. Each request of a plan is either new, or known from an earlier plan."""

    def __init__(self, block_size: int, groups: KVGroups = ONE_GROUP) -> None:
        self._block_size = block_size
        self._groups = groups
        self._requests: dict[str, RunnerRequest] = {}
        self._with_prompt_logprobs: set[str] = set()
        """Requests that want the log-probabilities of their prompts."""
        self._table = RequestTable()

    def __len__(self) -> int:
        return len(self._requests)

    def __getitem__(self, request_id: str) -> RunnerRequest:
        return self._requests[request_id]

    def update(self, plan: SchedulerOutput) -> None:
        """Applies the plan's finished, new and changed requests. Preempted requests keep their tokens."""
        for request_id in plan.finished_req_ids:
            if (finished := self._requests.pop(request_id, None)) is not None:  # None: the request never ran
                assert finished.row is not None
                self._table.remove(finished.row)
                self._with_prompt_logprobs.discard(request_id)
                finished.row = None
        for request_id, token_ids in plan.forced_token_ids.items():
            if (request := self._requests.get(request_id)) is not None:
                self.extend(request, token_ids)
        for new in plan.scheduled_new_reqs:
            self._add(new)
        cached = plan.scheduled_cached_reqs
        rows = np.array([self._requests[request_id].row for request_id in cached.request_ids], np.int64)
        self._table.num_computed_tokens_S[rows] = cached.num_computed_tokens
        for request_id, block_ids in zip(cached.request_ids, cached.new_block_ids, strict=True):
            if request_id in cached.resumed_num_tokens:
                self._resume(self._requests[request_id], block_ids, cached.resumed_num_tokens[request_id])
            elif block_ids:
                row = self._requests[request_id].row
                assert row is not None
                self._table.extend_blocks(row, block_ids)

    def block_ids(self, request: RunnerRequest) -> IntArray:
        """The block ids of a request, as a view."""
        assert request.row is not None
        return self._table.block_ids_SM[request.row, : self._table.num_blocks_S[request.row]]

    def extend(self, request: RunnerRequest, token_ids: Sequence[int]) -> None:
        """Adds tokens that the request's grammar forces, so that no step samples them."""
        for token_id in token_ids:
            self.set_token(request, self.append_unknown(request, NONE), token_id)

    def append_unknown(self, request: RunnerRequest, sampled_row: int) -> int:
        """Adds the token that the step under way samples in row `sampled_row`; returns its index.

        `sampled_row` is NONE if the caller calls `set_token` before the next step.
        """
        request.append_token(0)
        if request.row is not None:
            self._table.num_tokens_S[request.row] += 1
            self._table.last_tokens_S[request.row] = 0
            self._table.sampled_rows_S[request.row] = sampled_row
        return request.num_tokens - 1

    def set_token(self, request: RunnerRequest, index: int, token_id: int) -> None:
        """Sets the token at `index`, which is now known."""
        request.token_ids[index] = token_id
        if request.row is not None and index == request.num_tokens - 1:
            self._table.last_tokens_S[request.row] = token_id
            self._table.sampled_rows_S[request.row] = NONE

    def known_token_ids(self, request: RunnerRequest) -> IntArray:
        """The request's tokens without the one that a step under way samples, as a view."""
        is_under_way = request.row is not None and self._table.sampled_rows_S[request.row] != NONE
        return request.token_ids[: request.num_tokens - int(is_under_way)]

    def build(self, plan: SchedulerOutput) -> StepBatch:
        """Returns the step's arrays. Call `update` with the same plan first."""
        t = self._table
        requests, num_tokens = self._sequences(plan)
        rows_B = np.array([request.row for request in requests], np.int64)
        num_tokens_B = np.array(num_tokens, np.int64)
        num_drafts_B = np.zeros_like(num_tokens_B)
        if plan.scheduled_spec_decode_tokens:
            num_drafts_B[:] = [len(request.drafts) for request in requests]
        self._check(requests, num_tokens_B, num_drafts_B, rows_B)
        is_prefill_B = num_tokens_B > 1
        order_B = np.lexsort((-t.num_computed_tokens_S[rows_B] * ~is_prefill_B, is_prefill_B))
        rows_B, num_tokens_B, num_drafts_B = rows_B[order_B], num_tokens_B[order_B], num_drafts_B[order_B]
        starts_B = np.cumsum(num_tokens_B) - num_tokens_B
        ends_B = t.num_computed_tokens_S[rows_B] + num_drafts_B + num_tokens_B
        samples_B = ends_B == t.num_tokens_S[rows_B] + num_drafts_B
        requests = [requests[i] for i in order_B]

        owners_T = np.repeat(np.arange(len(rows_B)), num_tokens_B)
        positions_T = np.arange(len(owners_T)) + (ends_B - starts_B - num_tokens_B)[owners_T]
        last_rows_B = starts_B + num_tokens_B - 1
        sources_T = np.full(len(owners_T), NONE)
        sources_T[last_rows_B] = np.where(samples_B, t.sampled_rows_S[rows_B], NONE)
        input_ids_T = np.empty(len(owners_T), np.int64)
        input_ids_T[last_rows_B] = t.last_tokens_S[rows_B]
        for i in np.flatnonzero(is_prefill_B[order_B] | ~samples_B):
            token_ids = self._requests[requests[i].request_id].token_ids
            input_ids_T[starts_B[i] : last_rows_B[i] + 1] = token_ids[ends_B[i] - num_tokens_B[i] : ends_B[i]]
        for i in np.flatnonzero(num_drafts_B):
            input_ids_T[starts_B[i]] = requests[i].drafts[-1]
        blocks = group_blocks(t, self._groups, self._block_size, rows_B, owners_T, positions_T, ends_B)
        return StepBatch(
            input_ids_T=input_ids_T,
            sources_T=sources_T,
            positions_T=positions_T,
            num_decodes=len(rows_B) - int(is_prefill_B.sum()),
            starts_B=starts_B,
            num_tokens_B=num_tokens_B,
            context_lens_B=ends_B,
            num_blocks_B=-(-ends_B // self._block_size),
            blocks=blocks,
            sampling_rows_R=last_rows_B[samples_B],
            sampling_requests=tuple(itertools.compress(requests, samples_B)),
            prompt_rows=self._prompt_rows(requests, starts_B, num_tokens_B, ends_B),
        )

    def _prompt_rows(
        self, requests: Sequence[SampledRequest], starts_B: IntArray, num_tokens_B: IntArray, ends_B: IntArray
    ) -> tuple[PromptRows, ...]:
        """The rows that give prompt logprobs. A request with output is left out: it has reported them already."""
        if not self._with_prompt_logprobs:
            return ()
        places = zip(
            requests, starts_B.tolist(), (ends_B - num_tokens_B).tolist(), ends_B.tolist(), strict=True
        )
        all_rows = (
            prompt_rows_of(each.request_id, each.token_ids, each.sampling_params, first_row, first, end)
            for each, first_row, first, end in places
            if isinstance(each, RunnerRequest) and not each.num_output_tokens
        )
        return tuple(rows for rows in all_rows if rows is not None)

    def _sequences(self, plan: SchedulerOutput) -> tuple[Sequence[SampledRequest], Sequence[int]]:
        """The step's requests and drafted requests, and how many tokens each of them has in the step."""
        requests = [self._requests[request_id] for request_id in plan.num_scheduled_tokens]
        num_tokens = list(plan.num_scheduled_tokens.values())
        if not plan.scheduled_spec_decode_tokens:
            return requests, num_tokens
        sequences: list[SampledRequest] = []
        num_tokens_of_each: list[int] = []
        for request, count in zip(requests, num_tokens, strict=True):
            drafts = plan.scheduled_spec_decode_tokens.get(request.request_id, ())
            sequences += [request, *(DraftedRequest(request, drafts[: i + 1]) for i in range(len(drafts)))]
            num_tokens_of_each += [count - len(drafts), *([1] * len(drafts))]
        return sequences, num_tokens_of_each

    def _add(self, new: NewRequestData) -> None:
        assert new.request_id not in self._requests, f"request {new.request_id} is known already"
        row = self._table.add()
        request = self._requests[new.request_id] = RunnerRequest(new, row)
        if new.sampling_params.prompt_logprobs is not None:
            self._with_prompt_logprobs.add(new.request_id)
        self._table.num_computed_tokens_S[row] = new.num_computed_tokens
        self._table.num_tokens_S[row] = request.num_tokens
        self._table.last_tokens_S[row] = request.token_ids[-1]
        self._table.set_blocks(row, new.block_ids)

    def _resume(self, request: RunnerRequest, block_ids: tuple[int, ...], num_tokens: int) -> None:
        """Resumes with the first `num_tokens` tokens; the blocks contain the KV of `num_computed_tokens` of them."""
        row = request.row
        assert row is not None
        assert self._table.sampled_rows_S[row] == NONE, "a step that samples for it is under way"
        request.truncate(num_tokens)
        self._table.num_tokens_S[row] = num_tokens
        self._table.last_tokens_S[row] = request.token_ids[-1]
        self._table.set_blocks(row, block_ids)

    def _check(
        self,
        requests: Sequence[SampledRequest],
        num_tokens_B: IntArray,
        num_drafts_B: IntArray,
        rows_B: IntArray,
    ) -> None:
        t = self._table
        num_uncomputed_B = t.num_tokens_S[rows_B] - t.num_computed_tokens_S[rows_B]
        wrong_B = (num_tokens_B < 1) | (num_tokens_B > num_uncomputed_B)
        # Drafts follow the last token. This token must be known, and must be the only one left to compute.
        wrong_B |= (num_drafts_B > 0) & ((num_uncomputed_B > 1) | (t.sampled_rows_S[rows_B] != NONE))
        if wrong_B.any():
            first = int(wrong_B.argmax())
            raise AssertionError(
                f"{num_tokens_B[first]} tokens scheduled for {requests[first].request_id} behind "
                f"{num_drafts_B[first]} drafts; it has {num_uncomputed_B[first]} to compute"
            )
