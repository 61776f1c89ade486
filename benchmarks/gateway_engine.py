"""An engine that computes nothing, for the gateway's benchmark: a request-plane server and a clock.

    python -m benchmarks.gateway_engine TOKENS_PER_S

Sends a request's first token at once. Then every step gives each running request one token, and sends all tokens in one
message, as a real worker does. The duration of a step is chosen so that all requests together get TOKENS_PER_S; it is
at least a millisecond. Prints its endpoint as JSON, and ends when its stdin ends.
"""

import sys
import threading
import time

from baton.clock import SystemClock
from baton.config import NetworkConfig
from baton.kv import WorkerRef
from baton.request import EngineRequest, FinishReason, RequestOutput
from baton.worker import (
    KVBlockCounts,
    RequestCounts,
    WorkerEndpoint,
    WorkerRole,
    WorkerState,
    WorkerStatus,
)
from worker.kv_events import KVChange
from worker.ready_line import endpoint_to_json
from worker.request_plane import RequestServer

NETWORK = NetworkConfig(security="none", heartbeat_interval_s=0.25, peer_timeout_s=30.0)
SHORTEST_STEP_S = 0.001
FIRST_WORD = 40
"""The id of an answer's first token. The ids of later tokens count up from it."""
NUM_WORDS = 200


class Engine:
    """Running requests, by id. Each has its client, the number of tokens that the client wants, and the number sent so
    far."""

    def __init__(self, tokens_per_s: float) -> None:
        self._tokens_per_s = tokens_per_s
        self._running: dict[str, tuple[str, int, int]] = {}
        self._lock = threading.Lock()
        self._ref = WorkerRef("w0", "benchmark", ("tcp://127.0.0.1:1",), 16)
        self._server = RequestServer(NETWORK, None, self._ref.incarnation, self._status, SystemClock())
        self._server.start(self)

    @property
    def endpoint(self) -> WorkerEndpoint:
        return WorkerEndpoint(self._ref, WorkerRole.DECODE, self._server.address, "here", 1)

    def submit(self, client_id: str, request: EngineRequest) -> None:
        wanted = request.sampling_params.max_tokens
        self._server.send(client_id, [_token(request.request_id, 0, wanted)])
        if wanted > 1:
            with self._lock:
                self._running[request.request_id] = client_id, wanted, 1

    def decline(self, request: EngineRequest) -> None:
        """Does nothing: no request has a hand-over."""

    def abort(self, client_id: str, request_ids: tuple[str, ...]) -> None:  # noqa: ARG002
        with self._lock:
            for request_id in request_ids:
                self._running.pop(request_id, None)

    def abort_client(self, client_id: str) -> None:
        with self._lock:
            self._running = {key: value for key, value in self._running.items() if value[0] != client_id}

    def subscribe_kv_events(self, client_id: str) -> None:
        """Reports an empty prefix cache: this engine has none, and later changes do not occur."""
        self._server.send_kv_change((client_id,), KVChange(True, b"", b""))

    def fail(self, error: BaseException) -> None:
        raise error

    def run(self) -> None:
        """Runs steps without end."""
        due_at = time.perf_counter()
        while True:
            num_running = self._step()
            now = time.perf_counter()
            due_at = max(due_at + max(SHORTEST_STEP_S, num_running / self._tokens_per_s), now)
            time.sleep(due_at - now)

    def _step(self) -> int:
        outputs: dict[str, list[RequestOutput]] = {}
        with self._lock:
            for request_id, (client_id, wanted, have) in list(self._running.items()):
                outputs.setdefault(client_id, []).append(_token(request_id, have, wanted))
                if have + 1 == wanted:
                    del self._running[request_id]
                else:
                    self._running[request_id] = client_id, wanted, have + 1
        for client_id, news in outputs.items():
            self._server.send(client_id, news)
        return sum(map(len, outputs.values()))

    def _status(self) -> WorkerStatus:
        plenty = KVBlockCounts(10**6, 10**6, 0, 0)
        return WorkerStatus(
            self._ref, WorkerRole.DECODE, WorkerState.READY, plenty, RequestCounts(0, 0, 0), {}
        )


def _token(request_id: str, position: int, wanted: int) -> RequestOutput:
    return RequestOutput(
        request_id=request_id,
        first_position=position,
        token_ids=(FIRST_WORD + position % NUM_WORDS,),
        finish_reason=FinishReason.LENGTH if position + 1 == wanted else None,
    )


def main() -> None:
    engine = Engine(float(sys.argv[1]))
    threading.Thread(target=engine.run, daemon=True).start()
    print(endpoint_to_json(engine.endpoint), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
