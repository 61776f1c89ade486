"""A fleet in virtual time for the routing benchmark: the real Router, SimWorkers, a gateway that only keeps time."""

import heapq
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from baton.config import GatewayConfig
from baton.kv import KVTransferParams, TransferRole
from baton.messages.request_plane import KVEvents
from baton.request import FinishReason, RequestOutput, StageTimes
from baton.sampling import SamplingParams
from baton.worker import WorkerRole, WorkerStatus
from gateway.routing.placement import NoRoom, Placement, RouteQuery
from gateway.routing.router import Router
from scheduler import Request
from simulator.timed_worker import BYTES_PER_TOKEN, LINK_BYTES_PER_S, SimWorker
from simulator.workloads import Session

KEY = b"the benchmark's prefix key"
HEARTBEAT_S = 0.5
TRAVEL_S = 0.0005
"""From one process to another."""
LAST_CHUNK_TOKENS = 512
"""What is still to be sent when a prompt is computed, at least."""


@dataclass(slots=True)
class Result:
    """What clients saw, and what the caches did."""

    ttft_s: list[float] = field(default_factory=list)
    itl_s: list[float] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_hit_tokens: int = 0
    """Found by whoever computed the prompt."""
    num_transfer_tokens: int = 0
    num_local: int = 0
    num_waited: int = 0
    """At the gateway, for room."""
    num_in_vain: int = 0
    """Prompts that were computed before their decode worker had blocks for them."""
    num_preemptions: int = 0
    makespan_s: float = 0.0

    @property
    def hit_rate(self) -> float:
        return self.num_hit_tokens / self.num_prompt_tokens


@dataclass(slots=True)
class _Flight:
    """One request."""

    session: Session
    number: int
    request_id: str
    prompt: tuple[int, ...]
    arrived_at: float
    placement: Placement | None = None
    open_legs: set[str] = field(default_factory=set)
    num_tokens: int = 0
    last_token_at: float = 0.0
    num_to_load: int | None = None
    load_began_at: float = 0.0
    prompt_done_at: float | None = None
    times: StageTimes | None = None

    @property
    def answer(self) -> tuple[int, ...]:
        return self.session.turns[self.number].answer


class VirtualFleet:
    """`run` plays sessions to their end."""

    def __init__(
        self, config: GatewayConfig, num_prefill: int, num_decode: int, num_blocks: tuple[int, int], seed: int
    ) -> None:
        self._router = Router(config, KEY)
        self._rng = random.Random(seed)
        self._now = 0.0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._num_events = 0
        self._flights: dict[str, _Flight] = {}
        self._line: deque[_Flight] = deque()
        self._num_open = 0
        self._workers: dict[str, SimWorker] = {}
        self.result = Result()
        roles = [WorkerRole.PREFILL] * num_prefill + [WorkerRole.DECODE] * num_decode
        for number, role in enumerate(roles):
            size = num_blocks[role is WorkerRole.DECODE]
            self._workers[f"w{number}"] = SimWorker(f"w{number}", role, size, KEY, self._start_load)

    def run(self, sessions: list[Session]) -> Result:
        self._num_open = len(sessions)
        for session in sessions:
            self._at(session.arrival_s, partial(self._arrive, session, 0, session.system))
        for worker in self._workers.values():
            self._beat(worker)
        while self._num_open:
            self._now, _, action = heapq.heappop(self._heap)
            action()
        self.result.makespan_s = self._now
        for worker in self._workers.values():
            self.result.num_preemptions += worker.scheduler.counters().get("preemptions", 0)
        return self.result

    def _at(self, when: float, action: Callable[[], None]) -> None:
        self._num_events += 1
        heapq.heappush(self._heap, (when, self._num_events, action))

    def _soon(self, action: Callable[[], None]) -> None:
        self._at(self._now + TRAVEL_S, action)

    # clients

    def _arrive(self, session: Session, number: int, so_far: tuple[int, ...]) -> None:
        prompt = so_far + session.turns[number].user
        flight = _Flight(session, number, f"{session.name}.{number}", prompt, self._now)
        self._flights[flight.request_id] = flight
        self._line.append(flight)
        self._place_all()
        self.result.num_waited += flight.placement is None

    def _end(self, flight: _Flight) -> None:
        del self._flights[flight.request_id]
        session, following = flight.session, flight.number + 1
        if following == len(session.turns):
            self._num_open -= 1
            return
        so_far = flight.prompt + flight.answer
        when = self._now + session.turns[following].think_s
        self._at(when, partial(self._arrive, session, following, so_far))

    # the gateway

    def _place_all(self) -> None:
        while self._line:
            flight = self._line[0]
            try:
                placement = self._router.route(
                    RouteQuery(token_ids=flight.prompt, max_new_tokens=len(flight.answer))
                )
            except NoRoom:
                return
            self._line.popleft()
            self._send(flight, placement)

    def _send(self, flight: _Flight, placement: Placement) -> None:
        flight.placement = placement
        decode, prefill = self._workers[placement.decode], self._workers.get(placement.prefill or "")
        self.result.num_prompt_tokens += len(flight.prompt)
        self.result.num_local += prefill is None
        legs = [(decode, TransferRole.CONSUMER, prefill)] + (
            [(prefill, TransferRole.PRODUCER, decode)] if prefill else []
        )
        for worker, role, peer in legs:
            flight.open_legs.add(worker.ref.name)
            self._router.sent(worker.ref.name, placement)
            transfer = KVTransferParams(role, flight.request_id, 0, peer.ref) if peer else None
            request = Request(
                flight.request_id,
                flight.prompt,
                SamplingParams(max_tokens=len(flight.answer), ignore_eos=True),
                arrival_time=self._now,
                kv_transfer=transfer,
            )
            self._soon(partial(self._deliver, worker, request, flight.answer))

    def _deliver(self, worker: SimWorker, request: Request, answer: tuple[int, ...]) -> None:
        worker.add(request, answer)
        self._wake(worker)

    def _hear(self, worker: SimWorker, output: RequestOutput) -> None:
        flight = self._flights[output.request_id]
        placement = flight.placement
        assert placement is not None
        name = worker.ref.name
        is_prompts = name == (placement.prefill or placement.decode)
        if is_prompts and output.first_position == 0 and output.token_ids:
            self.result.num_hit_tokens += output.num_cached_tokens
        for position in range(output.first_position, output.first_position + len(output.token_ids)):
            if position < flight.num_tokens:
                continue
            if position == 0:
                self.result.ttft_s.append(self._now - flight.arrived_at)
            else:
                self.result.itl_s.append(self._now - flight.last_token_at)
            flight.num_tokens, flight.last_token_at = position + 1, self._now
        if output.finish_reason is None:
            return
        flight.open_legs.discard(name)
        self._router.ended(name, placement)
        if flight.times is not None and name == placement.decode:
            self._router.measured(placement, flight.times)
        if output.finish_reason in (FinishReason.LENGTH, FinishReason.STOP) and not flight.open_legs:
            self._end(flight)
        self._place_all()

    def _beat(self, worker: SimWorker) -> None:
        status = worker.status()
        self._soon(partial(self._take_status, status))
        self._at(self._now + HEARTBEAT_S * self._rng.uniform(0.95, 1.05), partial(self._beat, worker))

    def _take_status(self, status: WorkerStatus) -> None:
        self._router.on_status(status)
        self._place_all()

    # workers

    def _wake(self, worker: SimWorker) -> None:
        took_s = worker.start_step(self._now)
        if took_s is not None:
            self._at(self._now + took_s, partial(self._end_step, worker))

    def _end_step(self, worker: SimWorker) -> None:
        began = {request_id: leg.began_at for request_id, leg in worker.legs.items()}
        outputs = worker.end_step(self._now)
        self._tell(worker, outputs)
        for output in outputs:
            if output.finish_reason is FinishReason.HANDED_OVER:
                began_at = began[output.request_id]
                assert began_at is not None
                flight = self._flights[output.request_id]
                flight.prompt_done_at = self._now
                self.result.num_in_vain += flight.num_to_load is None
                flight.load_began_at = max(flight.load_began_at, began_at)
                self._move_if_ready(flight)
        self._wake(worker)

    def _tell(self, worker: SimWorker, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            self._soon(partial(self._hear, worker, output))
        if (events := worker.events()) is not None:
            self._soon(partial(self._follow, worker.ref.name, events))

    def _follow(self, name: str, events: KVEvents) -> None:
        is_followed = self._router.kv_events(name, events)
        assert is_followed, "nothing is lost here"

    # hand-overs

    def _start_load(self, request_id: str, num_tokens: int) -> None:
        flight = self._flights[request_id]
        flight.num_to_load, flight.load_began_at = num_tokens, max(flight.load_began_at, self._now)
        self._move_if_ready(flight)

    def _move_if_ready(self, flight: _Flight) -> None:
        """Blocks went out while the prompt was computed; what is left goes now."""
        if flight.num_to_load is None or flight.prompt_done_at is None:
            return
        per_token_s = BYTES_PER_TOKEN / LINK_BYTES_PER_S
        moved_s = self._now - flight.load_began_at
        rest_s = max(
            flight.num_to_load * per_token_s - moved_s,
            min(flight.num_to_load, LAST_CHUNK_TOKENS) * per_token_s,
        )
        self._at(self._now + rest_s, partial(self._arrived, flight))

    def _arrived(self, flight: _Flight) -> None:
        placement = flight.placement
        assert placement is not None
        assert flight.num_to_load is not None
        prefill, decode = self._workers[placement.prefill or ""], self._workers[placement.decode]
        moving_s = self._now - flight.load_began_at
        num_bytes = flight.num_to_load * BYTES_PER_TOKEN
        flight.times = StageTimes(transfer_bytes=num_bytes, transfer_moving_s=moving_s)
        self.result.num_transfer_tokens += flight.num_to_load
        prefill.release(flight.request_id)
        self._tell(decode, decode.receive(flight.request_id, flight.num_to_load, moving_s))
        self._tell(prefill, [])
        self._wake(prefill)
        self._wake(decode)
