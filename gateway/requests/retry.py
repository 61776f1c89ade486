"""RetryState: which workers a request may use next, and when the gateway gives it up; pure.

After a failed attempt, another attempt continues on other workers, after the tokens that the client already
has. A worker *fails* a request if it reports that it could not compute the request. An attempt is without
progress if the client got no token from its decode worker. The gateway gives a request up after

    MAX_FAILURES  attempts, since the latest progress, in which a worker reported a failure
    MAX_LOSSES    attempts, since the latest progress, in which a worker was lost. This limit is higher, since
                  most requests on a killed worker did not cause its end
    MAX_ATTEMPTS  failures and losses in total, even if each attempt brought a few tokens

So a request that kills its workers at the same token kills at most MAX_LOSSES workers. suspects.py stops most
such requests earlier. Attempts that were given back or refused do not count. The time for which a request may
look for a place limits their number.
"""

from collections.abc import Callable, Set
from dataclasses import replace
from typing import Literal

from baton.errors import Overloaded, RequestError, WorkerUnavailable
from baton.request import OnPreemption
from baton.worker import WorkerRole, WorkerStatus
from gateway.admission.suspects import TAKES_TURNS
from gateway.requests.attempt import Attempt, AttemptFailure, Cause
from gateway.requests.request import GatewayRequest
from gateway.routing.placement import Mode, NoRoom, Pair, Placement, RouteQuery
from gateway.routing.router import Router

LoadFailurePolicy = Literal["retry", "recompute", "fail"]

MAX_FAILURES = 3
"""The last attempt before this limit uses a decode worker alone, unless the request requires a prefill worker."""
MAX_LOSSES = 8
MAX_ATTEMPTS = 64
MAX_GIVEN_BACK = 2
"""How often a request may be given back or taken back, for any reason. After that, a worker that runs out of blocks
keeps the request until it has blocks."""


class RetryState:
    """The retries of one request. Times are on the clock of the code that calls it, in seconds."""

    def __init__(
        self,
        request: GatewayRequest,
        router: Router,
        policy: LoadFailurePolicy,
        now: float,
        *,
        require_disaggregated: bool = False,
    ) -> None:
        """`require_disaggregated` (see GatewayConfig): a decode worker computes prompts only in local mode, not as a
        fallback."""
        self._request = request
        self._router = router
        self._policy = policy
        self._may_recompute = request.mode is not Mode.DISAGGREGATED and not require_disaggregated
        self._failed: dict[str, str] = {}
        """Incarnations of workers that failed the request, by name. Another incarnation may succeed."""
        self._refused: dict[str, WorkerStatus | None] = {}
        """Workers that refused the request or gave it back, each with its latest heartbeat at that time. None: the
        worker accepted no requests. A worker may have room again once its latest heartbeat is another object."""
        self._num_failures = 0
        """Number of attempts, since the latest progress, in which a worker reported a failure."""
        self._num_losses = 0
        """Number of attempts, since the latest progress, in which a worker was lost."""
        self._num_counted = 0
        """Number of all failures and losses."""
        self._num_given_back = 0
        self._last_failure: AttemptFailure | None = None
        self.num_attempts = 0
        """Number of all attempts, including those that do not count."""
        self.seeking_since = now
        """When the request began to look for a place. If a worker gave the request back without progress, the
        time on that worker is added here, so that it does not count as time in the queue."""

    def route(
        self,
        output_token_ids: tuple[int, ...],
        avoided: Set[Pair] = frozenset(),
        refusal_at: Callable[[str], RequestError | None] = lambda _: None,
        *,
        is_suspect: bool = False,
    ) -> Placement | RequestError:
        """The next placement; NoRoom or WorkerUnavailable if the request has to wait. See RouteQuery.

        If every other worker is excluded, the request is retried on a worker that failed it before. A suspect does not
        go to workers on which another suspect has its turn.
        """
        failed, refused = self._excluded()
        query = replace(self._query(output_token_ids), avoided=avoided, refusal_at=refusal_at)
        placement = self._without(query, failed, refused)
        others_turn = self._router.busy_with_suspects() if is_suspect else frozenset()
        if others_turn and isinstance(placement, Placement):
            free = self._without(query, failed, refused | others_turn)
            lacks_worker = isinstance(free, WorkerUnavailable)
            is_fallback = isinstance(free, Placement) and free.is_fallback and not placement.is_fallback
            return WorkerUnavailable(TAKES_TURNS) if lacks_worker or is_fallback else free
        if isinstance(placement, WorkerUnavailable) and refused and self._last_failure is not None:
            return NoRoom(self._disclosed(self._last_failure))
        return placement

    def _without(
        self, query: RouteQuery, failed: frozenset[str], excluded: frozenset[str]
    ) -> Placement | RequestError:
        """A placement without any of these workers. If there is none, the workers of `failed` may be used, too."""
        placement = _routed(self._router, replace(query, excluded=failed | excluded))
        if isinstance(placement, WorkerUnavailable) and failed:
            placement = _routed(self._router, replace(query, excluded=excluded))
        return placement

    def num_tokens_to_compute(self) -> dict[str, int]:
        """How many prompt tokens each possible worker would have to compute; see Router.num_tokens_to_compute."""
        return self._router.num_tokens_to_compute(self._query(()))

    def needs(self) -> object:
        """What the request needs of a worker. If two requests have equal needs, either both find a worker or neither
        does."""
        return self._request.mode, self._is_without_prefill, *self._excluded()

    def begin(self, placement: Placement, engine_request_id: str, num_tokens: int, now: float) -> Attempt:
        """Returns a new attempt. The client already has `num_tokens` tokens of the answer."""
        self.num_attempts += 1
        ready = {
            name: self._router.ready_worker(name) for name in (placement.decode, placement.prefill) if name
        }
        awaits_prompt_logprobs = self._request.sampling_params.prompt_logprobs is not None and not num_tokens
        recomputes = self._policy == "recompute" and self._may_recompute and not awaits_prompt_logprobs
        return Attempt(
            engine_request_id,
            placement,
            num_tokens,
            decode_recomputes=placement.prefill is not None and recomputes,
            refs={name: worker.status.ref for name, worker in ready.items() if worker},
            awaits_prompt_logprobs=placement.prefill is not None and awaits_prompt_logprobs,
            on_preemption=self._on_preemption(placement),
            number=self.num_attempts - 1,
            began_at=now,
        )

    def on_failure(
        self, attempt: Attempt, failure: AttemptFailure, num_tokens: int, now: float
    ) -> RequestError | None:
        """Records a failed attempt. Returns the request's final error, or None if it may be placed again.

        `num_tokens`: how many tokens of the answer the client has.
        """
        if failure.error is not None:
            return failure.error
        self._last_failure = failure
        has_progressed = attempt.has_progressed(num_tokens)
        if has_progressed:
            self._num_failures = self._num_losses = 0
        if failure.cause in (Cause.LOST, Cause.FAILED) or has_progressed:
            self.seeking_since = now
        else:
            self.seeking_since += now - attempt.began_at
        if failure.cause in (Cause.REFUSED, Cause.GIVEN_BACK):
            self._num_given_back += failure.cause is Cause.GIVEN_BACK
            worker = self._router.ready_worker(failure.worker)
            self._refused[failure.worker] = worker.status if worker else None
            return None
        return self._count(attempt, failure, has_progressed)

    def too_late(self, reason: RequestError, waited_s: float, retry_after_s: float) -> RequestError:
        """The error for a request that found no place in time."""
        if isinstance(reason, NoRoom | Overloaded):
            return Overloaded(f"no room within {waited_s:g} s: {reason}", retry_after_s)
        before = f"; before that, {self._disclosed(self._last_failure)}" if self._last_failure else ""
        return WorkerUnavailable(f"{reason}; waited {waited_s:g} s for a worker{before}")

    @property
    def _is_without_prefill(self) -> bool:
        return self._num_failures + 1 >= MAX_FAILURES and self._may_recompute

    def _on_preemption(self, placement: Placement) -> OnPreemption:
        """A worker that runs out of blocks gives the request back if that helps, at most MAX_GIVEN_BACK times.

        It helps if another decode worker may have room. It also helps if the placement has a prefill worker:
        then the prompt is long, and a prefill worker can recompute it.
        """
        has_choice = self._router.num_ready(WorkerRole.DECODE) > 1 or placement.prefill is not None
        if has_choice and self._num_given_back < MAX_GIVEN_BACK:
            return OnPreemption.GIVE_BACK
        return OnPreemption.RESUME

    def _excluded(self) -> tuple[frozenset[str], frozenset[str]]:
        """Workers whose current incarnation failed the request, and workers that refused it since their last
        heartbeat."""
        if not self._failed and not self._refused:  # true for nearly all requests
            return frozenset(), frozenset()
        names = {*self._failed, *self._refused}
        ready = [(name, worker.status) for name in names if (worker := self._router.ready_worker(name))]
        failed = (name for name, status in ready if self._failed.get(name) == status.ref.incarnation)
        refused = (name for name, status in ready if self._refused.get(name) is status)
        return frozenset(failed), frozenset(refused)

    def _query(self, output_token_ids: tuple[int, ...]) -> RouteQuery:
        request = self._request
        hashes = request.block_hashes
        if output_token_ids:  # other answers to this prompt share the lists, but not these tokens
            hashes = {size: [*of_prompt] for size, of_prompt in hashes.items()}
        return RouteQuery(
            token_ids=request.prompt_token_ids + output_token_ids,
            max_new_tokens=request.sampling_params.max_tokens - len(output_token_ids),
            cache_salt=request.cache_salt,
            block_hashes=hashes,
            skip_reading_prefix_cache=request.skip_reading_prefix_cache,
            affinity_key=request.affinity_key,
            mode=request.mode,
            without_prefill=self._is_without_prefill,
        )

    def _count(
        self, attempt: Attempt, failure: AttemptFailure, has_progressed: bool
    ) -> WorkerUnavailable | None:
        self._num_counted += 1
        if failure.cause is Cause.FAILED:
            self._num_failures += not has_progressed
            if ref := attempt.refs.get(failure.worker):
                self._failed[failure.worker] = ref.incarnation
        else:
            self._num_losses += not has_progressed
        is_over = (
            (failure.is_prompt_lost and self._policy == "fail")
            or self._num_failures >= MAX_FAILURES
            or self._num_losses >= MAX_LOSSES
            or self._num_counted >= MAX_ATTEMPTS
        )
        if is_over:
            return WorkerUnavailable(
                f"gave up after {self.num_attempts} attempt(s): {self._disclosed(failure)}"
            )
        return None

    def _disclosed(self, failure: AttemptFailure) -> str:
        """The failure as a text for the client. It contains the worker's reason only if the caller is an administrator,
        since a reason may name machines and files."""
        return str(failure) if self._request.caller.may_administer else failure.summary


def _routed(router: Router, query: RouteQuery) -> Placement | RequestError:
    try:
        return router.route(query)
    except RequestError as error:
        return error
