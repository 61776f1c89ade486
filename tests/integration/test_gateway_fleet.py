"""The workers that a gateway is connected to: whatever ends a connection, no request waits for a lost worker."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
import zmq

from baton.kv import WorkerRef
from baton.messages.request_plane import Heartbeat, KVEvents
from baton.request import RequestOutput
from baton.worker import WorkerEndpoint, WorkerRole, WorkerState, WorkerStatus
from gateway.workers.connections import WorkerConnections
from gateway.workers.worker_listener import LossCause
from tests.factories.gateway import NETWORK, ScriptedWorker, silent
from tests.factories.security import KEYS


class Listener:
    """Keeps the losses it was notified of, and fails on heartbeats if a test asks for it."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.losses: asyncio.Queue[tuple[LossCause, str]] = asyncio.Queue()
        self.states: asyncio.Queue[WorkerState] = asyncio.Queue()

    def on_status(self, status: WorkerStatus) -> None:
        self.states.put_nowait(status.state)
        if self.error is not None:
            raise self.error

    def on_outputs(self, worker: str, outputs: tuple[RequestOutput, ...]) -> None: ...

    def on_kv_events(self, worker: str, events: KVEvents) -> None: ...

    def on_worker_lost(self, worker: str, cause: LossCause, reason: str) -> None:
        assert worker == "w0"
        self.losses.put_nowait((cause, reason))


@asynccontextmanager
async def one_worker() -> AsyncIterator[tuple[WorkerConnections, ScriptedWorker, Listener]]:
    """A gateway's connection to w0, after its first heartbeat."""
    worker, listener = ScriptedWorker("w0", WorkerRole.DECODE, silent), Listener()
    fleet = WorkerConnections(NETWORK, KEYS.request, listener)
    try:
        fleet.add_worker(worker.endpoint)
        await until(listener, WorkerState.READY)
        yield fleet, worker, listener
    finally:
        await fleet.stop()
        worker.stop()


async def until(listener: Listener, state: WorkerState) -> None:
    async with asyncio.timeout(60):
        while await listener.states.get() is not state:
            pass


def nowhere(name: str = "w0") -> WorkerEndpoint:
    ref = WorkerRef(name, f"{name}-incarnation", ("tcp://127.0.0.1:1",), 16)
    return WorkerEndpoint(ref, WorkerRole.DECODE, "tcp://127.0.0.1:1", "here", 1)


async def test_a_worker_that_is_replaced_in_the_moment_it_came_leaves_nothing_open() -> None:
    fleet = WorkerConnections(NETWORK, KEYS.request, Listener())
    fleet.add_worker(nowhere())
    first = fleet.client("w0")
    assert first is not None
    fleet.add_worker(nowhere())
    await asyncio.wait_for(first.first_sign.wait(), 60)
    fleet.remove_worker("w0")
    assert first._socket.closed, "an open socket would keep the context from ending"
    await fleet.stop()


@pytest.mark.parametrize("num_turns", range(6))
async def test_workers_may_come_and_leave_while_the_connections_end(num_turns: int) -> None:
    """A gateway follows its fleet until it has stopped. An open socket would keep the context from ending."""
    fleet = WorkerConnections(NETWORK, KEYS.request, Listener())
    fleet.add_worker(nowhere("w0"))
    fleet.add_worker(nowhere("w1"))
    await asyncio.sleep(0.01)
    stop = asyncio.create_task(fleet.stop())
    for _ in range(num_turns):
        await asyncio.sleep(0)
    fleet.remove_worker("w0")
    if not stop.done():
        fleet.add_worker(nowhere("w2"))
    await stop
    assert fleet.clients == []


async def test_the_connection_to_a_replaced_worker_cannot_take_the_place_of_the_next_one() -> None:
    """With one identity for both, libzmq stopped reading the second connection if the first was restored after it."""
    fleet = WorkerConnections(NETWORK, KEYS.request, Listener())
    identities = []
    for _ in range(2):
        fleet.add_worker(nowhere())
        client = fleet.client("w0")
        assert client is not None
        identities.append(client._socket.getsockopt(zmq.IDENTITY))
    await fleet.stop()
    assert identities[0] != identities[1]


async def test_a_connection_that_ends_with_an_error_of_ours_is_a_loss() -> None:
    worker, listener = ScriptedWorker("w0", WorkerRole.DECODE, silent), Listener(ValueError("choked"))
    fleet = WorkerConnections(NETWORK, KEYS.request, listener)
    try:
        fleet.add_worker(worker.endpoint)
        loss = await asyncio.wait_for(listener.losses.get(), 60)
        assert loss == (LossCause.DISCONNECTED, "the connection failed: choked")
        assert fleet.client("w0") is None
    finally:
        await fleet.stop()
        worker.stop()


async def test_a_death_that_the_controller_reports_first_is_one_loss() -> None:
    async with one_worker() as (fleet, _, listener):
        client = fleet.client("w0")
        assert client is not None
        fleet.worker_died("w0", "its process died")
        client._note_disconnection("and its port refuses a new connection")  # before its task has ended
        assert listener.losses.get_nowait() == (LossCause.DIED, "its process died")
        assert listener.losses.empty()
        assert fleet.losses == {LossCause.DIED: 1}


async def test_a_death_that_the_controller_reports_last_is_one_loss() -> None:
    async with one_worker() as (fleet, worker, listener):
        worker.stop()
        cause, reason = await asyncio.wait_for(listener.losses.get(), 60)
        assert (cause, reason.partition(",")[0]) == (LossCause.DISCONNECTED, "its connection broke")
        fleet.worker_died("w0", "its process died")
        assert listener.losses.empty()
        assert fleet.losses == {LossCause.DISCONNECTED: 1}
        assert fleet.client("w0") is None


@pytest.mark.parametrize("is_planned", [True, False])
async def test_only_an_end_without_a_drain_is_a_loss(is_planned: bool) -> None:
    async with one_worker() as (fleet, worker, listener):
        if is_planned:
            worker.state = WorkerState.DRAINING
            await until(listener, WorkerState.DRAINING)
        worker.state = WorkerState.STOPPED
        cause = LossCause.LEFT if is_planned else LossCause.ENDED
        assert await asyncio.wait_for(listener.losses.get(), 60) == (cause, "its engine is stopped")
        assert fleet.losses == ({} if is_planned else {LossCause.ENDED: 1})


async def test_a_silent_worker_whose_successor_answers_later_is_one_loss() -> None:
    async with one_worker() as (fleet, _, listener):
        client = fleet.client("w0")
        assert client is not None
        client.lose(LossCause.SILENT, "silent for 9.0 s")
        assert listener.losses.get_nowait() == (LossCause.SILENT, "silent for 9.0 s")
        assert client.status is not None
        successor = replace(client.status, ref=replace(client.status.ref, incarnation="next"))
        assert client._on_heartbeat(Heartbeat(successor, 1, 0)) == (LossCause.RESTARTED, "restarted")
        client.lose(LossCause.RESTARTED, "restarted")
        assert listener.losses.empty()
        assert fleet.losses == {LossCause.SILENT: 1}


async def test_a_worker_that_leaves_the_fleet_is_no_loss() -> None:
    async with one_worker() as (fleet, _, listener):
        fleet.remove_worker("w0")
        assert listener.losses.get_nowait() == (LossCause.LEFT, "it left the fleet")
        assert fleet.losses == {}
