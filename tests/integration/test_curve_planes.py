"""Strangers on both planes, over real sockets: they get nothing through, are counted, and do not fill the log.

The same holds for peers that know the secret, but have another protocol version.
"""

import asyncio
import logging
import queue
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

import numpy as np
import pytest
import zmq

from baton.clock import SystemClock
from baton.config import KVTransferConfig, NetworkConfig
from baton.errors import WorkerUnavailable
from baton.kv import PROTOCOL_VERSION, KVFingerprint
from baton.messages.request_plane import TO_GATEWAY, TO_WORKER, Heartbeat, Hello, KVEvents
from baton.request import RequestOutput
from baton.system import curve
from baton.system.curve import PeerAuthenticator, PlaneKeys, secure_client
from baton.worker import (
    WorkerEndpoint,
    WorkerRole,
    WorkerStatus,
)
from gateway.workers.connections import WorkerConnections
from gateway.workers.worker_listener import LossCause
from kv_transfer.connector.worker import KVConnectorWorker
from kv_transfer.protocol.messages import MAX_HEADER_BYTES, TO_CONSUMER, Unreadable, seal
from tests.factories.request_plane import STATUS
from tests.factories.security import KEYS, OTHER_KEYS
from worker.request_plane import RequestServer

NETWORK = NetworkConfig(heartbeat_interval_s=0.05, peer_timeout_s=60.0)  # no peer counts as silent
TIMEOUT_S = 10.0
TIMEOUT_MS = 10_000

Keys = PlaneKeys | None


def mixed(server: Keys, client: Keys) -> PlaneKeys:
    assert server is not None
    assert client is not None
    return PlaneKeys(server.server_public, server.server_secret, client.client_public, client.client_secret)


REQUEST_STRANGERS = {
    "no secret": None,
    "another secret": OTHER_KEYS.request,
    "the servers' key of another plane": KEYS.kv,
    "the right server key, a client key of its own": mixed(KEYS.request, OTHER_KEYS.request),
    "the right server key, the other plane's client key": mixed(KEYS.request, KEYS.kv),
}
KV_STRANGERS = {
    "no secret": None,
    "another secret": OTHER_KEYS.kv,
    "the servers' key of another plane": KEYS.request,
    "the right server key, a client key of its own": mixed(KEYS.kv, OTHER_KEYS.kv),
    "the right server key, the other plane's client key": mixed(KEYS.kv, KEYS.request),
}


class NoSink:
    """Nothing may reach it."""

    def __init__(self) -> None:
        self.received: queue.Queue[object] = queue.Queue()

    def submit(self, client_id: str, request: object) -> None:
        self.received.put(request)

    def decline(self, request: object) -> None:
        self.received.put(request)

    def abort(self, client_id: str, request_ids: tuple[str, ...]) -> None:
        self.received.put(request_ids)

    def abort_client(self, client_id: str) -> None:
        self.received.put(client_id)

    def subscribe_kv_events(self, client_id: str) -> None:
        self.received.put(client_id)

    def fail(self, error: BaseException) -> None:
        self.received.put(error)


@contextmanager
def request_server(keys: Keys) -> Iterator[RequestServer]:
    server = RequestServer(NETWORK, keys, "incarnation-1", lambda: STATUS, SystemClock())
    server.start(NoSink())
    try:
        yield server
    finally:
        server.stop()


@contextmanager
def kv_worker(keys: Keys) -> Iterator[KVConnectorWorker]:
    fingerprint = KVFingerprint(2, "model", "float32", "LKHTD", 2, 2, 8, 16, 1)
    pool = np.zeros((4, 4096), np.uint8)
    worker = KVConnectorWorker(
        KVTransferConfig(), "127.0.0.1", keys, "incarnation-1", SystemClock(), pool, fingerprint, lambda: None
    )
    worker.start()
    try:
        yield worker
    finally:
        worker.shutdown()


@contextmanager
def dealer(address: str, keys: Keys, retry_ms: int = 100) -> Iterator["zmq.Socket[bytes]"]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as client:
        client.setsockopt(zmq.LINGER, 0)
        client.setsockopt(zmq.RECONNECT_IVL, retry_ms)
        secure_client(client, keys)
        client.connect(address)
        yield client


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.01)


@pytest.mark.parametrize("keys", REQUEST_STRANGERS.values(), ids=REQUEST_STRANGERS)
def test_a_stranger_on_the_request_plane_is_ignored_and_counted(keys: Keys) -> None:
    with request_server(KEYS.request) as server, dealer(server.address, keys) as stranger:
        stranger.send(TO_WORKER.encode(Hello("incarnation-1", "g", 1, None, 0)))
        until(lambda: server.num_denied > 0)
        with dealer(server.address, KEYS.request) as gateway:
            gateway.send(TO_WORKER.encode(Hello("incarnation-1", "g", 1, None, 0)))
            assert gateway.poll(TIMEOUT_MS)
            assert TO_GATEWAY.decode(gateway.recv()) == Heartbeat(STATUS, 1, 0)
        assert not stranger.poll(150)


@pytest.mark.parametrize("keys", KV_STRANGERS.values(), ids=KV_STRANGERS)
def test_a_stranger_on_the_kv_plane_is_ignored_and_counted(keys: Keys) -> None:
    with kv_worker(KEYS.kv) as worker, dealer(worker.kv_address, keys) as stranger:
        stranger.send(b"not a message of ours")
        until(lambda: worker.counters()["kv_denied_peers"] > 0)
        assert worker.counters()["kv_bad_messages"] == 0
        with dealer(worker.kv_address, KEYS.kv) as peer:
            peer.send(b"not a message of ours")
            until(lambda: worker.counters()["kv_bad_messages"] == 1)
        assert not stranger.poll(100)
        assert worker.counters()["kv_bad_messages"] == 1


def test_without_security_anybody_talks_on_either_plane() -> None:
    with request_server(None) as server, dealer(server.address, None) as gateway:
        gateway.send(TO_WORKER.encode(Hello("incarnation-1", "g", 1, None, 0)))
        assert gateway.poll(TIMEOUT_MS)
        assert server.num_denied == 0
    with kv_worker(None) as worker, dealer(worker.kv_address, None) as peer:
        peer.send(b"not a message of ours")
        until(lambda: worker.counters()["kv_bad_messages"] == 1)
        assert worker.counters()["kv_denied_peers"] == 0


def test_who_tries_for_ever_does_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "baton.system.curve")
    with (
        request_server(KEYS.request) as server,
        dealer(server.address, OTHER_KEYS.request, retry_ms=1) as stranger,
    ):
        stranger.send(b"let me in")
        until(lambda: server.num_denied >= 40)
    lines = [record.getMessage() for record in caplog.records]
    assert [int(line.split()[4]) for line in lines[:6]] == [1, 2, 4, 8, 16, 32]
    assert len(lines) <= server.num_denied.bit_length()
    assert lines[0].startswith("the request plane denied 1 connection(s)")
    assert "secret" in lines[0]


@pytest.mark.parametrize("keys", [KEYS.kv, None], ids=["curve", "none"])
def test_a_frame_of_just_the_size_limit_passes_both_ways(keys: Keys) -> None:
    """Encryption makes frames longer, and libzmq ends a connection on one that is too long."""
    limit = 1000
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router, zmq.Context() as theirs:
        router.setsockopt(zmq.MAXMSGSIZE, limit)
        authenticator = PeerAuthenticator("a plane", router, keys)
        port = router.bind_to_random_port("tcp://127.0.0.1")
        poller = zmq.Poller()
        poller.register(router, zmq.POLLIN)
        authenticator.register(poller)

        def received() -> list[bytes] | None:
            for _ in range(20):
                ready = dict(poller.poll(100))
                authenticator.attend(ready)
                if router in ready:
                    return router.recv_multipart()
            return None

        with closing(authenticator), theirs.socket(zmq.DEALER) as client:
            client.setsockopt(zmq.LINGER, 0)
            client.setsockopt(zmq.MAXMSGSIZE, limit)
            secure_client(client, keys)
            client.connect(f"tcp://127.0.0.1:{port}")
            client.send(b"x" * limit)
            frames = received()
            assert frames is not None
            assert frames[1] == b"x" * limit
            router.send_multipart([frames[0], b"y" * limit])
            assert client.poll(TIMEOUT_MS)
            assert client.recv() == b"y" * limit
            client.send(b"x" * (limit + 1))
            assert received() is None


def endpoint_at(address: str) -> WorkerEndpoint:
    return WorkerEndpoint(STATUS.ref, WorkerRole.PREFILL, address, "here", 1)


class Losses:
    """A listener that records why workers were lost, and the heartbeats that arrived."""

    def __init__(self) -> None:
        self.reasons: list[str] = []
        self.names: set[str] = set()

    def on_status(self, status: WorkerStatus) -> None:
        self.names.add(status.ref.name)

    def on_outputs(self, worker: str, outputs: tuple[RequestOutput, ...]) -> None:
        raise AssertionError("nobody asked for anything")

    def on_kv_events(self, worker: str, events: KVEvents) -> None:
        raise AssertionError("nobody asked for any")

    def on_worker_lost(self, worker: str, cause: LossCause, reason: str) -> None:
        assert worker == "p0"
        self.reasons.append(reason)


async def join(gateway_keys: Keys, address: str, meanwhile: Callable[[], None] = lambda: None) -> list[str]:
    """Adds the worker at this address to a fleet and waits for it. Returns the reasons of all losses until then."""
    losses = Losses()
    fleet = WorkerConnections(NETWORK, gateway_keys, losses)
    try:
        fleet.add_worker(endpoint_at(address))
        waiting = asyncio.create_task(fleet.wait_for_worker("p0"))
        await asyncio.to_thread(meanwhile)
        await asyncio.wait_for(waiting, TIMEOUT_S)
        assert losses.names == {"p0"}
    finally:
        await fleet.stop()
    return losses.reasons


@pytest.mark.parametrize("keys", REQUEST_STRANGERS.values(), ids=REQUEST_STRANGERS)
def test_a_gateway_that_its_worker_refuses_says_so_at_once(keys: Keys) -> None:
    with request_server(KEYS.request) as server:
        with pytest.raises(WorkerUnavailable, match=r"p0 at tcp://127.*refused.*secret") as caught:
            asyncio.run(join(keys, server.address))
        assert server.address in str(caught.value)


def test_a_gateway_with_a_secret_does_not_talk_to_a_worker_without() -> None:
    with request_server(None) as server, pytest.raises(WorkerUnavailable, match="secret"):
        asyncio.run(join(KEYS.request, server.address))


def test_a_gateway_with_the_workers_secret_hears_it() -> None:
    with request_server(KEYS.request) as server:
        assert asyncio.run(join(KEYS.request, server.address)) == []


def test_a_handshake_that_breaks_once_is_no_refusal() -> None:
    """A worker may die in the middle of the handshake, and another incarnation may take its port."""
    server = RequestServer(NETWORK, KEYS.request, "incarnation-1", lambda: STATUS, SystemClock())
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"tcp://127.0.0.1:{listener.getsockname()[1]}"

        def break_once() -> None:
            connection, _ = listener.accept()
            connection.recv(1)
            connection.close()
            listener.close()
            server._socket.bind(address)
            server.start(NoSink())

        assert asyncio.run(join(KEYS.request, address, break_once)) == []
        server.stop()


@pytest.mark.parametrize("keys", [None, KEYS.kv], ids=["in the clear", "curve"])
def test_a_frame_larger_than_any_of_ours_ends_its_connection_and_is_counted(keys: PlaneKeys | None) -> None:
    with kv_worker(keys) as worker, dealer(worker.kv_address, keys) as peer:
        peer.send(b"x" * 2 * MAX_HEADER_BYTES)
        until(lambda: worker.counters()["kv_disconnections"] == 1)
        assert worker.counters()["kv_bad_messages"] == 0
        assert not peer.poll(100), "the worker does not know the identity that it would answer"
        peer.send(b"not a message of ours")  # on a new connection
        until(lambda: worker.counters()["kv_bad_messages"] == 1)
        assert peer.poll(TIMEOUT_MS)
        assert worker.counters()["kv_denied_peers"] == 0


def test_c43_a_peer_of_another_version_gets_both_versions_in_the_answer() -> None:
    with kv_worker(KEYS.kv) as worker, dealer(worker.kv_address, KEYS.kv) as peer:
        peer.send(seal(b"whatever this means in version 9", 9))
        assert peer.poll(TIMEOUT_MS)
        answer = TO_CONSUMER.decode(peer.recv())
        assert isinstance(answer, Unreadable)
        assert not answer.is_damaged
        assert answer.reason.startswith(f"version 9 of the KV plane, ours is {PROTOCOL_VERSION};")
        assert worker.counters()["kv_version_mismatches"] == 1


@pytest.mark.parametrize("keys", [KEYS.request, None])
def test_strangers_that_say_nothing_hold_no_connection(keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    assert curve.HANDSHAKE_TIMEOUT_S == 10.0
    monkeypatch.setattr(curve, "HANDSHAKE_TIMEOUT_S", 0.2)
    with request_server(keys) as server:
        host, _, port = server.address.removeprefix("tcp://").rpartition(":")
        for _ in range(3):
            with socket.create_connection((host, int(port)), timeout=20.0) as stranger:
                while stranger.recv(1000):  # sends a greeting, and then closes the connection
                    pass
