"""RequestDriver: runs the dispatcher on asyncio, with clients' streams, worker connections and one timer.

The driver passes each event to the dispatcher and carries out the effects at once, without waiting.
"""

import asyncio
import secrets
from array import array
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace

from baton.clock import Clock
from baton.config import GatewayConfig, NetworkConfig, SchedulerConfig
from baton.errors import GatewayStopping, RequestAborted, SlowReader
from baton.messages.request_plane import KVEvents
from baton.request import PackedLogprobs, RequestOutput, TokenLogprobs
from baton.sampling import MAX_SEED
from baton.system.curve import PlaneKeys
from baton.worker import WorkerStatus
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
from gateway.requests.record import OnEnd
from gateway.requests.request import Delta, Finish, GatewayRequest
from gateway.requests.retry import LoadFailurePolicy
from gateway.routing.cost import DEFAULT_SCHEDULER
from gateway.routing.router import Router
from gateway.turn_budget import TurnBudget
from gateway.workers.connections import WorkerConnections
from gateway.workers.worker_listener import LossCause

LONG_PROMPT = 16_384
"""Prompts of this many tokens are hashed in portions, before they are routed. For shorter prompts, the router itself
hashes the blocks, in about a millisecond."""


STOPPING = "this gateway is shutting down; use another one, or try again later"


class RequestDriver:
    """All open requests of one gateway. Use it from one event loop only."""

    def __init__(
        self,
        config: GatewayConfig,
        network: NetworkConfig,
        keys: PlaneKeys | None,
        prefix_key: bytes,
        load_failure_policy: LoadFailurePolicy,
        clock: Clock,
        on_end: Sequence[OnEnd] = (),
        scheduler: SchedulerConfig = DEFAULT_SCHEDULER,
    ) -> None:
        """Each function of `on_end` gets the record of every request, when the request ends. It must not raise."""
        self._clock = clock
        self._on_end = on_end
        self._max_unread_tokens = config.max_unread_tokens
        self._answers: dict[GatewayRequest, UnreadAnswer] = {}
        self._hashing: set[GatewayRequest] = set()
        """Requests whose prompts are being hashed, so the dispatcher does not know them yet. `abort` removes them."""
        self._is_stopping = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at: float | None = None
        self.router = Router(config, prefix_key, scheduler)
        self.workers = WorkerConnections(network, keys, self)
        self.dispatcher = Dispatcher(
            self.router,
            load_failure_policy,
            secrets.token_hex,
            max_in_flight=config.max_in_flight,
            max_queued=config.max_queued,
            placement_timeout_s=config.placement_timeout_s,
            require_disaggregated=config.require_disaggregated,
        )

    @property
    def oldest_queued_s(self) -> float:
        return self._since(self.dispatcher.queue.oldest_since())

    @property
    def oldest_waiting_for_worker_s(self) -> float:
        return self._since(self.dispatcher.queue.oldest_since(for_worker=True))

    @property
    def oldest_without_prefill_s(self) -> float:
        return self._since(self.dispatcher.queue.oldest_without_prefill_since())

    def _since(self, moment: float | None) -> float:
        return 0.0 if moment is None else self._clock.now() - moment

    async def generate(self, request: GatewayRequest) -> AsyncGenerator[Delta, None]:
        """Yields a request's deltas; the last one has `finish`. Raises a RequestError if the request fails.

        Closing the generator ends the request everywhere.
        """
        request = _with_seed(request)
        await self._hash_prompt(request)
        if self._is_stopping:
            raise GatewayStopping(STOPPING)
        answer = self._answers[request] = UnreadAnswer(self._max_unread_tokens)
        try:
            self._handle(Submitted(request))
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

    async def _hash_prompt(self, request: GatewayRequest) -> None:
        """Hashes a long prompt for the router. Pauses between portions, so that other requests are not delayed. Raises
        RequestAborted if `abort` ends the request meanwhile."""
        if len(request.prompt_token_ids) < LONG_PROMPT or request.skip_reading_prefix_cache:
            return
        budget = TurnBudget()
        self._hashing.add(request)
        try:
            for _ in self.router.hashing(request.prompt_token_ids, request.cache_salt, request.block_hashes):
                await budget.pause_if_spent()
                if request not in self._hashing:
                    raise _aborted(request)
        finally:
            self._hashing.discard(request)

    def abort(self, request_id: str, caller: Caller) -> bool:
        """Ends the caller's request with this id, and all its answers. Returns False if there is none."""
        hashing = {request for request in self._hashing if request.call == (caller.name, request_id)}
        self._hashing -= hashing
        requests = self.dispatcher.requests_of(request_id, caller)
        for request in requests:
            self._answers[request].cut_short(_aborted(request))
            self._handle(AbortRequested(request))
        return bool(requests or hashing)

    def end_requests(self) -> None:
        """Ends all open requests because the gateway stops, and refuses new ones."""
        self._is_stopping = True
        for request, answer in list(self._answers.items()):
            answer.fail(GatewayStopping(STOPPING))
            self._handle(AbortRequested(request))

    async def stop(self) -> None:
        await self.workers.stop()
        if self._timer is not None:
            self._timer.cancel()

    # WorkerListener

    def on_status(self, status: WorkerStatus) -> None:
        self._handle(WorkerReported(status))
        client = self.workers.client(status.ref.name)
        if client is not None and self.router.lacks_kv_listing(status.ref.name):
            client.subscribe_kv_events()

    def on_outputs(self, worker: str, outputs: tuple[RequestOutput, ...]) -> None:
        self._handle(WorkerOutputs(worker, outputs))

    def on_kv_events(self, worker: str, events: KVEvents) -> None:
        """Applies KV events of a worker. If earlier events are missing, the next `on_status` subscribes again."""
        self.router.on_kv_events(worker, events)

    def on_worker_lost(self, worker: str, cause: LossCause, reason: str) -> None:
        self._handle(WorkerLost(worker, cause, reason))

    # the loop

    def _handle(self, event: Event) -> None:
        events = [event]
        for each in events:
            for effect in self.dispatcher.handle(each, self._clock.now()):
                if not isinstance(effect, Deliver):
                    self._carry_out(effect)
                elif not self._answers[effect.request].put(effect.delta):
                    events.append(AbortRequested(effect.request))
        self._set_timer()

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case SubmitTo(worker, sub_request):
                if client := self.workers.client(worker):
                    client.submit(sub_request)
            case AbortAt(worker, engine_request_id):
                if client := self.workers.client(worker):
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
        """The client's stream has ended. Only the first call for a request has an effect."""
        if self._answers.pop(request, None) is not None:
            self._handle(StreamEnded(request, error))

    def _set_timer(self) -> None:
        deadline = self.dispatcher.next_deadline()
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
    """The part of an answer that the client has not read yet; bounded, for one reader.

    Outputs are stored here as they arrive, so a client never delays workers. `read` returns all stored
    outputs as one delta, so a slow reader gets fewer but larger messages.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._token_ids = array("I")
        self._text: list[str] = []
        """The texts of the stored deltas, one for each; empty if none is stored."""
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: PackedLogprobs | None = None
        self._finish: Finish | None = None
        self._error: Exception | None = None
        self._is_cut_short = False
        self._changed = asyncio.Event()

    def put(self, delta: Delta) -> bool:
        """Stores a delta. If too much is then unread, drops the whole unread part, makes `read` raise
        SlowReader, and returns False."""
        if self._is_cut_short:
            return True
        self._token_ids.extend(delta.token_ids)
        self._text.append(delta.text)
        self._logprobs.extend(delta.logprobs)
        self._finish = delta.finish
        if delta.prompt_logprobs is not None:
            self._prompt_logprobs = delta.prompt_logprobs
        self._changed.set()
        if (num_tokens := len(self._token_ids)) <= self._max_tokens:
            return True
        self.cut_short(
            SlowReader(
                f"the client reads too slowly: {num_tokens} tokens of its answer wait, and at most "
                f"{self._max_tokens} may wait"
            )
        )
        return False

    def fail(self, error: Exception) -> None:
        """Makes `read` raise the error once, after `read` has returned everything stored before."""
        if not self._is_cut_short:
            self._error = error
            self._changed.set()

    def cut_short(self, error: Exception) -> None:
        """Drops the unread part, and makes the next `read` raise the error once."""
        self._take_all()
        self.fail(error)
        self._is_cut_short = True

    async def read(self) -> Delta:
        """Waits until something is stored. Returns all of it as one delta, or raises the stored error."""
        await self._changed.wait()
        self._changed.clear()
        if self._text:
            if self._error is not None:
                self._changed.set()
            return self._take_all()
        assert self._error is not None
        error, self._error = self._error, None
        raise error

    def _take_all(self) -> Delta:
        delta = Delta(
            tuple(self._token_ids),
            "".join(self._text),
            tuple(self._logprobs),
            self._finish,
            self._prompt_logprobs,
        )
        self._token_ids = array("I")
        self._text.clear()
        self._logprobs.clear()
        self._finish = self._prompt_logprobs = None
        return delta


def _aborted(request: GatewayRequest) -> RequestAborted:
    _, call_id = request.call
    return RequestAborted(f"request {call_id} was aborted")


def _with_seed(request: GatewayRequest) -> GatewayRequest:
    """A copy with a seed, so that any worker can continue the answer. It does not equal `request`."""
    params = request.sampling_params
    if params.seed is None:
        params = replace(params, seed=secrets.randbelow(MAX_SEED + 1))
    return replace(request, sampling_params=params)
