"""A worker's end of the request plane over real ZeroMQ: who may talk, what comes back, and who counts as lost."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import msgpack
import pytest

from baton.clock import SystemClock
from baton.config import NetworkConfig
from baton.messages.request_plane import (
    REQUEST_PLANE_VERSION,
    AbortRequests,
    Heartbeat,
    Hello,
    KVEvents,
    Outputs,
    SubmitRequest,
    SubscribeKVEvents,
)
from baton.messages.wire import MAX_MESSAGE_BYTES
from baton.request import ErrorKind, FinishReason, RequestOutput
from baton.worker import WorkerState, WorkerStatus
from tests.factories.request_plane import (
    HELLO,
    NETWORK,
    REQUEST,
    STATUS,
    GatewaySocket,
    RecordingEngine,
    gateway_of,
    running_server,
)
from worker.kv_events import MAX_HASHES_PER_MESSAGE, KVChange
from worker.request_plane import RequestServer


@pytest.fixture
def engine() -> RecordingEngine:
    return RecordingEngine()


@pytest.fixture
def server(engine: RecordingEngine) -> Iterator[RequestServer]:
    with running_server(engine) as server:
        yield server


@pytest.fixture
def gateway(server: RequestServer) -> Iterator[GatewaySocket]:
    with gateway_of(server) as gateway:
        yield gateway


def test_a_hello_is_answered_and_heartbeats_follow(gateway: GatewaySocket) -> None:
    gateway.send(HELLO)
    assert [gateway.receive(), gateway.receive()] == [Heartbeat(STATUS, 1, 0)] * 2


def test_requests_and_aborts_reach_the_engine_with_their_client(
    gateway: GatewaySocket, engine: RecordingEngine
) -> None:
    gateway.send(HELLO)
    gateway.send(SubmitRequest(REQUEST, 1))
    gateway.send(AbortRequests(("r",), 1))
    assert engine.received.get(timeout=60) == ("submit", gateway.client_id, REQUEST)
    assert engine.received.get(timeout=60) == ("abort", gateway.client_id, ("r",))


def test_outputs_go_to_the_gateway_that_asked(server: RequestServer, gateway: GatewaySocket) -> None:
    gateway.send(HELLO)
    gateway.receive()
    output = RequestOutput(request_id="r", first_position=0, token_ids=(7,))
    server.send(gateway.client_id, [output])
    assert gateway.receive_outputs() == Outputs((output,))


def test_c44_a_hello_meant_for_another_incarnation_opens_nothing(
    server: RequestServer, gateway: GatewaySocket, engine: RecordingEngine
) -> None:
    gateway.send(Hello("incarnation-0", "g", 1, None, 0))
    assert gateway.receive() == Heartbeat(STATUS, None, 0)  # names the incarnation that serves now
    gateway.send(SubmitRequest(REQUEST, None))
    gateway.send(HELLO)
    gateway.send(AbortRequests(("r",), 1))
    assert engine.received.get(timeout=60) == ("abort", gateway.client_id, ("r",))
    assert server.num_bad_messages == 1


def test_garbage_is_counted_and_the_next_message_is_served(
    server: RequestServer, gateway: GatewaySocket, engine: RecordingEngine
) -> None:
    gateway.send(HELLO)
    gateway.socket.send(b"\xc1 not msgpack")
    gateway.socket.send_multipart([b"two", b"frames"])
    gateway.send(SubmitRequest(REQUEST, 1))
    assert engine.received.get(timeout=60) == ("submit", gateway.client_id, REQUEST)
    assert server.num_bad_messages == 2


def test_c42_a_silent_gateway_is_gone_and_its_requests_end(
    gateway: GatewaySocket, engine: RecordingEngine
) -> None:
    gateway.send(HELLO)
    assert engine.received.get(timeout=60) == ("abort_client", gateway.client_id)


def test_c42_a_gateway_that_never_stops_sending_delays_no_heartbeats() -> None:
    """Each time that the worker reads a message, the gateway sends another one."""
    message, is_over, sending = AbortRequests(("r",), 1), threading.Event(), threading.Lock()

    def send() -> None:
        with sending:  # a socket of ZeroMQ is for one thread at a time
            if not is_over.is_set():
                busy.send(message)

    class BusyEngine(RecordingEngine):
        def abort(self, client_id: str, request_ids: tuple[str, ...]) -> None:
            send()

    with (
        running_server(BusyEngine()) as server,
        gateway_of(server, b"\x01busy") as busy,
        gateway_of(server) as gateway,
    ):
        busy.send(HELLO)
        busy.receive()
        for _ in range(500):
            send()
        gateway.send(replace(HELLO, gateway="other"))
        try:
            assert [gateway.receive() for _ in range(4)] == [Heartbeat(STATUS, 2, 0)] * 4
        finally:
            with sending:
                is_over.set()


class LeapingClock(SystemClock):
    """A clock that leaps, as it does for a process that stood still."""

    def __init__(self) -> None:
        self.leapt_s = 0.0

    def now(self) -> float:
        return super().now() + self.leapt_s


def test_c42_a_gateway_is_not_silent_while_the_worker_stands_still(engine: RecordingEngine) -> None:
    clock = LeapingClock()
    with running_server(engine, clock=clock) as server, gateway_of(server) as gateway:
        gateway.send(HELLO)
        assert gateway.receive() == Heartbeat(STATUS, 1, 0)
        clock.leapt_s += 100 * NETWORK.peer_timeout_s
        for _ in range(4):
            assert gateway.receive() == Heartbeat(STATUS, 1, 0)
        assert engine.received.empty(), "that was not its silence"
        assert engine.received.get(timeout=60) == ("abort_client", gateway.client_id), "but this is"


def test_a_vanished_gateway_is_noticed_at_the_next_send(
    server: RequestServer, engine: RecordingEngine
) -> None:
    with gateway_of(server) as gateway:
        gateway.send(HELLO)
        gateway.receive()
    assert engine.received.get(timeout=60) == ("abort_client", gateway.client_id)


def test_c42_a_gateway_whose_order_was_lost_starts_anew(
    gateway: GatewaySocket, engine: RecordingEngine
) -> None:
    gateway.send(HELLO)
    gateway.send(SubmitRequest(REQUEST, 1))
    gateway.send(Hello("incarnation-1", "g", 1, 1, 2))  # the second command is the one that did not come
    gateway.send(AbortRequests(("r",), 1))  # sent before the gateway could know of the loss
    gateway.send(SubmitRequest(REQUEST, 2))
    received = [engine.received.get(timeout=60) for _ in range(3)]
    assert received == [
        ("submit", gateway.client_id, REQUEST),
        ("abort_client", gateway.client_id),
        ("submit", gateway.client_id, REQUEST),
    ]
    assert [gateway.receive() for _ in range(2)] == [Heartbeat(STATUS, 1, 0), Heartbeat(STATUS, 2, 0)]


def test_c51_a_gateways_new_connection_ends_what_it_did_over_the_former_one(
    server: RequestServer, gateway: GatewaySocket, engine: RecordingEngine
) -> None:
    """The former connection is still open here, since the worker has not yet seen its end."""
    gateway.send(HELLO)
    gateway.send(SubmitRequest(REQUEST, 1))
    assert engine.received.get(timeout=60) == ("submit", gateway.client_id, REQUEST)
    with gateway_of(server, b"\x01latest") as latest:
        latest.send(Hello("incarnation-1", "g", 2, None, 0))
        assert latest.receive() == Heartbeat(STATUS, 2, 0)
        gateway.send(Hello("incarnation-1", "g", 1, 1, 1))  # it was on its way
        latest.send(SubmitRequest(REQUEST, 2))
        received = [engine.received.get(timeout=60) for _ in range(2)]
        assert received == [("abort_client", gateway.client_id), ("submit", latest.client_id, REQUEST)]


def test_heartbeats_count_the_outputs_before_them(server: RequestServer, gateway: GatewaySocket) -> None:
    gateway.send(HELLO)
    gateway.receive()
    server.send(gateway.client_id, [RequestOutput(request_id="r", first_position=0, token_ids=(7,))])
    gateway.receive_outputs()
    assert gateway.receive() == Heartbeat(STATUS, 1, 1)


@pytest.mark.parametrize("is_asked", [True, False])
def test_the_end_of_an_engine_is_told_after_its_last_outputs(engine: RecordingEngine, is_asked: bool) -> None:
    """This holds even if the engine ends while the plane is about to send a heartbeat. The last outputs end a
    suspect's turn, too."""
    suspect = replace(REQUEST, is_suspect=True)
    output = RequestOutput(suspect.request_id, first_position=0, finish_reason=FinishReason.STOP)

    def end() -> WorkerStatus:
        plane.send(b"\x01gateway".hex(), [output])
        return replace(STATUS, state=WorkerState.DEAD)

    current: list[Callable[[], WorkerStatus]] = [lambda: STATUS]
    network = NetworkConfig(heartbeat_interval_s=20.0, peer_timeout_s=60.0)
    with (
        running_server(engine, network, lambda: current[0]()) as plane,
        gateway_of(plane) as gateway,
    ):
        gateway.send(HELLO)
        assert gateway.receive() == Heartbeat(STATUS, 1, 0)
        gateway.send(SubmitRequest(suspect, 1))
        assert isinstance(begun := gateway.receive(), Heartbeat)
        assert begun.status.suspects == (suspect.request_id,)
        current[0] = end
        if is_asked:
            gateway.send(HELLO)
        else:
            plane.beat()
        assert gateway.receive() == Outputs((output,))
        assert isinstance(last := gateway.receive(), Heartbeat)
        assert (last.status.state, last.status.suspects) == (WorkerState.DEAD, ())


def test_outputs_that_are_too_large_for_one_message_come_in_several(engine: RecordingEngine) -> None:
    patient = NetworkConfig(heartbeat_interval_s=0.05, peer_timeout_s=30.0)
    outputs = [
        RequestOutput(request_id=f"r{number}", first_position=0, error="x" * (MAX_MESSAGE_BYTES // 2 - 99))
        for number in range(3)
    ]
    with running_server(engine, patient) as server, gateway_of(server) as gateway:
        gateway.send(HELLO)
        gateway.receive()
        server.send(gateway.client_id, outputs)
        received = [gateway.receive_outputs() for _ in range(2)]
        assert [len(message.outputs) for message in received] == [1, 2]
        assert [output for message in received for output in message.outputs] == outputs
        assert gateway.receive() == Heartbeat(STATUS, 1, 2), "both were counted"


def test_an_output_that_no_message_can_hold_ends_its_request_and_nothing_else(
    server: RequestServer, gateway: GatewaySocket, engine: RecordingEngine
) -> None:
    gateway.send(HELLO)
    gateway.receive()
    monster = RequestOutput(request_id="r", first_position=3, error="x" * MAX_MESSAGE_BYTES)
    server.send(gateway.client_id, [monster])
    (last,) = gateway.receive_outputs().outputs
    assert (last.request_id, last.finish_reason, last.error_kind) == (
        "r",
        FinishReason.ERROR,
        ErrorKind.INTERNAL,
    )
    assert "exceeds the limit" in (last.error or "")
    assert engine.received.get(timeout=60) == ("abort", gateway.client_id, ("r",))
    server.send(gateway.client_id, [RequestOutput(request_id="s", first_position=0, token_ids=(7,))])
    assert gateway.receive_outputs().outputs[0].request_id == "s"


def test_a_plane_that_fails_ends_the_worker_and_says_so(engine: RecordingEngine) -> None:
    is_broken = threading.Event()

    def status() -> WorkerStatus:
        if is_broken.is_set():
            is_broken.clear()
            raise RuntimeError("no status")
        return STATUS

    with running_server(engine, status=status) as server, gateway_of(server) as gateway:
        gateway.send(HELLO)
        gateway.receive()
        is_broken.set()
        server.beat()
        kind, error = engine.received.get(timeout=60)
        assert (kind, str(error)) == ("fail", "no status")
        while (beat := gateway.receive()) == Heartbeat(STATUS, 1, 0):
            continue
        assert isinstance(beat, Heartbeat)
        assert (beat.status.state, beat.status.failure) == (
            WorkerState.DEAD,
            "its request plane failed: no status",
        )


def test_a_change_is_told_before_the_next_heartbeat_is_due(engine: RecordingEngine) -> None:
    slow = NetworkConfig(heartbeat_interval_s=60.0, peer_timeout_s=120.0)
    with running_server(engine, slow) as server, gateway_of(server) as gateway:
        gateway.send(HELLO)
        gateway.receive()
        server.beat()
        assert gateway.receive() == Heartbeat(STATUS, 1, 0)
        server.stop()
        assert gateway.receive() == Heartbeat(STATUS, 1, 0), "its last word"


def test_a_gateway_of_another_version_is_answered_and_gets_no_session(
    server: RequestServer, gateway: GatewaySocket, engine: RecordingEngine, caplog: pytest.LogCaptureFixture
) -> None:
    gateway.socket.send(msgpack.packb(["Hello", 99, "what", "ever"]))
    assert gateway.receive() == Heartbeat(STATUS, None, 0)
    assert f"it uses version 99 of the request plane, this worker {REQUEST_PLANE_VERSION}" in caplog.text
    assert (server.num_foreign_hellos, server.num_bad_messages) == (1, 0)
    gateway.send(SubmitRequest(REQUEST, None))
    gateway.send(HELLO)
    gateway.receive()
    assert engine.received.empty()


def test_changes_of_the_prefix_cache_are_numbered_for_each_gateway(
    server: RequestServer, gateway: GatewaySocket, engine: RecordingEngine
) -> None:
    def change(*names: bytes, is_anew: bool = False) -> KVChange:
        return KVChange(is_anew, b"", b"".join(names))

    def next_events() -> KVEvents:
        while not isinstance(message := gateway.receive(), KVEvents):
            continue
        return message

    gateway.send(HELLO)
    gateway.send(SubscribeKVEvents(1))
    us = (gateway.client_id,)
    assert engine.received.get(timeout=60) == ("subscribe", *us)
    server.send_kv_change(us, change(b"too soon"))  # meant for a session before this one
    server.send_kv_change(us, change(b"12345678", is_anew=True))
    server.send_kv_change((*us, b"\x07nobody".hex()), change(b"abcdefgh"))
    assert next_events() == KVEvents(0, True, b"", b"12345678")
    assert next_events() == KVEvents(1, False, b"", b"abcdefgh")
    server.send_kv_change(us, KVChange(True, b"", bytes(8 * (MAX_HASHES_PER_MESSAGE + 1))))
    assert [(next_events().number, len(next_events().stored)) for _ in range(1)] == [(0, 8)]
    server.send_kv_change(us, change(b"ijklmnop"))
    assert next_events() == KVEvents(2, False, b"", b"ijklmnop")
    gateway.send(Hello("incarnation-1", "g", 1, 1, 1))
    gateway.send(Hello("incarnation-1", "g", 1, 1, 7))  # some were lost: another session
    assert engine.received.get(timeout=60) == ("abort_client", *us)
    server.send_kv_change(us, change(b"stale..."))
    server.send_kv_change(us, change(b"newnewne", is_anew=True))
    assert next_events() == KVEvents(0, True, b"", b"newnewne")
