"""TimedFleet: timed workers behind the gateway's own dispatcher and router, and clients that hold conversations.

The hand-over is a model: a prompt's blocks are sent while they are computed, at the speed of a link.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count

from baton.config import GatewayConfig
from baton.kv import TransferRole
from baton.messages.request_plane import KVEvents
from baton.request import EngineRequest, FinishReason, StageTimes
from baton.sampling import SamplingParams
from baton.worker import WorkerRole
from gateway.auth.callers import Caller
from gateway.requests.dispatcher import Dispatcher
from gateway.requests.events import (
    AbortAt,
    Deliver,
    Effect,
    Record,
    StreamEnded,
    Submitted,
    SubmitTo,
    WorkerOutputs,
    WorkerReported,
)
from gateway.requests.request import Delta, GatewayRequest
from gateway.routing.router import Router
from simulator.driver import SilentText, VirtualDriver
from simulator.timed_worker import BYTES_PER_TOKEN, LINK_BYTES_PER_S, TimedOutputs, TimedRequest, TimedWorker
from simulator.workloads import Session
from simulator.world import World

KEY = b"the benchmark's prefix key"
HEARTBEAT_S = 0.5
TRAVEL_S = 0.0005
"""The time of a message from one process to another."""
LAST_CHUNK_TOKENS = 512
"""When the last step of a prompt ends, the KV of this many of its tokens is still unsent. A shorter prompt is then
wholly unsent."""
PATIENCE_S = 1e6
"""So long that every request waits until it is placed."""


@dataclass(slots=True)
class Result:
    """What clients saw, and what the caches did."""

    ttft_s: list[float] = field(default_factory=list)
    ttft_s_of: dict[str, list[float]] = field(default_factory=dict)
    """Times to first token, by caller."""
    itl_s_of: dict[str, list[float]] = field(default_factory=dict)
    itl_s: list[float] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_hit_tokens: int = 0
    """Prompt tokens that were found in the prefix cache of the worker that computed the prompt."""
    num_transfer_tokens: int = 0
    num_local: int = 0
    num_waited: int = 0
    """Requests that waited at the gateway for room."""
    num_in_vain: int = 0
    """Prompts that were computed before their decode worker had blocks for them."""
    num_preemptions: int = 0

    @property
    def hit_rate(self) -> float:
        return self.num_hit_tokens / self.num_prompt_tokens


@dataclass(slots=True)
class _Turn:
    """One request of a session's client."""

    session: Session
    number: int
    prompt: tuple[int, ...]
    arrived_at: float
    num_tokens: int = 0
    last_token_at: float = 0.0

    @property
    def answer(self) -> tuple[int, ...]:
        return self.session.turns[self.number].answer


@dataclass(slots=True)
class _HandOver:
    """The transfer of a request's blocks."""

    prefill: str
    decode: str
    num_tokens: int | None = None
    """None until the decode worker has reserved its blocks."""
    began_at: float = 0.0
    is_prompt_computed: bool = False
    times: StageTimes | None = None
    """Set once the blocks have arrived."""


class TimedFleet:
    """`run` plays sessions until they end, or until a given time."""

    def __init__(
        self, config: GatewayConfig, num_prefill: int, num_decode: int, num_blocks: tuple[int, int], seed: int
    ) -> None:
        self.result = Result()
        self._world = World(seed, max_events=math.inf, has_ticks=False)
        self._router = Router(config, KEY)
        numbers = count()
        self._dispatcher = Dispatcher(
            self._router,
            "fail",
            lambda _num_bytes: str(next(numbers)),
            max_in_flight=config.max_in_flight,
            max_queued=config.max_queued,
            placement_timeout_s=PATIENCE_S,
        )
        self._gateway = VirtualDriver(self._world, self._dispatcher, self._carry_out)
        self._turns: dict[str, _Turn] = {}
        self._hand_overs: dict[str, _HandOver] = {}
        self._num_open = 0
        roles = [WorkerRole.PREFILL] * num_prefill + [WorkerRole.DECODE] * num_decode
        self._workers: dict[str, TimedWorker] = {}
        for number, role in enumerate(roles):
            size = num_blocks[role is WorkerRole.DECODE]
            self._workers[f"w{number}"] = TimedWorker(f"w{number}", role, size, KEY, self._start_load)

    def run(self, sessions: list[Session], until_s: float = PATIENCE_S) -> Result:
        self._num_open = len(sessions)
        for session in sessions:
            self._world.at(session.arrival_s, partial(self._arrive, session, 0, session.system))
        for worker in self._workers.values():
            self._send_heartbeat(worker)
        self._world.run(until=until_s, is_done=lambda: self._num_open == 0)
        for worker in self._workers.values():
            self.result.num_preemptions += worker.scheduler.counters().get("preemptions", 0)
        return self.result

    # clients

    def _arrive(self, session: Session, number: int, so_far: tuple[int, ...]) -> None:
        turn = _Turn(session, number, so_far + session.turns[number].user, self._world.now)
        request = GatewayRequest(
            request_id=f"{session.name}/{number}",
            prompt_token_ids=turn.prompt,
            sampling_params=SamplingParams(max_tokens=len(turn.answer), ignore_eos=True),
            text=SilentText(),
            caller=Caller(session.caller),
        )
        self._turns[request.request_id] = turn
        num_queued = self._dispatcher.num_queued
        self._gateway.handle(Submitted(request))
        self.result.num_waited += self._dispatcher.num_queued > num_queued

    def _deliver(self, request: GatewayRequest, delta: Delta) -> StreamEnded | None:
        turn, now = self._turns[request.request_id], self._world.now
        for _ in delta.token_ids:
            if turn.num_tokens == 0:
                self.result.ttft_s.append(now - turn.arrived_at)
                self.result.ttft_s_of.setdefault(turn.session.caller, []).append(now - turn.arrived_at)
            else:
                self.result.itl_s.append(now - turn.last_token_at)
                self.result.itl_s_of.setdefault(turn.session.caller, []).append(now - turn.last_token_at)
            turn.num_tokens, turn.last_token_at = turn.num_tokens + 1, now
        if delta.finish is None:
            return None
        session, following = turn.session, turn.number + 1
        if following == len(session.turns):
            self._num_open -= 1
        else:
            so_far = turn.prompt + turn.answer
            self._world.after(
                session.turns[following].think_s, partial(self._arrive, session, following, so_far)
            )
        return StreamEnded(request, None)

    # the gateway

    def _carry_out(self, effect: Effect) -> StreamEnded | None:
        match effect:
            case Deliver(request, delta):
                return self._deliver(request, delta)
            case SubmitTo(worker, sub_request):
                self._after_travel(partial(self._submit, self._workers[worker], sub_request))
            case AbortAt(worker, engine_request_id):
                self._after_travel(partial(self._abort, self._workers[worker], engine_request_id))
            case Record(record):
                del self._turns[record.request_id]
                self.result.num_local += record.attempts[-1].placement.prefill is None
            case _:
                raise AssertionError(f"nothing fails here: {effect}")
        return None

    def _after_travel(self, action: Callable[[], None]) -> None:
        self._world.after(TRAVEL_S, action)

    def _send_heartbeat(self, worker: TimedWorker) -> None:
        status = worker.status()
        self._after_travel(lambda: self._gateway.handle(WorkerReported(status)))
        pause_s = HEARTBEAT_S * self._world.rng.uniform(0.95, 1.05)
        self._world.after(pause_s, partial(self._send_heartbeat, worker))

    def _send(self, worker: TimedWorker, outputs: TimedOutputs) -> None:
        """Sends outputs, and changes of the prefix cache, to the gateway."""
        name, messages = worker.ref.name, tuple(output for _, output in outputs)
        if messages:
            self._after_travel(lambda: self._gateway.handle(WorkerOutputs(name, messages)))
        if (events := worker.take_kv_events()) is not None:
            self._after_travel(partial(self._apply_kv_events, name, events))

    def _apply_kv_events(self, name: str, events: KVEvents) -> None:
        is_applied = self._router.on_kv_events(name, events)
        assert is_applied, "nothing is lost here"

    # workers

    def _submit(self, worker: TimedWorker, sub_request: EngineRequest) -> None:
        turn = self._turns[sub_request.request_id.rpartition(".")[0]]
        transfer = sub_request.kv_transfer
        if transfer is not None and transfer.role is TransferRole.CONSUMER:  # sent first
            hand_over = _HandOver(transfer.peer.name, worker.ref.name)
            self._hand_overs[sub_request.request_id] = hand_over
        worker.add(sub_request, turn.answer, self._world.now)
        self._wake(worker)

    def _abort(self, worker: TimedWorker, request_id: str) -> None:
        self._hand_overs.pop(request_id, None)
        outputs = worker.abort(request_id)
        if worker.role is WorkerRole.PREFILL:
            worker.release(request_id)
        self._send(worker, outputs)
        self._wake(worker)

    def _wake(self, worker: TimedWorker) -> None:
        duration_s = worker.start_step(self._world.now)
        if duration_s is not None:
            self._world.after(duration_s, partial(self._end_step, worker))

    def _end_step(self, worker: TimedWorker) -> None:
        for here, output in (outputs := worker.end_step(self._world.now)):
            if output.first_position == 0 and not here.request.is_consumer:
                self.result.num_prompt_tokens += here.request.num_prompt_tokens
                self.result.num_hit_tokens += output.num_cached_tokens
            if output.request_id not in self._hand_overs:
                continue  # local, or aborted
            if output.finish_reason is FinishReason.HANDED_OVER:
                self._on_prompt_computed(here)
            elif output.finish_reason is not None and here.request.is_consumer:
                output.stage_times = self._hand_overs.pop(output.request_id).times
        self._send(worker, outputs)
        self._wake(worker)

    # hand-overs

    def _on_prompt_computed(self, computed: TimedRequest) -> None:
        request_id, began_at = computed.request.request_id, computed.began_at
        hand_over = self._hand_overs[request_id]
        assert began_at is not None
        hand_over.is_prompt_computed = True
        hand_over.began_at = max(hand_over.began_at, began_at)
        self.result.num_in_vain += hand_over.num_tokens is None
        self._move_if_ready(request_id, hand_over)

    def _start_load(self, request_id: str, num_tokens: int) -> None:
        if (hand_over := self._hand_overs.get(request_id)) is None:
            return  # aborted
        hand_over.num_tokens, hand_over.began_at = num_tokens, max(hand_over.began_at, self._world.now)
        self._move_if_ready(request_id, hand_over)

    def _move_if_ready(self, request_id: str, hand_over: _HandOver) -> None:
        """Sends the blocks that were not sent while the prompt was computed, if it is computed and expected."""
        num_tokens = hand_over.num_tokens
        if num_tokens is None or not hand_over.is_prompt_computed:
            return
        per_token_s = BYTES_PER_TOKEN / LINK_BYTES_PER_S
        moved_s = self._world.now - hand_over.began_at
        rest_s = max(num_tokens * per_token_s - moved_s, min(num_tokens, LAST_CHUNK_TOKENS) * per_token_s)
        self._world.after(rest_s, partial(self._arrived, request_id, num_tokens))

    def _arrived(self, request_id: str, num_tokens: int) -> None:
        if (hand_over := self._hand_overs.get(request_id)) is None:
            return  # aborted
        moving_s = self._world.now - hand_over.began_at
        hand_over.times = StageTimes(transfer_bytes=num_tokens * BYTES_PER_TOKEN, transfer_moving_s=moving_s)
        self.result.num_transfer_tokens += num_tokens
        prefill, decode = self._workers[hand_over.prefill], self._workers[hand_over.decode]
        prefill.release(request_id)
        self._send(decode, decode.receive(request_id, num_tokens, moving_s))
        self._send(prefill, [])
        self._wake(prefill)
        self._wake(decode)
