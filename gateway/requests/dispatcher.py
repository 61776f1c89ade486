"""Dispatcher: sees each client's request through to exactly one end, over as many attempts as it takes.

Speaks no protocol of clients. Places come from gateway/requests/admission.py, an attempt at workers is in the hands of
gateway/requests/in_flight.py, and whether there is to be another one decides gateway/requests/journey.py.
"""

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace

from baton.clock import Clock
from baton.config import GatewayConfig, NetworkConfig
from baton.errors import DeadlinePassed, RequestAborted
from baton.messages.request_plane import KVEvents
from baton.request import RequestOutput
from baton.sampling import MAX_SEED
from baton.system.curve import PlaneKeys
from baton.worker import WorkerEndpoint, WorkerStatus
from gateway.auth.callers import Caller
from gateway.auth.limits import Concurrency
from gateway.requests.admission import Admission
from gateway.requests.attempt import Attempt, AttemptFailed
from gateway.requests.client_request import ClientRequest, Delta, Finish
from gateway.requests.in_flight import InFlight
from gateway.requests.journey import Errand, Journey, LoadFailurePolicy
from gateway.requests.latency_window import LatencyWindow
from gateway.requests.prefill_times import PrefillTimes
from gateway.requests.record import OnEnd, Outcome
from gateway.requests.run import Generation, Run, record_of
from gateway.requests.running import Running
from gateway.requests.tally import Tally
from gateway.requests.unread import Unread
from gateway.routing.router import Router
from gateway.workers.connections import WorkerConnections
from gateway.workers.worker_list import WorkerList

logger = logging.getLogger(__name__)


DEADLINE_SLACK_S = 0.05
"""Whoever leaves so shortly before the deadline has left for that."""


class Dispatcher:
    """Everything in flight at one gateway."""

    def __init__(
        self,
        config: GatewayConfig,
        network: NetworkConfig,
        keys: PlaneKeys | None,
        prefix_key: bytes,
        load_failure_policy: LoadFailurePolicy,
        clock: Clock,
        on_end: Sequence[OnEnd] = (),
        on_first_token: Callable[[float], None] | None = None,
    ) -> None:
        """Everyone in `on_end` hears of every request once, when it is over; `on_first_token` how long each client
        waited for its first token, in seconds. None may raise."""
        self._config = config
        self._load_failure_policy = load_failure_policy
        self._clock = clock
        self._on_end = on_end
        self._router = Router(config, prefix_key)
        self._worker_list = WorkerList()
        self._fleet = WorkerConnections(network, keys, self)
        self._running = Running()
        self._concurrency = Concurrency()
        self._prefill_times = PrefillTimes()
        self._in_flight = InFlight(self._fleet, self._router, self._prefill_times, clock, self._note_room)
        self._admission = Admission(config, self._router, self._in_flight, self._prefill_times, clock)
        self._subscribing: set[asyncio.Task[None]] = set()
        """Orders on their way into a socket, which takes them at once or not at all."""
        self.tally = Tally()
        self.latencies = LatencyWindow(on_first_token)

    @property
    def fleet(self) -> WorkerConnections:
        return self._fleet

    @property
    def router(self) -> Router:
        return self._router

    @property
    def num_in_flight(self) -> int:
        """Requests that are with workers."""
        return len(self._running) - self.num_queued

    @property
    def num_queued(self) -> int:
        """Requests that wait for a worker with room."""
        return self._admission.num_queued

    @property
    def oldest_queued_s(self) -> float:
        return self._admission.oldest_queued_s

    async def generate(self, generation: Generation) -> AsyncGenerator[Delta, None]:
        """Streams a request's deltas up to the one with `finish`, or raises a RequestError.

        Closing the generator ends the request everywhere.
        """
        self.tally.received()
        arrived_at = self._clock.now() - generation.intake_s
        outcome, failure = Outcome.FINISHED, None
        run: Run | None = None
        try:
            with self._concurrency.one_more(generation.caller):
                run = self._admit(generation)
                async with aclosing(self._attempts_at(run)) as deltas:
                    async for delta in deltas:
                        yield delta if generation.caller.may_administer else delta.without_reasons()
        except BaseException as error:
            if run is None or run.finish is None:
                failure = self._what_ended(run, error)
                outcome = self.tally.ended(failure, was_placed=run is not None and run.is_resumed)
            raise
        finally:
            if run is not None and run.finish is None:
                self._running.remove(run)
            record = record_of(generation, run, outcome, failure, arrived_at, self._clock.now())
            for hear in self._on_end:
                hear(record)

    def abort(self, request_id: str, caller: Caller) -> bool:
        """Ends a request of this caller's by the id that it gave, with all answers to it; False if there is none."""
        runs = self._running.of_call(request_id, caller)
        for run in runs:
            run.is_aborted = True
            self._admission.abort(run)
            if run.attempt is not None:
                self._in_flight.close(run, run.attempt)
            run.unread.cut_short(RequestAborted(f"request {request_id} was aborted"))
        return bool(runs)

    def add_worker(self, endpoint: WorkerEndpoint) -> None:
        self._fleet.add(endpoint)

    async def wait_for_worker(self, name: str) -> None:
        await self._fleet.wait_for(name)

    def remove_worker(self, name: str, reason: str) -> None:
        self._fleet.remove(name, reason)

    async def stop(self) -> None:
        await self._in_flight.stop()
        await self._fleet.stop()

    # what the fleet says: WorkerListener

    def heard(self, status: WorkerStatus) -> None:
        self._worker_list.heard(status)
        self._router.heard(status)
        rate = status.load.prefill_tokens_per_s
        self._prefill_times.told(status.ref.name, rate, self._clock.now())
        self._note_room()
        self._subscribe_if_lacking(status.ref.name)

    def outputs(self, worker: str, outputs: tuple[RequestOutput, ...]) -> None:
        self._in_flight.outputs(worker, outputs)

    def kv_events(self, worker: str, events: KVEvents) -> None:
        """After a gap, a new account is asked for with the next heartbeat: once, not with all that still comes."""
        self._router.kv_events(worker, events)

    def lost(self, worker: str, reason: str) -> None:
        logger.warning("what worker %s had is lost: %s", worker, reason, extra={"worker": worker})
        was_leaving = self._worker_list.is_leaving(worker)
        self._worker_list.gone(worker)
        self._router.gone(worker)
        self._prefill_times.forget(worker)
        self._in_flight.lost(worker, reason, was_leaving=was_leaving)

    def _note_room(self) -> None:
        self._admission.note_room()

    def _subscribe_if_lacking(self, worker: str) -> None:
        client = self._fleet.client(worker)
        if client is not None and self._router.lacks_kv_account(worker):
            task = asyncio.create_task(client.subscribe_kv_events())
            self._subscribing.add(task)
            task.add_done_callback(self._subscribing.discard)

    # one request

    def _admit(self, generation: Generation) -> Run:
        params, now = generation.sampling_params, self._clock.now()
        if params.seed is None:  # so that it can be continued elsewhere, whatever happens
            params = replace(params, seed=secrets.randbelow(MAX_SEED + 1))
        errand = Errand(
            prompt_token_ids=generation.prompt_token_ids,
            max_tokens=params.max_tokens,
            cache_salt=generation.cache_salt,
            mode=generation.mode,
            must_not_fall_back=self._config.require_disaggregated,
            is_told_reasons=generation.caller.may_administer,
        )
        arrived_at = now - generation.intake_s
        num_prompt_tokens = len(generation.prompt_token_ids)
        request = ClientRequest(num_prompt_tokens, params, generation.text, arrived_at, generation.intake_s)
        journey = Journey(errand, self._load_failure_policy, self._worker_list, now)
        unread = Unread(self._config.max_unread_tokens)
        run = Run(generation, request, journey, self.latencies.stream(arrived_at), unread)
        self._running.add(run)
        return run

    def _what_ended(self, run: Run | None, error: BaseException) -> BaseException:
        """Doors keep deadlines, too, and then leave as clients do."""
        has_left = not isinstance(error, Exception)
        left_s = None if run is None else run.time_left(self._clock.now())
        if has_left and left_s is not None and left_s <= DEADLINE_SLACK_S:
            return DeadlinePassed("the request's deadline passed")
        return error

    async def _attempts_at(self, run: Run) -> AsyncGenerator[Delta, None]:
        """One attempt after the other until the request is complete, or there is nobody left to ask."""
        while True:
            attempt = await self._admission.place(run)
            _log(logging.DEBUG, run, attempt, f"goes to {' and '.join(attempt.workers)}")
            try:
                await self._in_flight.submit(run, attempt)
                while run.finish is None:
                    delta = await run.unread.read()
                    if delta.finish is not None:
                        self._finish(run, delta.finish)
                    yield delta
                return
            except AttemptFailed as failure:
                run.note_attempt_failure(failure)
                _log(logging.INFO, run, attempt, f"{failure.worker}: {failure}")
                if (last := self._go_on(run, attempt, failure)) is not None:
                    yield last
                    return
            finally:
                self._in_flight.close(run, attempt)

    def _go_on(self, run: Run, attempt: Attempt, failure: AttemptFailed) -> Delta | None:
        """After an attempt that failed: None if there is to be another. The last delta, if only the end was lost."""
        now = self._clock.now()
        run.request.end_attempt(now)
        error = run.journey.end(attempt, failure, run.request.num_output_tokens, now)
        if (last := run.request.end_if_whole(now)) is not None:
            self._finish(run, last.finish)
            return last
        if run.time_left(now) == 0.0:
            raise DeadlinePassed("the request's deadline passed") from failure
        if error is not None:
            _log(logging.WARNING, run, attempt, f"is given up: {failure}")
            raise error from failure
        self.tally.migrated(failure.cause)
        return None

    def _finish(self, run: Run, finish: Finish | None) -> None:
        """It has its answer, which its client may yet have to read."""
        run.finish = finish
        self._running.remove(run)
        self.tally.finished(run.request.path, run.request.path_reason)
        self.latencies.finished(self._clock.now())


def _log(level: int, run: Run, attempt: Attempt, what: str) -> None:
    """With both of its names, so that lines of workers, who know the attempt, can be found from the client's."""
    name = run.generation.request_id
    extra = {"request_id": name, "engine_request_id": attempt.engine_request_id}
    logger.log(level, "request %s: %s", name, what, extra=extra)
