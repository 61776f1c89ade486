"""InFlight: the requests that are with workers; each attempt's orders down, its outputs up, and its one end.

What outputs and losses mean it asks of gateway/requests/attempt.py; it knows nothing of those that wait. All that comes
from workers is taken in at once, whether or not the client reads: what it has yet to read waits in its Unread.
"""

import asyncio
import secrets
from collections.abc import Callable
from functools import partial

from baton.clock import Clock
from baton.errors import RequestError, SlowReader
from baton.request import EngineRequest, RequestOutput
from gateway.requests.attempt import Attempt, AttemptFailed, legs
from gateway.requests.client_request import Delta
from gateway.requests.prefill_times import PrefillTimes
from gateway.requests.run import Run
from gateway.routing.placement import Placement
from gateway.routing.router import Router
from gateway.workers.connections import WorkerConnections


class InFlight:
    """Everything that is with workers; `on_room` hears whenever a leg has ended there."""

    def __init__(
        self,
        fleet: WorkerConnections,
        router: Router,
        prefill_times: PrefillTimes,
        clock: Clock,
        on_room: Callable[[], None],
    ) -> None:
        self._fleet = fleet
        self._prefill_times = prefill_times
        self._router = router
        self._clock = clock
        self._on_room = on_room
        self._runs: dict[str, Run] = {}
        """By the id that workers know."""
        self._orders: set[asyncio.Task[None]] = set()
        """On their way into a socket, which takes them at once or not at all."""

    def __len__(self) -> int:
        return len(self._runs)

    def begin(self, run: Run, placement: Placement) -> Attempt:
        """Its attempt begins here and now: from this moment on it hears of losses, and the router counts it."""
        now = self._clock.now()
        # It begins with the client's own, so that a search for that finds what workers log about it.
        engine_request_id = f"{run.generation.request_id}.{secrets.token_hex(8)}"
        attempt = run.journey.begin(placement, engine_request_id, run.request.num_output_tokens, now)
        run.request.begin_attempt(placement, now)
        run.note_attempt(attempt, now)
        run.attempt = attempt
        self._runs[attempt.engine_request_id] = run
        for worker in attempt.workers:
            self._router.sent(worker, placement)
        if run.generation.on_placed is not None:
            run.generation.on_placed(placement)
        return attempt

    def outputs(self, worker: str, outputs: tuple[RequestOutput, ...]) -> None:
        """A worker says so; what is not ours any more is ignored."""
        now = self._clock.now()
        for output in outputs:
            run = self._runs.get(output.request_id)
            if run is not None and run.attempt is not None:
                run.latency.tokens(output.first_position, len(output.token_ids), now)
                self._try(run, partial(self._take, run, run.attempt, worker, output))

    def lost(self, worker: str, reason: str, *, was_leaving: bool) -> None:
        """Nothing more comes from a worker."""
        for run in list(self._runs.values()):
            if run.attempt is not None and worker in run.attempt.workers:
                self._try(run, partial(run.attempt.note_loss, worker, reason, was_leaving=was_leaving))

    async def submit(self, run: Run, attempt: Attempt) -> None:
        """Sends all legs of an attempt that has begun, at once, unless it is over by now.

        What becomes of it is told in `run.unread`.
        """
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
            if run.attempt is attempt and (client := clients[name]):
                await client.submit(order)

    def close(self, run: Run, attempt: Attempt) -> None:
        """Ends what is left of an attempt on its workers; idempotent."""
        if run.attempt is not attempt:
            return
        run.attempt = None
        run.note_attempt_end(self._clock.now())
        del self._runs[attempt.engine_request_id]
        to_be_told = attempt.close()
        self._count_ended_legs(attempt)
        for worker in to_be_told:
            self._tell(worker, attempt)

    async def stop(self) -> None:
        """Returns when all that is to be said to workers was said."""
        await asyncio.gather(*self._orders)

    def _try(self, run: Run, take: Callable[[], None]) -> None:
        """Takes in what may end the run's attempt."""
        attempt = run.attempt
        assert attempt is not None
        try:
            take()
        except (AttemptFailed, RequestError) as error:
            self.close(run, attempt)
            if isinstance(error, SlowReader):
                run.unread.cut_short(error)
            else:
                run.unread.fail(error)
        except Exception as error:  # a bug: it must cost this request, not the connection to its worker
            self.close(run, attempt)
            run.unread.cut_short(error)
        finally:
            self._count_ended_legs(attempt)

    def _take(self, run: Run, attempt: Attempt, worker: str, output: RequestOutput) -> None:
        delta = self._accept(run, attempt, worker, output)
        if (name := attempt.leg_to_abort()) is not None:
            self._tell(name, attempt)
        if delta is None:
            return
        if delta.finish is not None:
            self.close(run, attempt)
        run.unread.put(delta)

    def _accept(self, run: Run, attempt: Attempt, worker: str, output: RequestOutput) -> Delta | None:
        run.request.note_times(worker, output)
        if not attempt.take(worker, output):
            return None
        if run.request.contradicts(output):
            attempt.note_contradiction(worker)
        if times := attempt.decode_times(worker, output):
            self._router.measured(attempt.placement, times)
            if attempt.has_recomputed(times):
                run.request.fell_back()
        self._note_prefill(run, attempt, worker, output)
        delta = run.request.accept(worker, output, self._clock.now())
        if delta is None or delta.finish is None:
            attempt.check_under_way()
        return delta

    def _note_prefill(self, run: Run, attempt: Attempt, worker: str, output: RequestOutput) -> None:
        """A worker tells with its first token how long it has computed the prompt, if it has."""
        is_first = output.first_position == attempt.num_tokens_before and output.token_ids
        if is_first and output.stage_times is not None and output.stage_times.prefill_s > 0.0:
            num_tokens = len(run.generation.prompt_token_ids) + attempt.num_tokens_before
            num_computed = num_tokens - output.num_cached_tokens
            self._prefill_times.computed(
                worker, num_computed, output.stage_times.prefill_s, self._clock.now()
            )

    def _tell(self, worker: str, attempt: Attempt) -> None:
        """That its leg is not wanted any more."""
        if client := self._fleet.client(worker):
            task = asyncio.create_task(client.abort((attempt.engine_request_id,)))
            self._orders.add(task)
            task.add_done_callback(self._orders.discard)

    def _count_ended_legs(self, attempt: Attempt) -> None:
        for worker in attempt.take_ended_legs():
            self._router.ended(worker, attempt.placement)
            self._on_room()
