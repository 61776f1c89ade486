"""Dispatcher: admits requests, sends their legs to workers, and sees each through to exactly one end.

The one place that knows both clients' requests and workers; speaks no gRPC. What it decides, it asks of
gateway/journey.py, gateway/attempt.py and gateway/waiting.py.
"""

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

from baton.clock import Clock
from baton.config import GatewayConfig, NetworkConfig
from baton.curve import PlaneKeys
from baton.errors import DeadlinePassed, InvalidRequest, RequestAborted, RequestError
from baton.messages import KVEvents
from baton.request import EngineRequest, RequestOutput
from baton.sampling import MAX_SEED
from baton.worker import WorkerEndpoint, WorkerStatus
from gateway.attempt import Attempt, AttemptFailed, legs
from gateway.client_request import ClientRequest, Delta
from gateway.fleet import Fleet
from gateway.journey import Errand, Journey, LoadFailurePolicy
from gateway.latency_window import LatencyWindow
from gateway.roster import Roster
from gateway.routing.placement import NoRoom
from gateway.routing.router import Router
from gateway.run import Aborted, Generation, Lost, Run
from gateway.tally import Tally
from gateway.waiting import Seat, WaitingRoom

logger = logging.getLogger(__name__)


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
    ) -> None:
        self._config = config
        self._load_failure_policy = load_failure_policy
        self._clock = clock
        self._router = Router(config, prefix_key)
        self._roster = Roster()
        self._fleet = Fleet(network, keys, self)
        self._runs: dict[str, Run] = {}
        """By the client's id."""
        self._by_attempt: dict[str, Run] = {}
        """Those that are with workers, by the id that these know."""
        self._room: WaitingRoom[Run] = WaitingRoom(config.max_queued, self._try_to_place)
        self._is_sweep_due = False
        self._subscribing: set[asyncio.Task[None]] = set()
        """Orders on their way into a socket, which takes them at once or not at all."""
        self.tally = Tally()
        self.latencies = LatencyWindow()

    @property
    def fleet(self) -> Fleet:
        return self._fleet

    @property
    def router(self) -> Router:
        return self._router

    @property
    def num_in_flight(self) -> int:
        """Requests that are with workers."""
        return len(self._runs) - self.num_queued

    @property
    def num_queued(self) -> int:
        """Requests that wait for a worker with room."""
        return len(self._room)

    @property
    def oldest_queued_s(self) -> float:
        since = self._room.oldest_since
        return 0.0 if since is None else self._clock.now() - since

    async def generate(self, generation: Generation) -> AsyncGenerator[Delta, None]:
        """Streams a request's deltas up to the one with `finish`, or raises a RequestError.

        Closing the generator ends the request everywhere.
        """
        self.tally.received()
        run: Run | None = None
        try:
            run = self._admit(generation)
            async with aclosing(self._attempts_at(run)) as deltas:
                async for delta in deltas:
                    yield delta
        except BaseException as error:
            if run is None or not run.is_finished:
                self.tally.ended(error, was_placed=run is not None and run.is_resumed)
            raise
        finally:
            if run is not None:
                del self._runs[generation.request_id]

    def abort(self, request_id: str) -> bool:
        """Ends a request by its caller's id; False if there is none."""
        run = self._runs.get(request_id)
        if run is None:
            return False
        run.is_aborted = True
        run.events.put_nowait(Aborted())
        if run.placed is not None and not run.placed.done():
            run.placed.set_result(None)
        return True

    def add_worker(self, endpoint: WorkerEndpoint) -> None:
        self._fleet.add(endpoint)

    async def wait_for_worker(self, name: str) -> None:
        await self._fleet.wait_for(name)

    def remove_worker(self, name: str, reason: str) -> None:
        self._fleet.remove(name, reason)

    async def stop(self) -> None:
        await self._fleet.stop()

    # what the fleet says: WorkerListener

    def heard(self, status: WorkerStatus) -> None:
        self._roster.heard(status)
        self._router.heard(status)
        self._note_room()
        self._subscribe_if_lacking(status.ref.name)

    def outputs(self, worker: str, outputs: tuple[RequestOutput, ...]) -> None:
        now = self._clock.now()
        for output in outputs:
            run = self._by_attempt.get(output.request_id)
            if run is not None:
                run.latency.tokens(output.first_position, len(output.token_ids), now)
                run.events.put_nowait((worker, output))

    def kv_events(self, worker: str, events: KVEvents) -> None:
        """After a gap, a new account is asked for with the next heartbeat: once, not with all that still comes."""
        self._router.kv_events(worker, events)

    def lost(self, worker: str, reason: str) -> None:
        logger.warning("what worker %s had is lost: %s", worker, reason)
        was_leaving = self._roster.is_leaving(worker)
        self._roster.gone(worker)
        self._router.gone(worker)
        for run in self._by_attempt.values():
            if run.attempt is not None and worker in run.attempt.workers:
                run.events.put_nowait((worker, Lost(run.attempt.engine_request_id, reason, was_leaving)))

    def _subscribe_if_lacking(self, worker: str) -> None:
        client = self._fleet.client(worker)
        if client is not None and self._router.lacks_kv_account(worker):
            task = asyncio.create_task(client.subscribe_kv_events())
            self._subscribing.add(task)
            task.add_done_callback(self._subscribing.discard)

    # admission, and a place

    def _admit(self, generation: Generation) -> Run:
        if generation.request_id in self._runs:
            raise InvalidRequest("request_id", f"{generation.request_id!r} is in use by a running request")
        params, now = generation.sampling_params, self._clock.now()
        if params.seed is None:  # so that it can be continued elsewhere, whatever happens
            params = replace(params, seed=secrets.randbelow(MAX_SEED + 1))
        errand = Errand(
            prompt_token_ids=generation.prompt_token_ids,
            max_tokens=params.max_tokens,
            cache_salt=generation.cache_salt,
            mode=generation.mode,
            must_not_fall_back=self._config.require_disaggregated,
        )
        request = ClientRequest(len(generation.prompt_token_ids), params, generation.text, now)
        journey = Journey(errand, self._load_failure_policy, self._roster, now)
        run = Run(generation, request, journey, self.latencies.stream(now))
        self._runs[generation.request_id] = run
        return run

    async def _place(self, run: Run) -> Attempt:
        """Returns when it has a place, which may be at once; a RequestError if none is found in time."""
        if run.is_aborted:  # while it was with workers, and these came to nothing first
            raise _aborted(run)
        seat = self._room.join(run, self._clock.now())
        try:
            if seat is not None:
                await self._wait(run, seat)
        except BaseException:
            if run.attempt is not None:  # it was placed and left in the same moment
                await asyncio.shield(self._close(run, run.attempt))
            raise
        assert run.attempt is not None
        return run.attempt

    async def _wait(self, run: Run, seat: Seat[Run]) -> None:
        now = self._clock.now()
        run.placed = asyncio.get_running_loop().create_future()
        may_seek_s = max(0.0, run.journey.seeking_since + self._config.placement_timeout_s - now)
        time_left_s = run.time_left(now)
        wait_s = may_seek_s if time_left_s is None else min(may_seek_s, time_left_s)
        try:
            async with asyncio.timeout(wait_s):
                await run.placed
        except TimeoutError:
            if run.attempt is None:
                if time_left_s is not None and time_left_s <= may_seek_s:
                    raise DeadlinePassed("the request's deadline passed while it waited") from None
                reason = seat.reason or NoRoom("others came first")
                raise run.journey.too_late(reason, self._config.placement_timeout_s) from None
        finally:
            run.placed = None
            self._room.leave(seat)
        if run.attempt is None:
            raise _aborted(run)

    def _try_to_place(self, run: Run) -> RequestError | None:
        """Its attempt begins here and now: from this moment on it hears of losses, and the router counts it."""
        if len(self._by_attempt) >= self._config.max_in_flight:
            return NoRoom(f"{len(self._by_attempt)} requests are with workers, which is the limit")
        try:
            placement = run.journey.route(self._router, run.request.output_token_ids)
        except RequestError as error:
            return error
        now = self._clock.now()
        attempt = run.journey.begin(placement, secrets.token_hex(16), run.request.num_output_tokens, now)
        run.request.begin_attempt(placement, now)
        run.attempt = attempt
        self._by_attempt[attempt.engine_request_id] = run
        for worker in attempt.workers:
            self._router.sent(worker, placement)
        if run.placed is not None and not run.placed.done():
            run.placed.set_result(None)
        return None

    def _note_room(self) -> None:
        """There may be some; whoever waits is asked for soon, and once for all that happens meanwhile."""
        if len(self._room) and not self._is_sweep_due:
            self._is_sweep_due = True
            asyncio.get_running_loop().call_soon(self._sweep)

    def _sweep(self) -> None:
        self._is_sweep_due = False
        self._room.sweep()

    # attempts

    async def _attempts_at(self, run: Run) -> AsyncGenerator[Delta, None]:
        """One attempt after the other until the request is complete, or there is nobody left to ask."""
        while True:
            attempt = await self._place(run)
            try:
                async with aclosing(self._attempt(run, attempt)) as deltas:
                    async for delta in deltas:
                        yield delta
                return
            except AttemptFailed as failure:
                logger.info("request %s: %s: %s", run.generation.request_id, failure.worker, failure)
                if (last := self._go_on(run, attempt, failure)) is not None:
                    yield last
                    return

    def _go_on(self, run: Run, attempt: Attempt, failure: AttemptFailed) -> Delta | None:
        """After an attempt that failed: None if there is to be another. The last delta, if only the end was lost."""
        now = self._clock.now()
        error = run.journey.end(attempt, failure, run.request.num_output_tokens, now)
        if (last := run.request.end_if_whole(now)) is not None:
            self._finish(run)
            return last
        if run.time_left(now) == 0.0:
            raise DeadlinePassed("the request's deadline passed") from failure
        if error is not None:
            raise error from failure
        self.tally.migrated(failure.cause)
        return None

    def _finish(self, run: Run) -> None:
        run.is_finished = True
        self.tally.finished(run.request.path, run.request.path_reason)
        self.latencies.finished(self._clock.now())

    async def _attempt(self, run: Run, attempt: Attempt) -> AsyncGenerator[Delta, None]:
        try:
            await self._submit(run, attempt)
            while True:
                event = await run.events.get()
                if isinstance(event, Aborted):
                    raise _aborted(run)
                delta = self._take(event, run, attempt)
                if (worker := attempt.leg_to_abort()) is not None:
                    await self._tell(worker, attempt)
                if delta is None:
                    continue
                if delta.finish is not None:
                    self._finish(run)
                    await self._close(run, attempt)
                yield delta
                if delta.finish is not None:
                    return
        finally:
            await asyncio.shield(self._close(run, attempt))

    async def _submit(self, run: Run, attempt: Attempt) -> None:
        """Sends all legs at once. A worker that is gone meanwhile is among the events."""
        generation, request = run.generation, run.request
        clients = {name: self._fleet.client(name) for name in attempt.workers}
        refs = {name: client.endpoint.ref for name, client in clients.items() if client is not None}
        if len(refs) < len(clients):
            return
        leg = EngineRequest(
            request_id=attempt.engine_request_id,
            prompt_token_ids=generation.prompt_token_ids,
            sampling_params=request.sampling_params,
            priority=generation.priority,
            timeout_s=run.time_left(self._clock.now()),
            cache_salt=generation.cache_salt,
            output_token_ids=request.output_token_ids,
            on_preemption=run.journey.on_preemption(attempt.placement),
        )
        for name, order in legs(leg, attempt, refs, secrets.token_hex(16), request.num_attempts - 1):
            if client := clients[name]:
                await client.submit(order)

    def _take(self, event: tuple[str, RequestOutput | Lost], run: Run, attempt: Attempt) -> Delta | None:
        worker, news = event
        try:
            if isinstance(news, Lost):
                if news.engine_request_id == attempt.engine_request_id:
                    attempt.note_loss(worker, news.reason, was_leaving=news.was_leaving)
                return None
            if news.request_id != attempt.engine_request_id:
                return None  # of an attempt that was given up
            run.request.note_times(worker, news)
            if not attempt.take(worker, news):
                return None
            if run.request.contradicts(news):
                attempt.note_contradiction(worker)
        finally:
            self._count_ended_legs(attempt)
        if times := attempt.decode_times(worker, news):
            self._router.measured(attempt.placement, times)
            if attempt.has_recomputed(times):
                run.request.fell_back()
        delta = run.request.accept(worker, news, self._clock.now())
        if delta is None or delta.finish is None:
            attempt.check_under_way()
        return delta

    async def _close(self, run: Run, attempt: Attempt) -> None:
        """Ends what is left of an attempt on its workers; idempotent."""
        if run.attempt is not attempt:
            return
        run.attempt = None
        del self._by_attempt[attempt.engine_request_id]
        to_be_told = attempt.close()
        self._count_ended_legs(attempt)
        for worker in to_be_told:
            await self._tell(worker, attempt)

    async def _tell(self, worker: str, attempt: Attempt) -> None:
        """That its leg is not wanted any more."""
        if client := self._fleet.client(worker):
            await client.abort((attempt.engine_request_id,))

    def _count_ended_legs(self, attempt: Attempt) -> None:
        for worker in attempt.take_ended_legs():
            self._router.ended(worker, attempt.placement)
            self._note_room()


def _aborted(run: Run) -> RequestAborted:
    return RequestAborted(f"request {run.generation.request_id} was aborted")
