"""A worker's end of the request plane over real ZeroMQ: who may talk, what comes back, and who counts as gone."""

import queue
from collections.abc import Iterator

import pytest
import zmq

from baton.clock import SystemClock
from baton.config import NetworkConfig
from baton.curve import secure_client
from baton.kv import WorkerRef
from baton.messages import (
    TO_GATEWAY,
    TO_WORKER,
    AbortRequests,
    Heartbeat,
    Hello,
    Outputs,
    SubmitRequest,
    ToGateway,
    ToWorker,
)
from baton.request import EngineRequest, RequestOutput
from baton.sampling import SamplingParams
from baton.worker import KVBlockCounts, RequestCounts, WorkerRole, WorkerState, WorkerStatus
from engine.request_plane import RequestServer
from tests.factories.security import KEYS

NETWORK = NetworkConfig(heartbeat_interval_s=0.05, peer_timeout_s=0.4)
STATUS = WorkerStatus(
    WorkerRef("p0", "life-1", ("tcp://127.0.0.1:1",), 16),
    WorkerRole.PREFILL,
    WorkerState.READY,
    KVBlockCounts(9, 9, 0, 0),
    RequestCounts(0, 0, 0),
    {},
)
REQUEST = EngineRequest(request_id="r", prompt_token_ids=(1, 2), sampling_params=SamplingParams())


class RecordingSink:
    """Keeps what the server was told, for a test to wait on."""

    def __init__(self) -> None:
        self.heard: queue.Queue[tuple[object, ...]] = queue.Queue()

    def submit(self, client_id: str, request: EngineRequest) -> None:
        self.heard.put(("submit", client_id, request))

    def abort(self, client_id: str, request_ids: tuple[str, ...]) -> None:
        self.heard.put(("abort", client_id, request_ids))

    def abort_client(self, client_id: str) -> None:
        self.heard.put(("abort_client", client_id))


class GatewaySocket:
    """A gateway's DEALER, driven by hand."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str, identity: bytes) -> None:
        self.client_id = identity.hex()
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.IDENTITY, identity)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVTIMEO, 10_000)
        secure_client(self.socket, KEYS.request)
        self.socket.connect(address)

    def send(self, message: ToWorker) -> None:
        self.socket.send(TO_WORKER.encode(message))

    def receive(self) -> ToGateway:
        return TO_GATEWAY.decode(self.socket.recv())

    def receive_outputs(self) -> Outputs:
        while True:
            message = self.receive()
            if isinstance(message, Outputs):
                return message


@pytest.fixture
def sink() -> RecordingSink:
    return RecordingSink()


@pytest.fixture
def server(sink: RecordingSink) -> Iterator[RequestServer]:
    server = RequestServer(NETWORK, KEYS.request, "life-1", lambda: STATUS, SystemClock())
    server.start(sink)
    yield server
    server.stop()


@pytest.fixture
def gateway(server: RequestServer) -> Iterator[GatewaySocket]:
    with zmq.Context() as context:
        gateway = GatewaySocket(context, server.address, b"\x01gateway")
        yield gateway
        gateway.socket.close()


def test_a_hello_is_answered_and_heartbeats_follow(gateway: GatewaySocket) -> None:
    gateway.send(Hello("life-1", None, 0))
    assert [gateway.receive(), gateway.receive()] == [Heartbeat(STATUS, 1, 0)] * 2


def test_requests_and_aborts_reach_the_engine_with_their_client(
    gateway: GatewaySocket, sink: RecordingSink
) -> None:
    gateway.send(Hello("life-1", None, 0))
    gateway.send(SubmitRequest(REQUEST, 1))
    gateway.send(AbortRequests(("r",), 1))
    assert sink.heard.get(timeout=10) == ("submit", gateway.client_id, REQUEST)
    assert sink.heard.get(timeout=10) == ("abort", gateway.client_id, ("r",))


def test_outputs_go_to_the_gateway_that_asked(server: RequestServer, gateway: GatewaySocket) -> None:
    gateway.send(Hello("life-1", None, 0))
    gateway.receive()
    output = RequestOutput(request_id="r", first_position=0, token_ids=(7,))
    server.send(gateway.client_id, [output])
    assert gateway.receive_outputs() == Outputs((output,))


def test_c44_a_hello_meant_for_another_life_opens_nothing(
    server: RequestServer, gateway: GatewaySocket, sink: RecordingSink
) -> None:
    gateway.send(Hello("life-0", None, 0))
    assert gateway.receive() == Heartbeat(STATUS, None, 0)  # from which the gateway learns who is there now
    gateway.send(SubmitRequest(REQUEST, None))
    gateway.send(Hello("life-1", None, 0))
    gateway.send(AbortRequests(("r",), 1))
    assert sink.heard.get(timeout=10) == ("abort", gateway.client_id, ("r",))
    assert server.num_bad_messages == 1


def test_garbage_is_counted_and_the_next_message_is_served(
    server: RequestServer, gateway: GatewaySocket, sink: RecordingSink
) -> None:
    gateway.send(Hello("life-1", None, 0))
    gateway.socket.send(b"\xc1 not msgpack")
    gateway.socket.send_multipart([b"two", b"frames"])
    gateway.send(SubmitRequest(REQUEST, 1))
    assert sink.heard.get(timeout=10) == ("submit", gateway.client_id, REQUEST)
    assert server.num_bad_messages == 2


def test_c42_a_silent_gateway_is_gone_and_its_requests_end(
    gateway: GatewaySocket, sink: RecordingSink
) -> None:
    gateway.send(Hello("life-1", None, 0))
    assert sink.heard.get(timeout=10) == ("abort_client", gateway.client_id)


def test_a_vanished_gateway_is_noticed_at_the_next_send(server: RequestServer, sink: RecordingSink) -> None:
    with zmq.Context() as context:
        gateway = GatewaySocket(context, server.address, b"\x02gone")
        gateway.send(Hello("life-1", None, 0))
        gateway.receive()
        gateway.socket.close()
    assert sink.heard.get(timeout=10) == ("abort_client", gateway.client_id)


def test_c42_a_gateway_whose_order_was_lost_starts_anew(gateway: GatewaySocket, sink: RecordingSink) -> None:
    gateway.send(Hello("life-1", None, 0))
    gateway.send(SubmitRequest(REQUEST, 1))
    gateway.send(Hello("life-1", 1, 2))  # the second order is the one that did not come
    gateway.send(AbortRequests(("r",), 1))  # said before the gateway could know
    gateway.send(SubmitRequest(REQUEST, 2))
    heard = [sink.heard.get(timeout=10) for _ in range(3)]
    assert heard == [
        ("submit", gateway.client_id, REQUEST),
        ("abort_client", gateway.client_id),
        ("submit", gateway.client_id, REQUEST),
    ]
    assert [gateway.receive() for _ in range(2)] == [Heartbeat(STATUS, 1, 0), Heartbeat(STATUS, 2, 0)]


def test_heartbeats_count_the_outputs_before_them(server: RequestServer, gateway: GatewaySocket) -> None:
    gateway.send(Hello("life-1", None, 0))
    gateway.receive()
    server.send(gateway.client_id, [RequestOutput(request_id="r", first_position=0, token_ids=(7,))])
    gateway.receive_outputs()
    assert gateway.receive() == Heartbeat(STATUS, 1, 1)
