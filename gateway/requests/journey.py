"""Journey: a request on its way through attempts: where it may go next, and when it is given up; pure, knows no socket.

An attempt that failed is followed by another one, elsewhere, behind the tokens that the client has already:

                          +------ failed, lost, given back, refused ------+
                          v                                               |
    arrives -> seeks a place -> (waits for room or for a worker) -> an attempt -> answered
                          |                                               |
                          +-> overloaded, unavailable                     +-> given up: see below

What counts against a request are attempts *in vain*: they brought the client no new token by a worker that decodes, and
were somebody's failure. It ends after MAX_FAILURES of them in a row where workers live and say that they could not do
it; or after MAX_LOSSES where workers vanish, since in a fleet whose workers are killed at random most of those who lose
them are bystanders. So a request that kills whoever computes it takes at most MAX_LOSSES workers with it, if it dies
where it died before; and one that gets a little further each time, at most MAX_ATTEMPTS. To be given back or refused
counts as nothing: that is bounded by the time that a request may look for a place.
"""

from dataclasses import dataclass
from typing import Literal

from baton.errors import Overloaded, RequestError, WorkerUnavailable
from baton.request import OnPreemption
from baton.worker import WorkerRole
from gateway.requests.attempt import Attempt, AttemptFailed, Cause
from gateway.routing.placement import Ask, Mode, NoRoom, Placement
from gateway.routing.router import Router
from gateway.workers.worker_list import WorkerList

LoadFailurePolicy = Literal["retry", "recompute", "fail"]

MAX_FAILURES = 3
"""Failures in a row without a new token. After the first two the prompt is computed by the decode worker, unless the
request requires a prefill worker."""
MAX_LOSSES = 8
"""Losses of workers in a row without a new token."""
MAX_ATTEMPTS = 64
"""Failures and losses in all, whatever they brought."""
MAX_GIVEN_BACK = 2
"""After that, a worker without room keeps the request until it has some."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Errand:
    """What is asked for: as much of a client's request as it takes to find workers for it."""

    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    cache_salt: str | None = None
    mode: Mode | None = None
    must_not_fall_back: bool = False
    """By the gateway's configuration: it runs on a decode worker alone by choice, or not at all."""
    is_told_reasons: bool = False
    """Whether an error may repeat what a worker said, which may name machines and files; else the log has it."""


class Journey:
    """Of one request. Times are the caller's, in seconds."""

    def __init__(
        self, errand: Errand, policy: LoadFailurePolicy, worker_list: WorkerList, now: float
    ) -> None:
        self._errand = errand
        self._policy = policy
        self._worker_list = worker_list
        self._failed: dict[str, str] = {}
        """Workers that failed it, and in which life: the next life is somebody else."""
        self._refused: dict[str, int] = {}
        """Workers that did not want it, and how often they had been heard then: they may have room by now."""
        self._num_failures = 0
        self._num_losses = 0
        self._num_in_all = 0
        self._last_failure: AttemptFailed | None = None
        self.num_attempts = 0
        self.num_given_back = 0
        self.seeking_since = now
        """Since when it looks for a place, as if the time had stood still while it was with workers that did nothing
        for it: to have stood in the line of one that gives it back is no reason to be given up sooner here."""
        self._attempt_began_at = now

    @property
    def may_recompute(self) -> bool:
        """A request that must not fall back is never computed by its decode worker in silence."""
        return self._errand.mode is not Mode.DISAGGREGATED and not self._errand.must_not_fall_back

    def route(self, router: Router, output_token_ids: tuple[int, ...]) -> Placement:
        """Where it goes next; NoRoom or WorkerUnavailable if it has to wait.

        Whoever failed it is better than nobody.
        """
        failed, refused = self.excluded()
        try:
            return router.route(self._ask(output_token_ids, failed | refused))
        except WorkerUnavailable:
            if not failed and not refused:
                raise
        try:
            return router.route(self._ask(output_token_ids, refused))
        except WorkerUnavailable:
            if not refused or self._last_failure is None:
                raise
            raise NoRoom(self._told(self._last_failure)) from self._last_failure

    def lacking(self, router: Router) -> dict[str, int]:
        """How many tokens of its prompt each worker lacks that may compute it, as Router.lacking has it."""
        return router.lacking(self._ask((), frozenset()))

    def needs(self) -> object:
        """Two requests that need the same find a worker both or neither."""
        failed, refused = self.excluded()
        return self._errand.mode, self._is_without_prefill, failed, refused

    def excluded(self) -> tuple[frozenset[str], frozenset[str]]:
        """Workers that failed it in the lives they live now, and those that do not want it at present."""
        lives = [
            (name, life) for name in {*self._failed, *self._refused} if (life := self._worker_list.get(name))
        ]
        failed = (name for name, life in lives if self._failed.get(name) == life.incarnation)
        refused = (name for name, life in lives if self._refused.get(name) == life.num_heard)
        return frozenset(failed), frozenset(refused)

    def begin(self, placement: Placement, request_id: str, num_tokens: int, now: float) -> Attempt:
        """An attempt for a client that has so many tokens of the answer."""
        self._attempt_began_at = now
        self.num_attempts += 1
        lives = {name: self._worker_list.get(name) for name in (placement.decode, placement.prefill) if name}
        copes = placement.prefill is not None and self._policy == "recompute" and self.may_recompute
        incarnations = {name: life.incarnation for name, life in lives.items() if life}
        return Attempt(request_id, placement, num_tokens, copes, incarnations)

    def on_preemption(self, placement: Placement) -> OnPreemption:
        """Who runs out of blocks gives it back where that helps, and not for ever.

        It helps where another decode worker may have room, or where a prefill worker computes what this one would have
        to compute again; the router found the request long enough for one.
        """
        has_choice = self._worker_list.num_of(WorkerRole.DECODE) > 1 or placement.prefill is not None
        if has_choice and self.num_given_back < MAX_GIVEN_BACK:
            return OnPreemption.GIVE_BACK
        return OnPreemption.RESUME

    def end(
        self, attempt: Attempt, failure: AttemptFailed, num_tokens: int, now: float
    ) -> RequestError | None:
        """An attempt failed, when the client had so many tokens; the error that ends the request, if it has to end."""
        self._last_failure = failure
        # A prefill worker brings a token to each attempt; a request that lived on these would never decode.
        has_progressed = num_tokens > attempt.num_tokens_before + (attempt.placement.prefill is not None)
        if has_progressed:
            self._num_failures = self._num_losses = 0
        if failure.cause in (Cause.LOST, Cause.FAILED) or has_progressed:
            self.seeking_since = now
        else:
            self.seeking_since += now - self._attempt_began_at
        self.num_given_back += failure.cause is Cause.GIVEN_BACK
        if failure.cause in (Cause.REFUSED, Cause.GIVEN_BACK):
            life = self._worker_list.get(failure.worker)
            self._refused[failure.worker] = life.num_heard if life else 0
            return None
        return self._count(attempt, failure, has_progressed)

    def too_late(self, reason: RequestError, waited_s: float, retry_after_s: float) -> RequestError:
        """What the client is told when nobody took the request in the time that it may wait."""
        if isinstance(reason, NoRoom | Overloaded):
            return Overloaded(f"no room within {waited_s:g} s: {reason}", retry_after_s)
        before = f"; before that, {self._told(self._last_failure)}" if self._last_failure else ""
        return WorkerUnavailable(f"{reason}; waited {waited_s:g} s for one{before}")

    @property
    def _is_without_prefill(self) -> bool:
        return self._num_failures + 1 >= MAX_FAILURES and self.may_recompute

    def _ask(self, output_token_ids: tuple[int, ...], excluded: frozenset[str]) -> Ask:
        errand = self._errand
        return Ask(
            token_ids=errand.prompt_token_ids + output_token_ids,
            max_new_tokens=errand.max_tokens - len(output_token_ids),
            cache_salt=errand.cache_salt,
            mode=errand.mode,
            excluded=excluded,
            without_prefill=self._is_without_prefill,
        )

    def _count(
        self, attempt: Attempt, failure: AttemptFailed, has_progressed: bool
    ) -> WorkerUnavailable | None:
        self._num_in_all += 1
        if failure.cause is Cause.FAILED:
            self._num_failures += not has_progressed
            if incarnation := attempt.incarnations.get(failure.worker):
                self._failed[failure.worker] = incarnation
        else:
            self._num_losses += not has_progressed
        is_over = (
            (failure.is_prompt_lost and self._policy == "fail")
            or self._num_failures >= MAX_FAILURES
            or self._num_losses >= MAX_LOSSES
            or self._num_in_all >= MAX_ATTEMPTS
        )
        if is_over:
            return WorkerUnavailable(f"gave up after {self.num_attempts} attempt(s): {self._told(failure)}")
        return None

    def _told(self, failure: AttemptFailed) -> str:
        return str(failure) if self._errand.is_told_reasons else failure.summary
