"""QueueingFleet: workers as queues with assumed timing, for the real autoscaler and planner; whole days in seconds.

Prefill workers compute prompts one after the other. Requests wait for a decode worker with free blocks, as
they do at the gateway. A decode worker's step takes longer the more requests it runs. Latencies are measured
by the gateway's own window, and the autoscaler gets the same reports as in a real fleet.
"""

import heapq
import math
import random
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

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
from gateway.timing.latency_window import LatencyWindow
from simulator.world import World

BLOCK_SIZE = 16
STEP_S = 0.25
"""The time of one step of the simulation. Within a step, the pace of every worker is constant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpeed:
    """Speed of each worker; roughly an 8B model on one GPU."""

    prefill_tokens_per_s: float = 20_000.0
    decode_step_s: float = 0.012
    decode_step_per_request_s: float = 0.0006
    num_blocks: int = 12_000
    start_s: float = 45.0
    role_change_s: float = 3.0


@dataclass(frozen=True, slots=True)
class OfferedLoad:
    """Requests that arrive as a Poisson process."""

    requests_per_s: Callable[[float], float]
    """Gets a time in seconds, and returns the rate at this time."""
    max_requests_per_s: float
    mean_prompt_tokens: float = 2000.0
    mean_output_tokens: float = 250.0

    def arrivals(self, rng: random.Random, duration_s: float) -> Iterator["ArrivingRequest"]:
        """Draws arrivals at the highest rate, and keeps as many as the rate at their times demands.
        Lengths are exponentially distributed, and at least 1.
        """
        at = 0.0
        while (at := at + rng.expovariate(self.max_requests_per_s)) < duration_s:
            if rng.random() * self.max_requests_per_s < self.requests_per_s(at):
                prompt = 1 + int(rng.expovariate(1.0 / self.mean_prompt_tokens))
                yield ArrivingRequest(at, prompt, 1 + int(rng.expovariate(1.0 / self.mean_output_tokens)))


@dataclass(frozen=True, slots=True)
class ArrivingRequest:
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
    """When a starting worker serves."""
    prompts: deque[ArrivingRequest] = field(default_factory=deque)
    prompt_ends_at: float = math.inf
    prompt_tokens: int = 0
    """Tokens of all prompts on this worker."""
    running: list[tuple[float, int]] = field(default_factory=list)
    """A heap. By request: the tick of its last token, and the number of its blocks."""
    ticks: float = 0.0
    blocks_used: int = 0
    reserved: int = 0
    """Requests that have room on this worker and are still being prefilled."""


@dataclass(frozen=True, slots=True)
class Moment:
    """What the autoscaler saw and decided at one moment."""

    at: float
    num_prefill: int
    num_decode: int
    """`num_prefill`, `num_decode`: workers that serve."""
    num_paid: int
    """Workers that have a place, even if they do not serve yet."""
    report: GatewayReport
    decision: Decision


class QueueingFleet:
    """A fleet that an autoscaler observes and changes; `play` runs a load through the fleet."""

    def __init__(self, config: BatonConfig, speed: WorkerSpeed, seed: int, num_placeable: int = 1000) -> None:
        """Nodes have room for `num_placeable` workers; further ones wait to be placed."""
        self._world = World(seed, max_events=math.inf, has_ticks=False)
        self.autoscaler = Autoscaler(
            config.autoscaling,
            {role: config.worker_bounds(role) for role in WorkerRole},
            True,
            self._world.clock(0.0),
            self,
        )
        self.leaving: tuple[str, ...] = ()
        """Always empty, since nothing drains here: a worker that is not wanted any more is gone at once."""
        self._window = LatencyWindow()
        self._config, self._speed, self._num_placeable = config, speed, num_placeable
        self._workers: list[_Worker] = []
        self._num_named = 0
        self._queue: deque[ArrivingRequest] = deque()
        self._moving: dict[ArrivingRequest, _Worker] = {}
        """For each prompt at a prefill worker: the decode worker that keeps room for it."""
        self._next_decision_at = 0.0
        for role in WorkerRole:
            for _ in range(config.num_workers(role)):
                self._add(role, ReplicaState.SERVING)

    def play(
        self, load: OfferedLoad, duration_s: float, on_decision: Callable[[Moment], None] = lambda _: None
    ) -> None:
        """Runs the load; the autoscaler decides every `autoscaling.interval_s`."""
        self._schedule_next(load.arrivals(self._world.rng, duration_s))
        self._world.after(STEP_S, partial(self._step, on_decision))
        self._world.run(until=duration_s)

    def _schedule_next(self, arrivals: Iterator[ArrivingRequest]) -> None:
        """Lets the next request reach the gateway one step after its client sent it."""
        if (arrival := next(arrivals, None)) is not None:
            self._world.at(arrival.at + STEP_S, partial(self._arrive, arrival, arrivals))

    def _arrive(self, arrival: ArrivingRequest, arrivals: Iterator[ArrivingRequest]) -> None:
        self._queue.append(arrival)
        self._schedule_next(arrivals)

    def _step(self, on_decision: Callable[[Moment], None]) -> None:
        now = self._world.now
        for worker in self._workers:
            if worker.state is ReplicaState.STARTING and worker.due_at <= now:
                worker.state = ReplicaState.SERVING
        self._dispatch(now)
        for worker in self._serving(WorkerRole.PREFILL):
            self._prefill(worker, now)
        for worker in self._serving(WorkerRole.DECODE):
            self._decode(worker, now)
        if now - STEP_S >= self._next_decision_at:
            self._next_decision_at += self._config.autoscaling.interval_s
            on_decision(self._run_autoscaler(now))
        self._world.after(STEP_S, partial(self._step, on_decision))

    def _run_autoscaler(self, now: float) -> Moment:
        """One report of the only gateway, and one decision of the autoscaler."""
        report = self._report(now)
        self.autoscaler.report(report)
        decision = _result(self.autoscaler.decide_once())
        num_prefill, num_decode = (self.count(role, ReplicaState.SERVING) for role in WorkerRole)
        num_paid = sum(worker.state is not ReplicaState.PLACING for worker in self._workers)
        return Moment(now - STEP_S, num_prefill, num_decode, num_paid, report, decision)

    # what the autoscaler sees and changes

    def replicas_to_scale(self) -> list[ReplicaDescription]:
        return [ReplicaDescription(name=w.name, role=w.role, state=w.state) for w in self._workers]

    async def scale(self, role: WorkerRole, count: int) -> None:
        mine = [worker for worker in self._workers if worker.role is role]
        for _ in range(count - len(mine)):
            num_placed = sum(worker.state is not ReplicaState.PLACING for worker in self._workers)
            has_room = num_placed < self._num_placeable
            self._add(role, ReplicaState.STARTING if has_room else ReplicaState.PLACING)
        mine.sort(key=lambda worker: (worker.state is ReplicaState.SERVING, self._num_requests(worker)))
        for worker in mine[: max(0, len(mine) - count)]:
            self._remove(worker)

    async def set_role(self, worker: str, role: WorkerRole) -> None:
        (found,) = (w for w in self._workers if w.name == worker)
        self._requeue(found)
        found.role, found.state = role, ReplicaState.STARTING
        found.due_at = self._world.now + self._speed.role_change_s

    def kill(self, name: str, *, comes_back_after_s: float | None) -> None:
        """Kills a worker. `comes_back_after_s` None: the worker is in a crash loop."""
        (worker,) = (w for w in self._workers if w.name == name)
        self._requeue(worker)
        worker.state = ReplicaState.CRASH_LOOP if comes_back_after_s is None else ReplicaState.STARTING
        worker.due_at = self._world.now + (comes_back_after_s or 0.0)

    def count(self, role: WorkerRole, *states: ReplicaState) -> int:
        """The number of replicas of the role; with `states`, only of replicas in one of these states."""
        return sum(w.role is role and (not states or w.state in states) for w in self._workers)

    def _report(self, now: float) -> GatewayReport:
        seen = self._window.latencies(self._config.autoscaling.latency_window_s, now)
        waited_s = now - self._queue[0].at if self._queue else 0.0
        has_prefill = bool(self._serving(WorkerRole.PREFILL))
        return GatewayReport(
            gateway="g0",
            oldest_queued_s=waited_s if has_prefill else 0.0,
            oldest_without_prefill_s=0.0 if has_prefill else waited_s,
            num_first_tokens=seen.num_first_tokens,
            ttft_s=seen.ttft_s,
            itl_s=seen.itl_s,
            workers=tuple(self._status(w, now) for w in self._workers if w.state is ReplicaState.SERVING),
        )

    def _dispatch(self, now: float) -> None:
        """As at the gateway, the first request waits for decode room, then joins the shortest prefill queue."""
        while self._queue:
            arrival = self._queue[0]
            room = [
                w
                for w in self._serving(WorkerRole.DECODE)
                if w.blocks_used + arrival.num_blocks <= self._speed.num_blocks
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
            self._moving[arrival] = decode
            if worker.prompt_ends_at == math.inf:
                worker.prompt_ends_at = now + self._prefill_s(arrival)

    def _prefill(self, worker: _Worker, now: float) -> None:
        while worker.prompts and worker.prompt_ends_at <= now:
            arrival = worker.prompts.popleft()
            worker.prompt_tokens -= arrival.num_prompt_tokens
            self._window.first_token(worker.prompt_ends_at - arrival.at, now)
            decode = self._moving.pop(arrival, None)
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

    def _decode(self, worker: _Worker, now: float) -> None:
        if not worker.running:
            return
        step_s = self._step_s(worker)
        self._window.next_tokens(step_s, 1, now)
        worker.ticks += STEP_S / step_s
        while worker.running and worker.running[0][0] <= worker.ticks:
            _, num_blocks = heapq.heappop(worker.running)
            worker.blocks_used -= num_blocks
            self._window.finished(now)

    def _status(self, worker: _Worker, now: float) -> WorkerStatus:
        waiting = list(worker.prompts)[1:]
        is_prefill = worker.role is WorkerRole.PREFILL
        running = min(1, len(worker.prompts)) if is_prefill else len(worker.running)
        total = self._speed.num_blocks
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
        due_at = self._world.now + self._speed.start_s
        self._workers.append(_Worker(f"w{self._num_named}", role, state, due_at))
        self._num_named += 1

    def _remove(self, worker: _Worker) -> None:
        self._requeue(worker)
        self._workers.remove(worker)
        placing = [w for w in self._workers if w.state is ReplicaState.PLACING]
        if placing and len(self._workers) - len(placing) < self._num_placeable:
            placing[0].state, placing[0].due_at = (
                ReplicaState.STARTING,
                self._world.now + self._speed.start_s,
            )

    def _requeue(self, worker: _Worker) -> None:
        """Gives prompts back to the gateway. Ends running requests at once, as if they had moved to another worker."""
        self._queue.extendleft(reversed(worker.prompts))
        for arrival in worker.prompts:
            decode = self._moving.pop(arrival, None)
            if decode is not None:
                decode.reserved -= 1
                decode.blocks_used -= arrival.num_blocks
        self._moving = {arrival: decode for arrival, decode in self._moving.items() if decode is not worker}
        worker.prompts.clear()
        worker.prompt_tokens = 0
        worker.prompt_ends_at = math.inf
        worker.running.clear()
        worker.blocks_used = worker.reserved = 0

    def _serving(self, role: WorkerRole) -> list[_Worker]:
        return [w for w in self._workers if w.role is role and w.state is ReplicaState.SERVING]

    def _num_requests(self, worker: _Worker) -> int:
        return len(worker.prompts) + len(worker.running)

    def _prefill_s(self, arrival: ArrivingRequest) -> float:
        return arrival.num_prompt_tokens / self._speed.prefill_tokens_per_s

    def _step_s(self, worker: _Worker) -> float:
        return self._speed.decode_step_s + self._speed.decode_step_per_request_s * len(worker.running)


def _result(coroutine: Coroutine[Any, Any, Decision]) -> Decision:
    """Runs a coroutine that never waits: in virtual time, every change is made at once."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    raise AssertionError(f"{coroutine} waits")
