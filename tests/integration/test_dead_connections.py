"""TCP connections whose other end is out of reach end soon, whichever plane they belong to."""

import asyncio
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from baton.clock import SystemClock
from baton.system.dead_connections import end_dead_connections
from kv_transfer.transport.zmq_tcp import ZmqChannel
from tests.factories.control_api import client_of, control_server, port_of
from tests.factories.fleet import fleet_config
from tests.factories.gateway import answering, gateway_with
from tests.factories.proxy import proxy_to
from tests.factories.security import KEYS

TIMEOUT_S = 0.2
LIMIT_S = 60.0
KERNEL_BYTES = 64 * 2**20
"""More than the kernel keeps for all connections on the way to a peer that reads nothing."""
ESTABLISHED, KEEPALIVE = "01", "02"


def timers_at(port: int) -> list[str]:
    """The timers that run for both ends of all connections to this port (proc_net_tcp of the kernel)."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    ends = [row for row in rows if row[3] == ESTABLISHED and f":{port:04X}" in (row[1][-5:], row[2][-5:])]
    return [row[5].partition(":")[0] for row in ends]


async def until_probed(port: int) -> None:
    """Waits until the kernel would probe both ends of an idle connection. Data on the way needs another timer."""
    async with asyncio.timeout(LIMIT_S):
        while timers_at(port) != [KEEPALIVE] * 2:
            await asyncio.sleep(0.001)


@pytest.fixture
def full_port() -> Iterator[int]:
    """A port that leaves attempts to connect unanswered, as a lost host does."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        waiting = stack.enter_context(socket.socket())
        waiting.connect(listener.getsockname())
        yield listener.getsockname()[1]


async def test_an_attempt_to_connect_that_nothing_answers_is_repeated(full_port: int) -> None:
    with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as dialler:
        dialler.setsockopt(zmq.LINGER, 0)
        end_dead_connections(dialler, TIMEOUT_S)
        with dialler.get_monitor_socket(zmq.EVENT_CLOSED | zmq.EVENT_CONNECT_RETRIED) as monitor:
            dialler.connect(f"tcp://127.0.0.1:{full_port}")
            async with asyncio.timeout(LIMIT_S):
                events = [(await recv_monitor_message(monitor))["event"] for _ in range(2)]
            dialler.disable_monitor()
    assert events == [zmq.EVENT_CLOSED, zmq.EVENT_CONNECT_RETRIED]


async def test_a_connection_whose_other_end_takes_nothing_is_ended() -> None:
    channels = [
        ZmqChannel(
            "127.0.0.1", KERNEL_BYTES, None, SystemClock(), max_queued_bytes=KERNEL_BYTES, dead_s=TIMEOUT_S
        )
        for _ in range(2)
    ]
    producer, consumer = channels
    try:
        async with proxy_to(int(producer.address.rpartition(":")[2])) as line:
            consumer.send(f"tcp://127.0.0.1:{line.port}", b"hello")
            [arrival] = await asyncio.to_thread(lambda: list(producer.wait(LIMIT_S)))
            line.passes.clear()
            payload = np.zeros(KERNEL_BYTES, np.uint8)
            assert producer.send(arrival.peer, b"pieces", [payload])
            async with asyncio.timeout(LIMIT_S):
                while not producer.num_disconnections:
                    await asyncio.to_thread(lambda: list(producer.wait(TIMEOUT_S)))
    finally:
        for channel in channels:
            channel.close()


async def test_connections_of_the_kv_plane_are_probed() -> None:
    producer, consumer = (
        ZmqChannel("127.0.0.1", 64, KEYS.kv, SystemClock(), max_queued_bytes=64, dead_s=LIMIT_S)
        for _ in range(2)
    )
    try:
        consumer.send(producer.address, b"header")
        await until_probed(int(producer.address.rpartition(":")[2]))
    finally:
        consumer.close()
        producer.close()


async def test_connections_of_the_request_plane_are_probed(folder: Path) -> None:
    async with gateway_with(folder, {}, {"d0": answering([5])}) as under_test:
        [client] = under_test.gateway.workers.clients
        await until_probed(int(client.endpoint.request_address.rpartition(":")[2]))


async def test_connections_of_the_control_plane_are_probed() -> None:
    config = fleet_config()
    async with control_server(config, None) as server, client_of(server, config):
        await until_probed(port_of(server))
