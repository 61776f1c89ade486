"""A fleet in virtual time, for the autoscaler to scale: queues with the timing of workers, and nothing else of them.

Prefill workers compute prompts one after the other; requests wait for a decode worker with free blocks, as they do at
the gateway; what a decode worker's step takes grows with the requests that it runs. Latencies go through the gateway's
own window, and everything is seen through the same reports as in a real fleet.
"""

import asyncio
import heapq
import math
import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from baton.clock import VirtualClock
from baton.config import BatonConfig
from baton.fleet import GatewayReport, ReplicaDescription, ReplicaState
from baton.kv import WorkerRef
from baton.worker import (
    KVBlockCounts,
    RequestCounts,
    WorkerLoad,
    WorkerRole,
    WorkerState,
    WorkerStatus,
)
from cluster.controller.autoscaler import Autoscaler
from cluster.controller.planner import Decision
from gateway.requests.latency_window import LatencyWindow

BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """What workers of one kind can do; roughly an 8B model on one GPU each."""

    prefill_tokens_per_s: float = 20_000.0
    decode_step_s: float = 0.012
    decode_step_per_request_s: float = 0.0006
    num_blocks: int = 12_000
    start_s: float = 45.0
    role_change_s: float = 3.0


@dataclass(frozen=True, slots=True)
class Load:
    """Requests that arrive as a Poisson process."""

    requests_per_s: Callable[[float], float]
    """At a time in seconds."""
    max_requests_per_s: float
    mean_prompt_tokens: float = 2000.0
    mean_output_tokens: float = 250.0

    def arrivals(self, rng: random.Random, duration_s: float) -> Iterator["Arrival"]:
        """Thinned from the highest rate; lengths are exponential, and at least one."""
        at = 0.0
        while (at := at + rng.expovariate(self.max_requests_per_s)) < duration_s:
            if rng.random() * self.max_requests_per_s < self.requests_per_s(at):
                prompt = 1 + int(rng.expovariate(1.0 / self.mean_prompt_tokens))
                yield Arrival(at, prompt, 1 + int(rng.expovariate(1.0 / self.mean_output_tokens)))


@dataclass(frozen=True, slots=True)
class Arrival:
    at: float
    num_prompt_tokens: int
    num_output_tokens: int

    @property
    def num_blocks(self) -> int:
        return math.ceil((self.num_prompt_tokens + self.num_output_tokens) / BLOCK_SIZE)


@dataclass(slots=True)
class _Worker:
    name: str
    role: WorkerRole
    state: ReplicaState
    due_at: float = 0.0
    """When it serves, while it does not."""
    prompts: deque[Arrival] = field(default_factory=deque)
    prompt_ends_at: float = math.inf
    prompt_tokens: int = 0
    """Of all prompts here."""
    running: list[tuple[float, int]] = field(default_factory=list)
    """A heap: the tick of the worker's tokens at which a request has its last one, and its blocks."""
    ticks: float = 0.0
    blocks_used: int = 0
    reserved: int = 0
    """Requests that were given room here and are still being prefilled."""


class VirtualFleet:
    """An autoscaler looks at it, and changes it; `advance` moves everything on."""

    def __init__(self, config: BatonConfig, timing: Timing, num_placeable: int = 1000) -> None:
        """Nodes have room for `num_placeable` workers; one more waits to be placed."""
        self.clock = VirtualClock()
        self.window = LatencyWindow()
        self.autoscaler = Autoscaler(config, self.clock, self.replicas, self.scale, self.change_role)
        self._config, self._timing, self._num_placeable = config, timing, num_placeable
        self._workers: list[_Worker] = []
        self._num_named = 0
        self._queue: deque[Arrival] = deque()
        self._moving: dict[tuple[float, int, int], _Worker] = {}
        for role in WorkerRole:
            for _ in range(getattr(config.cluster, role.value)):
                self._add(role, ReplicaState.SERVING)

    @property
    def interval_s(self) -> float:
        return self._config.autoscaling.interval_s

    # what the autoscaler may do

    def replicas(self) -> list[ReplicaDescription]:
        return [ReplicaDescription(name=w.name, role=w.role, state=w.state) for w in self._workers]

    async def scale(self, role: WorkerRole, count: int) -> None:
        mine = [worker for worker in self._workers if worker.role is role]
        for _ in range(count - len(mine)):
            num_placed = sum(worker.state is not ReplicaState.PLACING for worker in self._workers)
            has_room = num_placed < self._num_placeable
            self._add(role, ReplicaState.STARTING if has_room else ReplicaState.PLACING)
        mine.sort(key=lambda worker: (worker.state is ReplicaState.SERVING, self._num_requests(worker)))
        for worker in mine[: max(0, len(mine) - count)]:
            self._give_up(worker)

    async def change_role(self, worker: str, role: WorkerRole) -> None:
        (found,) = (w for w in self._workers if w.name == worker)
        self._requeue(found)
        found.role, found.state = role, ReplicaState.STARTING
        found.due_at = self.clock.now() + self._timing.role_change_s

    # what happens to it

    def arrive(self, arrival: Arrival) -> None:
        self._queue.append(arrival)

    def advance(self, dt: float) -> None:
        """A small step, within which every worker goes on at one pace."""
        self.clock.advance(dt)
        now = self.clock.now()
        for worker in self._workers:
            if worker.state is ReplicaState.STARTING and worker.due_at <= now:
                worker.state = ReplicaState.SERVING
        self._dispatch(now)
        for worker in self._serving(WorkerRole.PREFILL):
            self._prefill(worker, now)
        for worker in self._serving(WorkerRole.DECODE):
            self._decode(worker, dt, now)

    def kill(self, name: str, *, comes_back_after_s: float | None) -> None:
        """None: it is in a crash loop."""
        (worker,) = (w for w in self._workers if w.name == name)
        self._requeue(worker)
        worker.state = ReplicaState.CRASH_LOOP if comes_back_after_s is None else ReplicaState.STARTING
        worker.due_at = self.clock.now() + (comes_back_after_s or 0.0)

    def count(self, role: WorkerRole, *states: ReplicaState) -> int:
        """Slots of the role, or those of them in one of these states."""
        return sum(w.role is role and (not states or w.state in states) for w in self._workers)

    async def look(self) -> Decision:
        """One report of the only gateway, and one look of the autoscaler."""
        self.autoscaler.report(self.report())
        return await self.autoscaler.look()

    def report(self) -> GatewayReport:
        now, window_s = self.clock.now(), self._config.autoscaling.grow_after_s
        seen = self.window.latencies(window_s, now)
        return GatewayReport(
            gateway="g0",
            window_s=window_s,
            num_queued=len(self._queue),
            oldest_queued_s=now - self._queue[0].at if self._queue else 0.0,
            num_in_flight=0,
            num_finished=seen.num_finished,
            ttft_s=seen.ttft_s,
            itl_s=seen.itl_s,
            workers=tuple(self._status(w, now) for w in self._workers if w.state is ReplicaState.SERVING),
        )

    def _dispatch(self, now: float) -> None:
        """The gateway: the first in line waits for room on a decode worker, and then goes to the shortest queue."""
        while self._queue:
            arrival = self._queue[0]
            room = [
                w
                for w in self._serving(WorkerRole.DECODE)
                if w.blocks_used + arrival.num_blocks <= self._timing.num_blocks
            ]
            prefill = self._serving(WorkerRole.PREFILL)
            if not room or not prefill:
                return
            self._queue.popleft()
            decode = min(room, key=lambda w: len(w.running) + w.reserved)
            decode.blocks_used += arrival.num_blocks
            decode.reserved += 1
            worker = min(prefill, key=lambda w: w.prompt_tokens)
            worker.prompts.append(arrival)
            worker.prompt_tokens += arrival.num_prompt_tokens
            self._moving[arrival.at, arrival.num_prompt_tokens, arrival.num_output_tokens] = decode
            if worker.prompt_ends_at == math.inf:
                worker.prompt_ends_at = now + self._prefill_s(arrival)

    def _prefill(self, worker: _Worker, now: float) -> None:
        while worker.prompts and worker.prompt_ends_at <= now:
            arrival = worker.prompts.popleft()
            worker.prompt_tokens -= arrival.num_prompt_tokens
            self.window.first_token(worker.prompt_ends_at - arrival.at, now)
            decode = self._moving.pop(
                (arrival.at, arrival.num_prompt_tokens, arrival.num_output_tokens), None
            )
            if decode is not None:
                decode.reserved -= 1
                ends = decode.ticks + arrival.num_output_tokens
                heapq.heappush(decode.running, (ends, arrival.num_blocks))
            else:
                self._queue.appendleft(arrival)
            if worker.prompts:
                worker.prompt_ends_at += self._prefill_s(worker.prompts[0])
            else:
                worker.prompt_ends_at = math.inf

    def _decode(self, worker: _Worker, dt: float, now: float) -> None:
        if not worker.running:
            return
        step_s = self._step_s(worker)
        self.window.next_tokens(step_s, 1, now)
        worker.ticks += dt / step_s
        while worker.running and worker.running[0][0] <= worker.ticks:
            _, num_blocks = heapq.heappop(worker.running)
            worker.blocks_used -= num_blocks
            self.window.finished(now)

    def _status(self, worker: _Worker, now: float) -> WorkerStatus:
        waiting = list(worker.prompts)[1:]
        is_prefill = worker.role is WorkerRole.PREFILL
        running = min(1, len(worker.prompts)) if is_prefill else len(worker.running)
        total = self._timing.num_blocks
        return WorkerStatus(
            WorkerRef(worker.name, "1", ("tcp://127.0.0.1:1",), BLOCK_SIZE),
            worker.role,
            WorkerState.READY,
            KVBlockCounts(total, total - worker.blocks_used, 0, 0),
            RequestCounts(running, len(waiting), worker.reserved),
            {},
            load=WorkerLoad(
                oldest_waiting_s=max((now - a.at for a in waiting), default=0.0),
                decode_step_s=self._step_s(worker),
            ),
        )

    def _add(self, role: WorkerRole, state: ReplicaState) -> None:
        due_at = self.clock.now() + self._timing.start_s
        self._workers.append(_Worker(f"w{self._num_named}", role, state, due_at))
        self._num_named += 1

    def _give_up(self, worker: _Worker) -> None:
        self._requeue(worker)
        self._workers.remove(worker)
        placing = [w for w in self._workers if w.state is ReplicaState.PLACING]
        if placing and len(self._workers) - len(placing) < self._num_placeable:
            placing[0].state, placing[0].due_at = (
                ReplicaState.STARTING,
                self.clock.now() + self._timing.start_s,
            )

    def _requeue(self, worker: _Worker) -> None:
        """Prompts go back to the gateway; what runs here ends at once, as if it had moved to another worker."""
        self._queue.extendleft(reversed(worker.prompts))
        for arrival in worker.prompts:
            key = (arrival.at, arrival.num_prompt_tokens, arrival.num_output_tokens)
            decode = self._moving.pop(key, None)
            if decode is not None:
                decode.reserved -= 1
                decode.blocks_used -= arrival.num_blocks
        self._moving = {key: decode for key, decode in self._moving.items() if decode is not worker}
        worker.prompts.clear()
        worker.prompt_tokens = 0
        worker.prompt_ends_at = math.inf
        worker.running.clear()
        worker.blocks_used = worker.reserved = 0

    def _serving(self, role: WorkerRole) -> list[_Worker]:
        return [w for w in self._workers if w.role is role and w.state is ReplicaState.SERVING]

    def _num_requests(self, worker: _Worker) -> int:
        return len(worker.prompts) + len(worker.running)

    def _prefill_s(self, arrival: Arrival) -> float:
        return arrival.num_prompt_tokens / self._timing.prefill_tokens_per_s

    def _step_s(self, worker: _Worker) -> float:
        return self._timing.decode_step_s + self._timing.decode_step_per_request_s * len(worker.running)


@dataclass(frozen=True, slots=True)
class Moment:
    """What one look saw and decided."""

    at: float
    num_prefill: int
    num_decode: int
    """That serve."""
    num_paid: int
    """That have a place, whether they serve yet or not."""
    report: GatewayReport
    decision: Decision


def play(
    fleet: VirtualFleet,
    load: Load,
    duration_s: float,
    seed: int,
    each_look: Callable[[Moment], None] = lambda _: None,
    step_s: float = 0.25,
) -> None:
    """Runs the load through the fleet, with a look every `autoscaling.interval_s`."""
    asyncio.run(_play(fleet, load, duration_s, seed, each_look, step_s))


async def _play(
    fleet: VirtualFleet,
    load: Load,
    duration_s: float,
    seed: int,
    each_look: Callable[[Moment], None],
    step_s: float,
) -> None:
    arrivals = load.arrivals(random.Random(seed), duration_s)
    arrival = next(arrivals, None)
    next_look = 0.0
    while (now := fleet.clock.now()) < duration_s:
        while arrival is not None and arrival.at <= now:
            fleet.arrive(arrival)
            arrival = next(arrivals, None)
        fleet.advance(step_s)
        if now >= next_look:
            next_look += fleet.interval_s
            report = fleet.report()
            decision = await fleet.look()
            counts = [fleet.count(role, ReplicaState.SERVING) for role in WorkerRole]
            num_paid = sum(replica.state is not ReplicaState.PLACING for replica in fleet.replicas())
            each_look(Moment(now, counts[0], counts[1], num_paid, report, decision))
