"""Dispatcher: brings each client's request to exactly one end, with as many attempts as needed; sans-IO.

    effects = dispatcher.handle(event, now)       gateway/requests/events.py defines events and effects
    dispatcher.next_deadline()                    the latest time for the next Tick

    Submitted ----> queue ----> placed on a pair ---- WorkerOutputs ----> Deliver ... Deliver with a finish
                      ^               |
                      |            failure (an output that reports it, or WorkerLost)
                      |               v
                      +------ RetryState.on_failure ----> Refuse

The dispatcher has no clock, no sockets and no source of randomness, so the simulator runs it unchanged. In a
real gateway, gateway/requests/driver.py drives it.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

from baton.errors import DeadlinePassed, RequestError, WorkerUnavailable
from baton.request import ErrorKind, RequestOutput
from gateway.admission.fair_queue import QueueEntry
from gateway.admission.queue import RequestQueue
from gateway.admission.shares import CallerShares
from gateway.admission.suspects import TAKES_TURNS, Identity, Suspects
from gateway.auth.callers import Caller
from gateway.requests.attempt import Attempt, AttemptFailure
from gateway.requests.events import (
    AbortAt,
    AbortRequested,
    Deliver,
    Effect,
    Event,
    Placed,
    Record,
    Refuse,
    StreamEnded,
    Submitted,
    SubmitTo,
    Tick,
    WorkerLost,
    WorkerOutputs,
    WorkerReported,
)
from gateway.requests.fleet_knowledge import FleetKnowledge
from gateway.requests.open_requests import OpenRequests
from gateway.requests.record import Outcome, Tally, record_of
from gateway.requests.request import Delta, GatewayRequest
from gateway.requests.request_state import RequestPhase, RequestState
from gateway.requests.retry import LoadFailurePolicy, RetryState
from gateway.routing.placement import NoRoom, Placement
from gateway.routing.prefill_times import too_close
from gateway.routing.router import Router
from gateway.timing.latency_window import LatencyWindow
from gateway.workers.worker_listener import LossCause

logger = logging.getLogger(__name__)


class Dispatcher:
    """All open requests of one gateway. Times must not run backwards."""

    def __init__(
        self,
        router: Router,
        policy: LoadFailurePolicy,
        draw_id: Callable[[int], str],
        *,
        max_in_flight: int,
        max_queued: int,
        placement_timeout_s: float,
        require_disaggregated: bool = False,
    ) -> None:
        """`draw_id(n)` returns a new unique id of n bytes, in hexadecimal."""
        self.router = router
        self._fleet = FleetKnowledge(router)
        self.avoided_pairs = self._fleet.avoided_pairs
        self.tally = Tally()
        self.latencies = LatencyWindow()
        self._policy = policy
        self._draw_id = draw_id
        self._placement_timeout_s = placement_timeout_s
        self._require_disaggregated = require_disaggregated
        self._shares = shares = CallerShares[RequestState](router, max_in_flight)
        self.queue = RequestQueue[RequestState](
            max_queued, self._try_to_place, placement_timeout_s, shares.over_share
        )
        """The waiting requests. Other code may only read it."""
        self._entries: dict[RequestState, QueueEntry[RequestState]] = {}
        """The queue entries of waiting requests."""
        self._placed: dict[str, RequestState] = {}
        """Requests on workers, by the request id that workers know."""
        self._open = OpenRequests()
        self.suspects = Suspects()
        self._must_sweep = False
        self._now = 0.0
        self._effects: list[Effect] = []

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Handles an event. Returns its effects, which the caller must carry out in this order."""
        self._now = now
        match event:
            case WorkerOutputs(worker, outputs):
                self._on_outputs(worker, outputs)
            case Submitted(request):
                self._on_submitted(request)
            case StreamEnded(request, error):
                self._on_stream_ended(request, error)
            case AbortRequested(request):
                self._drop(self._open[request])
            case WorkerReported(status):
                self._fleet.on_report(status, self._now)
                self._take_back(status.ref.name)
                self._must_sweep = True
            case WorkerLost(worker, cause, reason):
                self._on_worker_lost(worker, cause, reason)
                self._must_sweep = True  # requests that wait for this worker must be tried again
            case Tick():
                self._refuse_overdue()
        must_sweep, self._must_sweep = self._must_sweep, False
        if must_sweep and len(self.queue):
            self.queue.sweep(now)
        effects, self._effects = self._effects, []
        return effects

    def next_deadline(self) -> float | None:
        """The latest time for the next Tick; None while no request waits."""
        return self.queue.next_deadline()

    # what observers read

    @property
    def num_in_flight(self) -> int:
        """Number of requests on workers, and of requests whose clients have not read the end of the answer yet."""
        return len(self._open) - len(self.queue)

    @property
    def num_queued(self) -> int:
        """Number of requests that wait for a worker with room."""
        return len(self.queue)

    def requests_of(self, call_id: str, caller: Caller) -> list[GatewayRequest]:
        """A caller's open requests under one call id."""
        return self._open.of_call(call_id, caller)

    # the beginning and the end of a request

    def _on_submitted(self, request: GatewayRequest) -> None:
        self.tally.received()
        retry = RetryState(
            request, self.router, self._policy, self._now, require_disaggregated=self._require_disaggregated
        )
        state = RequestState(request, retry, self.latencies, arrived_at=self._now - request.preprocess_s)
        if error := self._open.add(state, self._now) or self.suspects.refusal(state.identity, self._now):
            self._refuse(state, error)
        else:
            if self._shares.arrived(state.caller, self._now):
                self._take_back(*self.router.worker_names)
            self._enqueue(state)

    def _on_stream_ended(self, request: GatewayRequest, error: BaseException | None) -> None:
        state = self._open.remove(request, self._now)
        self._drop(state)
        if error is None:
            outcome, finish = Outcome.FINISHED, state.finish
            assert finish is not None, "a complete answer has a finish"
            self.tally.finished(state.path or "", finish.placement.reason)
            self.latencies.finished(self._now)
            self.suspects.cleared(state.identity)
        else:
            error = state.client_error(error, self._now)
            outcome = self.tally.ended(error, was_placed=state.num_attempts > 0)
        self._effects.append(Record(record_of(state, outcome, error, self._now)))

    def _drop(self, state: RequestState) -> None:
        """Ends the request: removes it from the queue, or aborts it on its workers."""
        if state.phase is RequestPhase.PLACED:
            self._close_attempt(state)
        elif state.phase is RequestPhase.WAITING:
            self._leave_queue(state)
        state.phase = RequestPhase.FINISHED

    def _refuse(self, state: RequestState, error: Exception) -> None:
        self._drop(state)
        self._effects.append(Refuse(state.request, error))

    # waiting

    def _enqueue(self, state: RequestState) -> None:
        """Places the request or queues it. If it cannot be queued, refuses it or another request."""
        request, now = state.request, self._now
        least_prefill_s = 0.0
        if request.deadline is not None and not state.num_attempts:
            least_prefill_s = self._fleet.prefill_times.least_s(state.retry.num_tokens_to_compute(), now)
            left_s = max(0.0, request.deadline - now)
            if least_prefill_s > left_s:
                self._refuse(state, too_close(least_prefill_s, left_s))
                return
        entry = self._entries[state] = QueueEntry(
            item=state,
            caller=state.caller,
            num_tokens=state.num_tokens,
            priority=request.priority,
            is_resumed=state.num_attempts > 0,
            was_taken_back=state.was_taken_back,
            needs=lambda: (self.suspects.is_suspect(state.identity), state.retry.needs()),
            begin_by=None if request.deadline is None else request.deadline - least_prefill_s,
            deadline=request.deadline,
            patience_s=max(0.0, state.retry.seeking_since + self._placement_timeout_s - now),
        )
        if refusal := self.queue.join(entry, now):
            refused, error = refusal
            self._refuse(refused.item, error)

    def _take_back(self, *workers: str) -> None:
        """Returns requests on these workers to the queue if their callers hold more than their share."""
        for state in self._shares.to_take_back(workers, self._now):
            self._fail(state, state.attempt.taken_back())

    def _leave_queue(self, state: RequestState) -> None:
        if entry := self._entries.pop(state, None):
            self.queue.leave(entry, self._now)

    def _refuse_overdue(self) -> None:
        for entry in self.queue.past_deadline(self._now):
            self._refuse(entry.item, DeadlinePassed("the request's deadline passed while it waited"))
        for entry in self.queue.out_of_patience(self._now):
            reason = entry.reason or NoRoom("other requests came first")
            retry, retry_after_s = entry.item.retry, self.queue.retry_after_s(entry)
            self._refuse(entry.item, retry.too_late(reason, self._placement_timeout_s, retry_after_s))

    def _try_to_place(self, entry: QueueEntry[RequestState]) -> RequestError | None:
        """Sends the request to its workers, or returns why that is impossible at present."""
        state, refusal = entry.item, None
        # The entry returns to `_entries` only if the request keeps waiting. Otherwise the sweep removes it from the
        # queue, even after an unexpected error.
        del self._entries[state]
        with self._errors_end_only(state):
            if (refusal := self._place(state, self._now)) is not None:
                self._entries[state] = entry
        return refusal

    def _place(self, state: RequestState, now: float) -> RequestError | None:
        if no_place := self._shares.refusal(state, now):
            return no_place
        if not self.suspects.may_run(state.identity, now):
            return WorkerUnavailable(TAKES_TURNS)
        avoided, refusal_at = self.avoided_pairs.at(now), partial(self._shares.refusal_at, state, now)
        is_suspect = self.suspects.is_suspect(state.identity)
        placement = state.retry.route(state.output_token_ids, avoided, refusal_at, is_suspect=is_suspect)
        if not isinstance(placement, Placement):
            return placement
        if too_many_prompts := self._shares.too_many_prompts(placement, now):
            return too_many_prompts
        self._begin_attempt(state, placement)
        return None

    # attempts

    def _begin_attempt(self, state: RequestState, placement: Placement) -> None:
        # The id begins with the client's id: a search for the client's id then finds the workers' log lines.
        engine_request_id = f"{state.request.request_id}.{self._draw_id(8)}"
        attempt = state.retry.begin(placement, engine_request_id, state.num_output_tokens, self._now)
        state.begin(attempt)
        self._placed[engine_request_id] = state
        self._shares.begun(state, placement)
        is_suspect = self.suspects.placed(state.identity, self._now)
        for name in attempt.workers:
            self.router.sent(name, placement)
        _log(logging.DEBUG, state, f"goes to {' and '.join(attempt.workers)}")
        if state.request.on_placed is not None:
            self._effects.append(Placed(state.request, placement))
        if placement.pair is not None:
            self.avoided_pairs.placed(placement.pair, self._now)
        transfer_id = "" if placement.pair is None else self._draw_id(16)
        sub_requests = state.sub_requests(transfer_id, self._now, is_suspect=is_suspect)
        self._effects += [SubmitTo(worker, sub_request) for worker, sub_request in sub_requests]

    def _close_attempt(self, state: RequestState, failure: AttemptFailure | None = None) -> None:
        attempt = state.attempt
        del self._placed[attempt.engine_request_id]
        self._shares.ended(state, self._now)
        self._must_sweep |= self.suspects.end_turn(state.identity)
        state.end_attempt(self._now, failure)
        self._effects += [AbortAt(worker, attempt.engine_request_id) for worker in attempt.close()]
        self._count_ended(attempt)

    def _fail(self, state: RequestState, failure: AttemptFailure) -> None:
        """Handles every failure of an attempt: the request gets another attempt, or ends."""
        attempt = state.attempt
        _log(logging.INFO, state, f"{failure.worker}: {failure}")
        self._close_attempt(state, failure)
        error = state.retry.on_failure(attempt, failure, state.num_output_tokens, self._now)
        if (last := state.end_if_whole(self._now)) is not None:
            self._effects.append(Deliver(state.request, last))
            state.phase = RequestPhase.FINISHED
        elif state.time_left(self._now) == 0.0:
            self._refuse(state, DeadlinePassed("the request's deadline passed"))
        elif error is not None:
            _log(logging.WARNING, state, f"is given up: {failure}")
            self._refuse(state, error)
        else:
            self.tally.migrated(failure.cause)
            self._enqueue(state)
            self._must_sweep = True

    def _count_ended(self, attempt: Attempt) -> None:
        for worker in attempt.newly_ended():
            self.router.ended(worker, attempt.placement)
            self._must_sweep = True

    # workers' messages

    def _on_outputs(self, worker: str, outputs: Iterable[RequestOutput]) -> None:
        """Handles outputs of a worker. Ignores outputs of requests that are no longer placed."""
        for output in outputs:
            if (state := self._placed.get(output.request_id)) is not None:
                with self._errors_end_only(state):
                    for source, each in state.attempt.in_order(worker, output):
                        self._on_output(state, source, each)

    def _on_output(self, state: RequestState, worker: str, output: RequestOutput) -> None:
        attempt, now = state.attempt, self._now
        if output.error_kind is ErrorKind.STEP_FAILED and worker in attempt.refs:
            incarnation = attempt.refs[worker].incarnation
            if error := self.suspects.step_failed(state.identity, incarnation, now):
                self._stop(state.identity, error)
                return
        was_in_prefill = state.is_in_prefill
        result = state.on_output(worker, output, now)
        if isinstance(result, Delta):
            self._must_sweep |= was_in_prefill  # the prompt is computed: other requests may fit
            self._open.count_answer(state.request, len(result.token_ids), now)
            self._effects.append(Deliver(state.request, result))
            if self.suspects and attempt.has_progressed(state.num_output_tokens):
                self._must_sweep |= self.suspects.got_further(state.identity, state.num_output_tokens)
        if (transfer := attempt.transfer_of(worker, output)) is not None:
            self._fleet.on_transfer(attempt, transfer, now)
        if output.stage_times is not None and not isinstance(result, AttemptFailure):
            num_prompt_tokens = len(state.request.prompt_token_ids)
            self._fleet.on_stage_times(attempt, worker, output, num_prompt_tokens, now)
        if state.finish is not None:
            self.suspects.finished_on(ref.incarnation for ref in attempt.contributors)
            self._drop(state)
        elif failure := result if isinstance(result, AttemptFailure) else attempt.abandoned():
            self._fail(state, failure)
        else:
            if (prefill := attempt.prefill_to_abort()) is not None:
                self._effects.append(AbortAt(prefill, attempt.engine_request_id))
            self._count_ended(attempt)

    def _on_worker_lost(self, worker: str, cause: LossCause, reason: str) -> None:
        # Read this before the router learns of the loss. It is None if the worker accepts no requests, as in a drain.
        ready = self.router.ready_worker(worker)
        num_requests = sum(worker in state.attempt.open_workers for state in self._placed.values())
        has_left = self._fleet.on_worker_lost(worker, cause, reason, num_requests)
        if ready is not None and not has_left and cause is not LossCause.SESSION_LOST:
            # This must come before the retries below, so that a harmful request is not retried.
            loss = self._open.lost_with(ready.status)
            if (stopped := self.suspects.worker_lost(loss, self._now)) is not None:
                self._stop(*stopped)
        for state in list(self._placed.values()):
            if state.phase is RequestPhase.PLACED and worker in state.attempt.workers:
                with self._errors_end_only(state):
                    self._lose_worker(state, worker, reason, has_left)

    def _lose_worker(self, state: RequestState, worker: str, reason: str, has_left: bool) -> None:
        """Handles the loss of one of the request's workers: the attempt continues without it, or has failed."""
        attempt = state.attempt
        failure = attempt.on_lost(worker, reason, has_left=has_left) or attempt.abandoned()
        if failure is not None:
            self._fail(state, failure)
        else:
            self._count_ended(attempt)

    def _stop(self, identity: Identity, error: RequestError) -> None:
        """Ends a harmful request, and all open requests that are equal to it."""
        for state in [state for state in self._open if state.identity == identity]:
            if state.phase is not RequestPhase.FINISHED:
                request_id, caller = state.request.request_id, state.caller
                extra = {"request_id": request_id}
                logger.error("request %s of caller %s: %s", request_id, caller, error, extra=extra)
                self._refuse(state, error)

    @contextmanager
    def _errors_end_only(self, state: RequestState) -> Iterator[None]:
        """Ends only this request if an unexpected error occurs. The error must not reach the worker
        connection or the client whose message is handled, and other requests must continue."""
        try:
            yield
        except Exception as error:
            self._refuse(state, error)


def _log(level: int, state: RequestState, what: str) -> None:
    """Logs both ids: workers log the attempt's id, and the client knows the request's id."""
    if logger.isEnabledFor(level):
        ids = {"request_id": state.request.request_id, "engine_request_id": state.attempt.engine_request_id}
        logger.log(level, "request %s: %s", ids["request_id"], what, extra=ids)
