"""Trial: finds the request that breaks a step: ever smaller groups of the step's requests are computed separately.

A failed step's requests are tried in two halves. If the step of a half fails, this half is split again, and
its parts wait until the other groups have been tried. A request whose step fails without other requests in it is
the one that breaks steps. A request has passed once it is computed as far as the failed step would have
computed it. Knows no device.
"""

from collections import deque
from collections.abc import Mapping, Set

from baton.step import SchedulerOutput

NumComputedTokens = Mapping[str, int]
"""By request: the number of its computed tokens after a step."""


class Trial:
    """The search. `group`: the requests whose turn it is. A step that was planned before their turn is ignored: it lets
    no request pass."""

    def __init__(self) -> None:
        self._groups: deque[dict[str, int]] = deque()
        """Groups in the order of their turns; for each request, the number of tokens to compute until it
        passes."""
        self._first_step = 0
        """The first step that may belong to the present group."""
        self._has_passed_in_group = False
        """Whether a request of the present group has passed."""
        self.has_passed = False
        """Whether a request of this trial has passed. If so, the device works: requests cause all further failures."""

    @property
    def group(self) -> Set[str] | None:
        """The only requests that may compute; None if no trial is under way."""
        return self._groups[0].keys() if self._groups else None

    def step_failed(self, num_computed: NumComputedTokens, next_step: int, *, was_alone: bool) -> str | None:
        """Splits the failed step's unfinished requests. Returns the request that breaks the step, if it was alone in
        it."""
        if not self._groups:
            self.has_passed = False
        elif untried := {
            each: end for each, end in self._groups.popleft().items() if each not in num_computed
        }:
            self._groups.append(untried)
        request_ids = list(num_computed)
        middle = len(request_ids) // 2
        halves = [] if was_alone else [request_ids[:middle], request_ids[middle:]]
        self._groups += [{each: num_computed[each] for each in half} for half in halves if half]
        self._begin_turn(next_step)
        return next(iter(request_ids), None) if was_alone else None

    def step_computed(self, step: int, num_computed: NumComputedTokens, next_step: int) -> bool:
        """Notes a step that was computed during the trial. True if the turn of another group begins."""
        if step < self._first_step:
            return False
        group = self._groups[0]
        tried = group.keys() & num_computed.keys()
        for request_id in [each for each in tried if num_computed[each] >= group[each]]:
            del group[request_id]
            self._has_passed_in_group = self.has_passed = True
        if tried and group:
            return False
        self._groups.popleft()
        if group and self._has_passed_in_group:  # the rest found no room beside those that passed
            self._groups.append(group)
        self._begin_turn(next_step)
        return bool(self._groups)

    def _begin_turn(self, next_step: int) -> None:
        self._first_step = next_step
        self._has_passed_in_group = False


def num_computed_after(plan: SchedulerOutput) -> NumComputedTokens:
    """Each request's computed tokens after the step of `plan`, without drafts, since a retried request lacks them."""
    starts, drafts = plan.num_computed_tokens(), plan.scheduled_spec_decode_tokens
    return {
        request_id: starts[request_id] + num_tokens - len(drafts.get(request_id, ()))
        for request_id, num_tokens in plan.num_scheduled_tokens.items()
    }
