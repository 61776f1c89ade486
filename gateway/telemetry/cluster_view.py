"""ClusterView: snapshots of the cluster, from a gateway's requests, its workers' heartbeats and the controller."""

import asyncio
import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Literal

from baton.clock import Clock
from baton.kv import TransferRole
from baton.messages.control import ControlApi
from baton.version import baton_version
from baton.worker import WorkerRole, WorkerStatus
from gateway.model import ServedModel
from gateway.requests.driver import RequestDriver
from gateway.requests.record import OUTCOMES
from gateway.telemetry.snapshot import (
    BlocksSeen,
    ClusterSnapshot,
    GatewaySeen,
    HandoversSeen,
    LastMinute,
    NodeSeen,
    WorkerSeen,
)
from gateway.timing.latency_window import MAX_WINDOW_S, LatencyWindow
from gateway.workers.fleet_view import ControllerView, WorkerView, ask_controller, views_of
from gateway.workers.worker_client import WorkerClient

CONTROLLER_INTERVAL_S = 5.0
"""How long a controller's answer is used, before the controller is asked again."""
MAX_PAIRS = 256
"""A snapshot contains the hand-overs of at most this many pairs, the busiest ones, since a large fleet has thousands of
pairs."""


class ClusterView:
    """Makes snapshots. Call all methods on the gateway's event loop."""

    def __init__(
        self, driver: RequestDriver, model: ServedModel, control: ControlApi | None, clock: Clock
    ) -> None:
        self._driver = driver
        self._model = model
        self._controller = _Controller(control, clock)
        self._clock = clock
        self._version = baton_version()

    async def ask_controller(self) -> None:
        """Waits at most one second for the controller's answer; not at all if the latest answer is recent."""
        if asking := self._controller.begin_to_ask():
            await asyncio.wait([asking])

    async def stop(self) -> None:
        await self._controller.stop()

    def snapshot(self) -> ClusterSnapshot:
        """The current state, with the controller's latest answer. If this answer is old, asks the controller
        again, for later snapshots."""
        self._controller.begin_to_ask()
        controller, clients = self._controller.latest, self._driver.workers.clients
        return ClusterSnapshot(
            model=self._model.name,
            version=self._version,
            workers=tuple(map(_worker, views_of(clients, controller.replicas))),
            handovers=_handovers(clients),
            gateway=_gateway(self._driver),
            last_minute=_last_minute(self._driver.dispatcher.latencies, self._clock.now()),
            controller=controller.state,
            nodes=tuple(
                NodeSeen(name=node.name, address=node.address, is_alive=node.is_alive, is_head=node.is_head)
                for node in controller.nodes
            ),
        )


class _Controller:
    """The controller's latest answer. Asks the controller at most once per CONTROLLER_INTERVAL_S."""

    def __init__(self, control: ControlApi | None, clock: Clock) -> None:
        self._control = control
        self._clock = clock
        self._asked_at = -math.inf
        self._asking: asyncio.Task[None] | None = None
        self.latest = ControllerView("none" if control is None else "away")

    def begin_to_ask(self) -> "asyncio.Task[None] | None":
        """Asks the controller in a task, and returns the task. Returns None if the latest answer is recent, or if there
        is no controller.
        """
        if self._asking is not None and not self._asking.done():
            return self._asking
        if self._control is None or self._clock.now() - self._asked_at < CONTROLLER_INTERVAL_S:
            return None
        self._asked_at = self._clock.now()
        self._asking = asyncio.create_task(self._ask(), name="ask the controller")
        return self._asking

    async def stop(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.wait([self._asking])

    async def _ask(self) -> None:
        self.latest = await ask_controller(self._control)


def _worker(view: WorkerView) -> WorkerSeen:
    status, replica = view.status, view.replica
    failure = (status.failure if status else "") or (replica.last_failure if replica else None)
    seen = WorkerSeen(
        name=view.name, role=_word(view.role), state=view.state, node=view.node, failure=failure
    )
    if status is None:
        return seen
    return replace(
        seen,
        blocks=_blocks(status),
        running=status.requests.running,
        waiting=status.requests.waiting,
        waiting_for_kv=status.requests.waiting_for_remote_kvs,
    )


def _word(role: WorkerRole) -> Literal["prefill", "decode"]:
    return "prefill" if role is WorkerRole.PREFILL else "decode"


def _blocks(status: WorkerStatus) -> BlocksSeen:
    blocks = status.kv_blocks
    return BlocksSeen(
        total=blocks.total,
        free=blocks.free,
        used=blocks.referenced,
        leased=blocks.leased,
        quarantined=blocks.quarantined,
    )


def _handovers(clients: Iterable[WorkerClient]) -> tuple[HandoversSeen, ...]:
    """The hand-overs of each pair, as its decode worker counted them."""
    pairs: dict[tuple[str, str], list[int]] = {}
    for client in clients:
        for peer in client.status.kv_peers if client.status else ():
            if peer.role is TransferRole.CONSUMER:
                counts = pairs.setdefault((peer.peer, client.name), [0, 0, 0])
                for index, more in enumerate((peer.done, peer.failed, peer.num_bytes)):
                    counts[index] += more
    busiest = sorted(pairs.items(), key=lambda pair: -pair[1][0])[:MAX_PAIRS]
    return tuple(
        HandoversSeen(prefill=prefill, decode=decode, done=done, failed=failed, num_bytes=num_bytes)
        for (prefill, decode), (done, failed, num_bytes) in busiest
    )


def _gateway(driver: RequestDriver) -> GatewaySeen:
    counters = driver.dispatcher.tally.counters
    return GatewaySeen(
        in_flight=driver.dispatcher.num_in_flight,
        queued=driver.dispatcher.num_queued,
        oldest_queued_s=driver.oldest_queued_s,
        paths=dict(driver.dispatcher.tally.paths),
        outcomes={outcome: counters[outcome] for outcome in OUTCOMES},
    )


def _last_minute(window: LatencyWindow, now: float) -> LastMinute:
    seconds = window.seconds(now)
    ttft = [second.ttft_s or (None, None) for second in seconds]
    itl = [second.itl_s or (None, None) for second in seconds]
    whole = window.latencies(MAX_WINDOW_S, now)
    return LastMinute(
        newest=math.floor(now) - 1,
        tokens=tuple(second.num_tokens for second in seconds),
        finished=tuple(second.num_finished for second in seconds),
        ttft_p50_s=tuple(p50 for p50, _ in ttft),
        ttft_p99_s=tuple(p99 for _, p99 in ttft),
        itl_p50_s=tuple(p50 for p50, _ in itl),
        itl_p99_s=tuple(p99 for _, p99 in itl),
        ttft_s=whole.ttft_s,
        itl_s=whole.itl_s,
    )
