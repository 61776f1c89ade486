"""Speculation: drafts and forced tokens in the scheduler; knows neither who guesses or forces nor who verifies them.

    tokens        known | last known   draft   draft   draft
    computed                 *           *       *       *      the step has slots for all of them
    sampled                  a           b       c       d      if the second draft is not b, then a and b count

The first draft was a. So a and b are new tokens, and b is computed by the next step, where the wrong draft was.

A token that a grammar forces is no draft. It is a token of the request at once, and computed like the rest of a prompt.

A step is planned past another one only where it is foreseeable what that one brings. With drafts or forced tokens it
is not: how many tokens there will be, and which drafts follow them, is known with the step's output. The runner says
for which requests (`ModelRunnerOutput.unforeseeable`).
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
        """`num_speculative_tokens`: the most drafts of a request in one step; 0: none."""
        self._num_speculative_tokens = num_speculative_tokens
        self._max_num_computed_tokens = limits.max_model_len - 1
        self._is_active = False
        """There has been an unforeseeable request."""
        self._num_forced = 0
        """Forced tokens that requests took."""
        self._forced: dict[str, tuple[int, ...]] = {}
        """Forced tokens that the runner has to append."""
        self._outcomes: Counter[tuple[int, int]] = Counter()
        """How often so many drafts were verified, and so many of them were right."""

    def begin(self, request: Request) -> None:
        """Before its first output, the runner has not said yet whether tokens are forced or guessed behind it."""
        may_speculate = self._num_speculative_tokens or request.sampling_params.structured_output is not None
        request.is_unforeseeable = bool(may_speculate) and not request.is_producer
        self._is_active |= request.is_unforeseeable

    def awaits_output(self, under_way: Mapping[int, Iterable[Request]]) -> bool:
        """Whether a step planned now would leave out a request, for its token in flight may not be the only one."""
        return self._is_active and any(
            request.is_unforeseeable and request.num_output_placeholders
            for request in chain.from_iterable(under_way.values())
        )

    def num_wanted_tokens(self, request: Request, num_wanted: int, num_computed_tokens: int) -> int:
        """With drafts, what the request wants. The last token of a full context is never computed."""
        num_with_drafts = num_wanted + len(request.spec_token_ids)
        return min(num_with_drafts, self._max_num_computed_tokens - num_computed_tokens)

    def schedule(self, request: Request, num_tokens: int, step: StepPlan) -> None:
        """Trims the drafts to the request's `num_tokens` tokens of this step; the others are dropped."""
        num_drafts = request.num_computed_tokens + num_tokens - request.num_tokens
        if num_drafts > 0:
            step.spec_token_ids[request.request_id] = request.spec_token_ids[:num_drafts]
        request.spec_token_ids = ()

    def verify(
        self,
        requests: Iterable[Request],
        drafts: Mapping[str, tuple[int, ...]],
        sampled: Mapping[str, list[int]],
    ) -> None:
        """Before a step's samples are taken, since they may end their requests."""
        if not drafts:
            return
        for request in requests:
            token_ids = sampled.get(request.request_id)
            if token_ids and request.request_id in drafts and not request.is_finished:
                self.verified(request, len(drafts[request.request_id]), len(token_ids))

    def verified(self, request: Request, num_drafts: int, num_sampled: int) -> None:
        """The step sampled `num_sampled` tokens, of which all but the last were drafts: the other drafts were wrong, so
        their places are not computed.
        """
        num_accepted = num_sampled - 1
        if request.num_computed_tokens:  # else it has been preempted since, and computes all again
            request.num_computed_tokens -= num_drafts - num_accepted
        self._outcomes[num_drafts, num_accepted] += 1

    def propose(self, requests: Iterable[Request], output: ModelRunnerOutput) -> None:
        """Keeps the drafts of a step's requests for the next one, unless that is under way. Then they come too late."""
        if not self._is_active:
            return
        for request in requests:
            name = request.request_id
            if name in output.sampled_token_ids:
                drafts = output.draft_token_ids.get(name, ())[: self._num_speculative_tokens]
                request.is_unforeseeable = bool(drafts) or name in output.unforeseeable
                if request.status is RequestStatus.RUNNING and not request.num_output_placeholders:
                    request.spec_token_ids = drafts

    def append_forced(self, request: Request, forced: tuple[int, ...], num_taken: int) -> None:
        """The request took the first `num_taken` of them: all, unless one of its tokens ended it."""
        assert not request.num_output_placeholders, f"{request.request_id}: planned past forced tokens"
        self._num_forced += max(0, num_taken)
        self._forced[request.request_id] = forced

    def take_forced(self, unfinished: Container[str]) -> dict[str, tuple[int, ...]]:
        """The forced tokens of the last step, for the next one's plan."""
        forced, self._forced = self._forced, {}
        return {name: token_ids for name, token_ids in forced.items() if name in unfinished}

    def counters(self) -> Counter[str]:
        """Since the start: requests' steps with drafts, their drafts, and the right ones, also by place from 0 on; and
        forced tokens.
        """
        counts = Counter[str](forced_tokens=self._num_forced)
        for (num_drafts, num_accepted), times in self._outcomes.items():
            counts["spec_decode_num_drafts"] += times
            counts["spec_decode_num_draft_tokens"] += num_drafts * times
            counts["spec_decode_num_accepted_tokens"] += num_accepted * times
            for place in range(num_accepted):
                counts[f"spec_decode_num_accepted_tokens_per_pos_{place}"] += times
        return counts
