"""Admission: takes each request to its workers: at once, when it is its turn and there is room, or not at all.

Who comes first it asks of gateway/requests/waiting.py, and where to go of the request's journey.
"""

import asyncio

from baton.clock import Clock
from baton.config import GatewayConfig
from baton.errors import DeadlinePassed, DeadlineTooClose, RequestAborted, RequestError
from baton.system.awake_timer import awake_timeout
from gateway.requests.attempt import Attempt
from gateway.requests.in_flight import InFlight
from gateway.requests.prefill_times import PrefillTimes
from gateway.requests.run import Run
from gateway.requests.waiting import Seat, WaitingRoom
from gateway.routing.placement import NoRoom
from gateway.routing.router import Router


class Admission:
    """The requests of one gateway that wait, and the way from there to its workers."""

    def __init__(
        self,
        config: GatewayConfig,
        router: Router,
        in_flight: InFlight,
        prefill_times: PrefillTimes,
        clock: Clock,
    ) -> None:
        self._config = config
        self._router = router
        self._in_flight = in_flight
        self._prefill_times = prefill_times
        self._clock = clock
        self._room: WaitingRoom[Run] = WaitingRoom(config.max_queued, self._try_to_place, _turn_away)
        self._is_sweep_due = False

    @property
    def num_queued(self) -> int:
        """Requests that wait for a worker with room."""
        return len(self._room)

    @property
    def oldest_queued_s(self) -> float:
        since = self._room.oldest_since
        return 0.0 if since is None else self._clock.now() - since

    async def place(self, run: Run) -> Attempt:
        """Returns when it has a place, which may be at once; a RequestError if none is found in time."""
        if run.is_aborted:  # while it was with workers, and these came to nothing first
            raise _aborted(run)
        self._check_deadline(run)
        seat = self._room.join(run, self._clock.now())
        if seat is None:
            assert run.attempt is not None
            return run.attempt
        try:
            return await self._wait(run, seat)
        except BaseException:
            if run.attempt is not None:  # it was placed and left in the same moment
                self._in_flight.close(run, run.attempt)
            raise

    def abort(self, run: Run) -> None:
        """It waits no more, if it does."""
        if run.placed is not None and not run.placed.done():
            run.placed.set_result(None)

    def note_room(self) -> None:
        """There may be some; whoever waits is asked for soon, and once for all that happens meanwhile."""
        if len(self._room) and not self._is_sweep_due:
            self._is_sweep_due = True
            asyncio.get_running_loop().call_soon(self._sweep)

    async def _wait(self, run: Run, seat: Seat[Run]) -> Attempt:
        now = self._clock.now()
        placed: asyncio.Future[Attempt | None] = asyncio.get_running_loop().create_future()
        run.placed = placed
        may_seek_s = max(0.0, run.journey.seeking_since + self._config.placement_timeout_s - now)
        deadline = asyncio.timeout(run.time_left(now))
        try:
            # A client's deadline goes by the clock. While this process stood still, no worker could offer room.
            async with deadline, awake_timeout(may_seek_s):
                await placed
        except TimeoutError:
            if run.attempt is not None:  # in this moment
                return run.attempt
            if deadline.expired():
                raise DeadlinePassed("the request's deadline passed while it waited") from None
            reason = seat.reason or NoRoom("others came first")
            retry_after_s = self._room.retry_after_s(seat)
            raise run.journey.too_late(reason, self._config.placement_timeout_s, retry_after_s) from None
        finally:
            run.placed = None
            self._room.leave(seat, self._clock.now())
        attempt = placed.result()
        if attempt is None:
            raise _aborted(run)
        return attempt

    def _check_deadline(self, run: Run) -> None:
        """DeadlineTooClose if its prompt alone takes too long, though it began now: to come back later is of no use."""
        now = self._clock.now()
        left_s = run.time_left(now)
        if left_s is None or run.is_resumed:
            return
        run.least_prefill_s = self._prefill_times.least_s(run.journey.lacking(self._router), now)
        if run.least_prefill_s > left_s:
            raise DeadlineTooClose(
                f"the prompt takes at least {run.least_prefill_s:.1f} s to compute, and the request's deadline is in "
                f"{left_s:.1f} s"
            )

    def _try_to_place(self, run: Run) -> RequestError | None:
        if len(self._in_flight) >= self._config.max_in_flight:
            return NoRoom(f"{len(self._in_flight)} requests are with workers, which is the limit")
        try:
            placement = run.journey.route(self._router, run.request.output_token_ids)
        except RequestError as error:
            return error
        attempt = self._in_flight.begin(run, placement)
        if run.placed is not None and not run.placed.done():
            run.placed.set_result(attempt)
        return None

    def _sweep(self) -> None:
        self._is_sweep_due = False
        self._room.sweep(self._clock.now())


def _turn_away(run: Run, error: RequestError) -> None:
    if run.placed is not None and not run.placed.done():
        run.placed.set_exception(error)


def _aborted(run: Run) -> RequestAborted:
    return RequestAborted(f"request {run.generation.request_id} was aborted")
