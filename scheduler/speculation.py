"""Speculation: drafts and forced tokens in the scheduler; does not know their source or their verifier.

    tokens        known | last known   draft   draft   draft
    computed                 *           *       *       *      the step has slots for all of them
    sampled                  a           b       c       d      if the second draft is not b, then a and b count

In this example the first draft was a, and the second was not b. So a and b are new tokens. The next step
computes b, in the slot of the wrong draft.

A token that a grammar forces is not a draft. It belongs to the request at once, and is computed like a prompt
token.

A step is planned before the output of the previous step only if that output's number of tokens is
foreseeable. With drafts or forced tokens it is not: only the output tells how many tokens there are, and
which drafts follow them. The runner names the requests for which this is so
(`ModelRunnerOutput.unforeseeable`).
"""

from collections import Counter
from collections.abc import Container, Iterable, Mapping
from itertools import chain

from baton.step import ModelRunnerOutput
from scheduler.limits import ContextLimits
from scheduler.request import Request, RequestStatus
from scheduler.step import StepPlan


class Speculation:
    """Drafts are proposed after a step, scheduled with the next one, and verified by it."""

    def __init__(self, num_speculative_tokens: int, limits: ContextLimits) -> None:
        """`num_speculative_tokens`: the largest number of drafts per request and step; 0 turns drafts off."""
        self._num_speculative_tokens = num_speculative_tokens
        self._max_num_computed_tokens = limits.max_model_len - 1
        self._is_active = False
        """Whether there has been an unforeseeable request."""
        self._num_forced = 0
        """Number of forced tokens that requests accepted."""
        self._forced: dict[str, tuple[int, ...]] = {}
        """Forced tokens that the runner has to append."""
        self._outcomes: Counter[tuple[int, int]] = Counter()
        """Number of verifications, by number of drafts and number of accepted drafts."""

    def begin(self, request: Request) -> None:
        """Marks a new request as unforeseeable if its first output may come with drafts or forced tokens."""
        may_speculate = self._num_speculative_tokens or request.sampling_params.structured_output is not None
        request.is_unforeseeable = bool(may_speculate) and not request.is_producer
        self._is_active |= request.is_unforeseeable

    def awaits_output(self, under_way: Mapping[int, Iterable[Request]]) -> bool:
        """Whether a step planned now would omit a request, since a current step may bring several tokens for it."""
        return self._is_active and any(
            request.is_unforeseeable and request.num_output_placeholders
            for request in chain.from_iterable(under_way.values())
        )

    def num_wanted_tokens(self, request: Request, num_wanted: int, num_computed_tokens: int) -> int:
        """How many tokens a request with drafts wants. The last token of a full context is never computed."""
        num_with_drafts = num_wanted + len(request.spec_token_ids)
        return min(num_with_drafts, self._max_num_computed_tokens - num_computed_tokens)

    def schedule(self, request: Request, num_tokens: int, step: StepPlan) -> None:
        """Schedules the drafts that fit into the request's `num_tokens` tokens of this step; drops others."""
        num_drafts = request.num_computed_tokens + num_tokens - request.num_tokens
        if num_drafts > 0:
            step.spec_token_ids[request.request_id] = request.spec_token_ids[:num_drafts]
        request.spec_token_ids = ()

    def count_drafts(
        self,
        requests: Iterable[Request],
        drafts: Mapping[str, tuple[int, ...]],
        sampled: Mapping[str, list[int]],
    ) -> None:
        """Counts accepted drafts, and drops the others. Call it before taking the step's samples, which may end their
        requests."""
        if not drafts:
            return
        for request in requests:
            token_ids = sampled.get(request.request_id)
            if token_ids and request.request_id in drafts:
                self._drop_wrong_drafts(request, len(drafts[request.request_id]), len(token_ids))

    def _drop_wrong_drafts(self, request: Request, num_drafts: int, num_sampled: int) -> None:
        """Subtracts the wrong drafts from the request's computed tokens.

        The step sampled `num_sampled` tokens. All of them but the last were drafts. The other drafts were
        wrong.
        """
        num_accepted = num_sampled - 1
        if request.num_computed_tokens:  # else it was preempted since then, and computes all again
            request.num_computed_tokens -= num_drafts - num_accepted
        self._outcomes[num_drafts, num_accepted] += 1

    def propose(self, requests: Iterable[Request], output: ModelRunnerOutput) -> None:
        """Keeps drafts for each request's next step, or drops them if that step is already under way."""
        if not self._is_active:
            return
        running = RequestStatus.RUNNING
        for request in requests:
            request_id = request.request_id
            if request_id in output.sampled_token_ids:
                drafts = output.draft_token_ids.get(request_id, ())[: self._num_speculative_tokens]
                request.is_unforeseeable = bool(drafts) or request_id in output.unforeseeable
                if request.status is running and not request.num_output_placeholders:
                    request.spec_token_ids = drafts

    def append_forced(self, request: Request, forced: tuple[int, ...], num_taken: int) -> None:
        """Keeps forced tokens for the runner. The request took `num_taken` of them: all of them, unless it ended."""
        assert not request.num_output_placeholders, f"{request.request_id}: planned past forced tokens"
        self._num_forced += max(0, num_taken)
        self._forced[request.request_id] = forced

    def take_forced(self, unfinished: Container[str]) -> dict[str, tuple[int, ...]]:
        """The forced tokens of the last step, for the next one's plan."""
        forced, self._forced = self._forced, {}
        return {request_id: tokens for request_id, tokens in forced.items() if request_id in unfinished}

    def counters(self) -> Counter[str]:
        """Counts since the start.

        These are counted: the steps of a request with drafts, the drafts, the accepted drafts (all of them, and by
        position from 0 on), and the forced tokens.
        """
        counts = Counter[str](forced_tokens=self._num_forced)
        for (num_drafts, num_accepted), num_steps in self._outcomes.items():
            counts["spec_decode_num_drafts"] += num_steps
            counts["spec_decode_num_draft_tokens"] += num_drafts * num_steps
            counts["spec_decode_num_accepted_tokens"] += num_accepted * num_steps
            for place in range(num_accepted):
                counts[f"spec_decode_num_accepted_tokens_per_pos_{place}"] += num_steps
        return counts
