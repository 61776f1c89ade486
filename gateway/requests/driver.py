"""RequestDriver: asyncio around the dispatcher: clients' streams, workers' connections, and one timer.

Takes an event, asks the dispatcher, carries out its effects: all at once, without waiting for anything.
"""

import asyncio
import secrets
from array import array
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace

from baton.clock import Clock
from baton.config import GatewayConfig, NetworkConfig
from baton.errors import RequestAborted, SlowReader
from baton.messages.request_plane import KVEvents
from baton.request import RequestOutput, TokenLogprobs
from baton.sampling import MAX_SEED
from baton.system.curve import PlaneKeys
from baton.worker import WorkerEndpoint, WorkerStatus
from gateway.auth.callers import Caller
from gateway.requests.dispatcher import Dispatcher
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
from gateway.requests.latency_window import LatencyWindow
from gateway.requests.record import OnEnd, Tally
from gateway.requests.request import Delta, Finish, GatewayRequest
from gateway.requests.retry import LoadFailurePolicy
from gateway.routing.router import Router
from gateway.workers.connections import WorkerConnections


class RequestDriver:
    """Everything in flight at one gateway. Belongs to one event loop."""

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
        """Each of `on_end` gets the record of every request, once, when it is over; `on_first_token` how long each
        client waited for its first token, in seconds. None may raise."""
        self._clock = clock
        self._on_end = on_end
        self._max_unread_tokens = config.max_unread_tokens
        self._answers: dict[GatewayRequest, UnreadAnswer] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at: float | None = None
        self.router = Router(config, prefix_key)
        self.fleet = WorkerConnections(network, keys, self)
        self._dispatcher = Dispatcher(
            self.router,
            load_failure_policy,
            secrets.token_hex,
            max_in_flight=config.max_in_flight,
            max_queued=config.max_queued,
            placement_timeout_s=config.placement_timeout_s,
            must_not_fall_back=config.require_disaggregated,
            on_first_token=on_first_token,
        )

    @property
    def tally(self) -> Tally:
        return self._dispatcher.tally

    @property
    def latencies(self) -> LatencyWindow:
        return self._dispatcher.latencies

    @property
    def num_in_flight(self) -> int:
        """Requests that are with workers."""
        return self._dispatcher.num_in_flight

    @property
    def num_queued(self) -> int:
        """Requests that wait for a worker with room."""
        return self._dispatcher.num_queued

    @property
    def oldest_queued_s(self) -> float:
        since = self._dispatcher.queued_since
        return 0.0 if since is None else self._clock.now() - since

    async def generate(self, request: GatewayRequest) -> AsyncGenerator[Delta, None]:
        """Streams a request's deltas up to the one with `finish`, or raises a RequestError.

        Closing the generator ends the request everywhere.
        """
        request = _with_seed(request)
        answer = self._answers[request] = UnreadAnswer(self._max_unread_tokens)
        self._handle(Submitted(request))
        try:
            is_whole = False
            while not is_whole:
                delta = await answer.read()
                is_whole = delta.finish is not None
                if is_whole:
                    self._end(request, None)
                yield delta if request.caller.may_administer else delta.without_reasons()
        except BaseException as error:
            self._end(request, error)
            raise

    def abort(self, request_id: str, caller: Caller) -> bool:
        """Ends a request of this caller's by the id that it gave, with all answers to it; False if there is none."""
        requests = self._dispatcher.requests_of(request_id, caller)
        for request in requests:
            self._answers[request].cut_short(RequestAborted(f"request {request_id} was aborted"))
            self._handle(AbortRequested(request))
        return bool(requests)

    def add_worker(self, endpoint: WorkerEndpoint) -> None:
        self.fleet.add(endpoint)

    async def wait_for_worker(self, name: str) -> None:
        await self.fleet.wait_for(name)

    def remove_worker(self, name: str, reason: str) -> None:
        self.fleet.remove(name, reason)

    async def stop(self) -> None:
        await self.fleet.stop()
        if self._timer is not None:
            self._timer.cancel()

    # what the fleet reports: WorkerListener

    def on_status(self, status: WorkerStatus) -> None:
        self._handle(WorkerReported(status))
        client = self.fleet.client(status.ref.name)
        if client is not None and self.router.lacks_kv_account(status.ref.name):
            client.subscribe_kv_events()

    def on_outputs(self, worker: str, outputs: tuple[RequestOutput, ...]) -> None:
        self._handle(WorkerOutputs(worker, outputs))

    def on_kv_events(self, worker: str, events: KVEvents) -> None:
        """After a gap, `on_status` subscribes anew: once, whatever else still arrives."""
        self.router.kv_events(worker, events)

    def on_worker_lost(self, worker: str, reason: str) -> None:
        self._handle(WorkerLost(worker, reason))

    # the loop

    def _handle(self, event: Event) -> None:
        events = [event]
        for each in events:
            for effect in self._dispatcher.handle(each, self._clock.now()):
                if not isinstance(effect, Deliver):
                    self._carry_out(effect)
                elif not self._answers[effect.request].put(effect.delta):
                    events.append(AbortRequested(effect.request))
        self._set_timer()

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case SubmitTo(worker, sub_request):
                if client := self.fleet.client(worker):
                    client.submit(sub_request)
            case AbortAt(worker, engine_request_id):
                if client := self.fleet.client(worker):
                    client.abort((engine_request_id,))
            case Refuse(request, error):
                self._answers[request].fail(error)
            case Placed(request, placement):
                if request.on_placed is not None:
                    request.on_placed(placement)
            case Record(record):
                for on_end in self._on_end:
                    on_end(record)

    def _end(self, request: GatewayRequest, error: BaseException | None) -> None:
        """A client's stream is over; later calls say nothing new."""
        if self._answers.pop(request, None) is not None:
            self._handle(StreamEnded(request, error))

    def _set_timer(self) -> None:
        deadline = self._dispatcher.next_deadline()
        if deadline == self._timer_at:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._timer_at = deadline
        if deadline is not None:
            delay_s = max(0.0, deadline - self._clock.now())
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._tick)

    def _tick(self) -> None:
        self._timer = self._timer_at = None
        self._handle(Tick())


class UnreadAnswer:
    """What a client has yet to read of its answer; bounded, whatever workers and clients do. It has one reader.

    Clients never hold up workers: outputs are taken in as they come, and wait here. What waits together goes out
    together, so a slow reader costs fewer messages, not more.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._token_ids = array("I")
        self._text: list[str] = []
        self._logprobs: list[TokenLogprobs] = []
        self._finish: Finish | None = None
        self._error: Exception | None = None
        self._is_empty = True
        self._is_cut_short = False
        self._news = asyncio.Event()

    def put(self, delta: Delta) -> bool:
        """False if more waits then than may: `read` raises SlowReader, and nothing is kept."""
        if self._is_cut_short:
            return True
        self._token_ids.extend(delta.token_ids)
        self._text.append(delta.text)
        self._logprobs.extend(delta.logprobs)
        self._finish = delta.finish
        self._is_empty = False
        self._news.set()
        if (num_tokens := len(self._token_ids)) <= self._max_tokens:
            return True
        self.cut_short(
            SlowReader(
                f"the client reads too slowly: {num_tokens} tokens of its answer wait, and at most "
                f"{self._max_tokens} may"
            )
        )
        return False

    def fail(self, error: Exception) -> None:
        """`read` raises it, once, when all that came before is read."""
        if not self._is_cut_short:
            self._error = error
            self._news.set()

    def cut_short(self, error: Exception) -> None:
        """`read` raises it, once, and what was not read is forgotten."""
        self._take_all()
        self.fail(error)
        self._is_cut_short = True

    async def read(self) -> Delta:
        """All that waits, as one delta, as soon as there is something; or the error that ended it."""
        await self._news.wait()
        self._news.clear()
        if not self._is_empty:
            if self._error is not None:
                self._news.set()
            return self._take_all()
        assert self._error is not None
        error, self._error = self._error, None
        raise error

    def _take_all(self) -> Delta:
        delta = Delta(tuple(self._token_ids), "".join(self._text), tuple(self._logprobs), self._finish)
        self._token_ids = array("I")
        self._text.clear()
        self._logprobs.clear()
        self._finish = None
        self._is_empty = True
        return delta


def _with_seed(request: GatewayRequest) -> GatewayRequest:
    """Another one, which is a request of its own; with a seed, so that it can be continued on any worker."""
    params = request.sampling_params
    if params.seed is None:
        params = replace(params, seed=secrets.randbelow(MAX_SEED + 1))
    return replace(request, sampling_params=params)
