"""The two ends of a worker's request plane, each driven by hand: a gateway's socket, and a stand-in for the engine."""

import queue
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import zmq

from baton.clock import Clock, SystemClock
from baton.config import NetworkConfig
from baton.kv import WorkerRef
from baton.messages.request_plane import TO_GATEWAY, TO_WORKER, Heartbeat, Hello, Outputs, ToGateway, ToWorker
from baton.request import EngineRequest
from baton.sampling import SamplingParams
from baton.system.curve import secure_client
from baton.worker import KVBlockCounts, RequestCounts, WorkerRole, WorkerState, WorkerStatus
from tests.factories.security import KEYS
from worker.request_plane import RequestServer

NETWORK = NetworkConfig(heartbeat_interval_s=0.05, peer_timeout_s=2.0)
STATUS = WorkerStatus(
    WorkerRef("p0", "incarnation-1", ("tcp://127.0.0.1:1",), 16),
    WorkerRole.PREFILL,
    WorkerState.READY,
    KVBlockCounts(9, 9, 0, 0),
    RequestCounts(0, 0, 0),
    {},
)
HELLO = Hello("incarnation-1", "g", 1, None, 0)
REQUEST = EngineRequest(request_id="r", prompt_token_ids=(1, 2), sampling_params=SamplingParams())


class RecordingEngine:
    """Keeps the calls it received, for a test to wait on."""

    def __init__(self) -> None:
        self.received: queue.Queue[tuple[object, ...]] = queue.Queue()

    def submit(self, client_id: str, request: EngineRequest) -> None:
        self.received.put(("submit", client_id, request))

    def decline(self, request: EngineRequest) -> None:
        self.received.put(("decline", "", request))

    def abort(self, client_id: str, request_ids: tuple[str, ...]) -> None:
        self.received.put(("abort", client_id, request_ids))

    def abort_client(self, client_id: str) -> None:
        self.received.put(("abort_client", client_id))

    def subscribe_kv_events(self, client_id: str) -> None:
        self.received.put(("subscribe", client_id))

    def fail(self, error: BaseException) -> None:
        self.received.put(("fail", error))


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

    def wait_for_suspects(self, *names: str) -> None:
        while not (isinstance(message := self.receive(), Heartbeat) and message.status.suspects == names):
            pass

    def receive_outputs(self) -> Outputs:
        while True:
            message = self.receive()
            if isinstance(message, Outputs):
                return message


@contextmanager
def running_server(
    engine: RecordingEngine,
    network: NetworkConfig = NETWORK,
    status: Callable[[], WorkerStatus] = lambda: STATUS,
    clock: Clock | None = None,
) -> Iterator[RequestServer]:
    """A worker's end. A test may stop it before the block ends."""
    server = RequestServer(network, KEYS.request, "incarnation-1", status, clock or SystemClock())
    server.start(engine)
    try:
        yield server
    finally:
        server.stop()


@contextmanager
def gateway_of(server: RequestServer, identity: bytes = b"\x01gateway") -> Iterator[GatewaySocket]:
    with zmq.Context() as context:
        gateway = GatewaySocket(context, server.address, identity)
        try:
            yield gateway
        finally:
            gateway.socket.close()
