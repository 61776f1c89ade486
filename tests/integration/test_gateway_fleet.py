"""The workers that a gateway is connected to: whatever ends the connection, nobody waits for them in vain."""

import asyncio

import zmq

from baton.kv import WorkerRef
from baton.messages.request_plane import KVEvents
from baton.request import RequestOutput
from baton.worker import WorkerEndpoint, WorkerRole, WorkerStatus
from gateway.workers.connections import WorkerConnections
from tests.factories.gateway import NETWORK, ScriptedWorker, silent
from tests.factories.security import KEYS


class Listener:
    """Keeps the losses it was notified of, and fails on heartbeats if a test asks for it."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.losses: asyncio.Queue[tuple[str, str]] = asyncio.Queue()

    def on_status(self, status: WorkerStatus) -> None:
        if self.error is not None:
            raise self.error

    def on_outputs(self, worker: str, outputs: tuple[RequestOutput, ...]) -> None: ...

    def on_kv_events(self, worker: str, events: KVEvents) -> None: ...

    def on_worker_lost(self, worker: str, reason: str) -> None:
        self.losses.put_nowait((worker, reason))


def nowhere() -> WorkerEndpoint:
    ref = WorkerRef("w0", "w0-life", ("tcp://127.0.0.1:1",), 16)
    return WorkerEndpoint(ref, WorkerRole.DECODE, "tcp://127.0.0.1:1", "here", 1)


async def test_a_worker_that_is_replaced_in_the_moment_it_came_leaves_nothing_open() -> None:
    fleet = WorkerConnections(NETWORK, KEYS.request, Listener())
    fleet.add(nowhere())
    first = fleet.client("w0")
    assert first is not None
    fleet.add(nowhere())
    await asyncio.wait_for(first.first_sign.wait(), 60)
    fleet.remove("w0", "the test says so")
    assert first._socket.closed, "an open socket would keep the context from ending"
    await fleet.stop()


async def test_the_connection_to_a_replaced_worker_cannot_take_the_place_of_the_next_one() -> None:
    """With one identity for both, libzmq stopped reading the next connection if the first was restored after it."""
    fleet = WorkerConnections(NETWORK, KEYS.request, Listener())
    identities = []
    for _ in range(2):
        fleet.add(nowhere())
        client = fleet.client("w0")
        assert client is not None
        identities.append(client._socket.getsockopt(zmq.IDENTITY))
    await fleet.stop()
    assert identities[0] != identities[1]


async def test_a_connection_that_ends_with_an_error_of_ours_is_a_loss() -> None:
    worker, listener = ScriptedWorker("w0", WorkerRole.DECODE, silent), Listener(ValueError("choked"))
    fleet = WorkerConnections(NETWORK, KEYS.request, listener)
    try:
        fleet.add(worker.endpoint)
        name, reason = await asyncio.wait_for(listener.losses.get(), 60)
        assert (name, reason) == ("w0", "the connection failed: choked")
        assert fleet.client("w0") is None
    finally:
        await fleet.stop()
        worker.stop()
