"""A real gateway on a loopback port, and scripted workers on the real request plane."""

import asyncio
import math
import queue
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import pytest

from baton.clock import SystemClock
from baton.config import GatewayConfig, NetworkConfig
from baton.kv import TransferRole, WorkerRef
from baton.messages.control import ControlApi
from baton.request import EngineRequest, ErrorKind, FinishReason, PackedLogprobs, RequestOutput, TokenLogprobs
from baton.system.curve import ClusterKeys
from baton.worker import (
    KVBlockCounts,
    KVPeerCounts,
    RequestCounts,
    WorkerEndpoint,
    WorkerLoad,
    WorkerRole,
    WorkerState,
    WorkerStatus,
)
from engine.sampling_defaults import read_sampling_defaults
from gateway import Gateway, GatewayClient, GatewayError, ServedModel, Tokenizer
from gateway.auth.credentials import NO_CREDENTIALS, Credentials
from gateway.client import RequestEvent
from gateway.conversation import AnswerFormat
from gateway.requests.dispatcher import Dispatcher
from gateway.requests.retry import LoadFailurePolicy
from tests.factories.security import KEYS
from worker.kv_events import KVChange
from worker.request_plane import RequestServer

NETWORK = NetworkConfig(heartbeat_interval_s=0.05, peer_timeout_s=30.0)
"""Its peer timeout is so long that a busy machine never looks like a lost peer."""
IMPATIENT = NETWORK.model_copy(update={"peer_timeout_s": 2.0})
"""A configuration for tests of silent peers."""

Script = Callable[[EngineRequest], list[RequestOutput]]
"""The outputs that a worker sends at once for a request."""


class ScriptedWorker:
    """A worker without an engine. `received` has its requests, and the ids of aborted requests."""

    def __init__(
        self,
        name: str,
        role: WorkerRole,
        script: Script,
        keys: ClusterKeys = KEYS,
        network: NetworkConfig = NETWORK,
    ) -> None:
        self._script = script
        self._ref = WorkerRef(name, f"{name}-incarnation", ("tcp://127.0.0.1:1",), 16)
        self.role = role
        self.state = WorkerState.READY
        self.blocks = KVBlockCounts(999, 999, 0, 0)
        self.requests = RequestCounts(0, 0, 0)
        self.load = WorkerLoad(7, 0.25, 1500.0, 0.03)
        self.kv_peers: tuple[KVPeerCounts, ...] = ()
        self.received: queue.Queue[EngineRequest | str] = queue.Queue()
        self.goes_on = threading.Event()
        """While this is clear, the worker stops at its next heartbeat, like a stopped process."""
        self.goes_on.set()
        self._server = RequestServer(
            network, keys.request, self._ref.incarnation, self._status, SystemClock()
        )
        self._server.start(self)
        self.endpoint = WorkerEndpoint(self._ref, role, self._server.address, "here", 1)
        self._clients: dict[str, str] = {}

    def submit(self, client_id: str, request: EngineRequest) -> None:
        self._clients[request.request_id] = client_id
        self.received.put(request)
        self.say(request, self._script(request))

    def decline(self, request: EngineRequest) -> None:
        self.received.put(f"declined {request.request_id}")

    def abort(self, client_id: str, request_ids: tuple[str, ...]) -> None:
        for request_id in request_ids:
            self.received.put(request_id)

    def abort_client(self, client_id: str) -> None:
        self.received.put(f"client {client_id}")

    def subscribe_kv_events(self, client_id: str) -> None:
        """Reports an empty prefix cache, which never changes."""
        self._server.send_kv_change((client_id,), KVChange(True, b"", b""))

    def fail(self, error: BaseException) -> None:
        self.received.put(f"failure {error}")

    def say(self, request: EngineRequest, outputs: list[RequestOutput]) -> None:
        if outputs:
            self._server.send(self._clients[request.request_id], outputs)

    async def next_request(self) -> EngineRequest:
        received = await asyncio.to_thread(self.received.get, True, 30)
        assert isinstance(received, EngineRequest), f"expected a request, got an abort of {received}"
        return received

    async def next_abort(self) -> str:
        received = await asyncio.to_thread(self.received.get, True, 30)
        assert isinstance(received, str), f"expected an abort, got {received}"
        return received

    def stop(self) -> None:
        self._server.stop()

    def _status(self) -> WorkerStatus:
        assert self.goes_on.wait(30)
        return WorkerStatus(
            self._ref,
            self.role,
            self.state,
            self.blocks,
            self.requests,
            {"preemptions": 0},
            self.kv_peers,
            load=self.load,
        )


def silent(_: EngineRequest) -> list[RequestOutput]:
    """A script of a worker that accepts a request and sends nothing."""
    return []


def outputs_of(
    request: EngineRequest,
    token_ids: list[int],
    start: int = 0,
    finish: FinishReason | None = FinishReason.LENGTH,
) -> list[RequestOutput]:
    """One output per token. The last output also has the finish reason. The output with token 0 has the prompt's
    log-probabilities, if the request wants them and its worker computed the prompt."""
    last = len(token_ids) - 1
    outputs = [
        RequestOutput(
            request_id=request.request_id,
            first_position=start + index,
            token_ids=(token_id,),
            finish_reason=finish if index == last else None,
        )
        for index, token_id in enumerate(token_ids)
    ]
    num_top, transfer = request.sampling_params.prompt_logprobs, request.kv_transfer
    is_consumer = transfer is not None and transfer.role is TransferRole.CONSUMER
    if outputs and start == 0 and num_top is not None and not is_consumer:
        outputs[0].prompt_logprobs = prompt_logprobs_of(request.prompt_token_ids, num_top)
    return outputs


def prompt_logprobs_of(prompt_token_ids: Sequence[int], num_top: int) -> PackedLogprobs:
    """Log-probabilities of a prompt's tokens but the first. Each token has rank 2, behind token 65, and token 67 is
    impossible; `num_top` is at most 3."""

    def top_of(token_id: int) -> tuple[tuple[int, float], ...]:
        return ((65, -0.25), (token_id, -0.5), (67, -math.inf))[:num_top]

    return PackedLogprobs.of(
        TokenLogprobs(token_id, -0.5, 2, top_of(token_id)) for token_id in prompt_token_ids[1:]
    )


def answering(token_ids: list[int], finish: FinishReason = FinishReason.LENGTH) -> Script:
    """A worker that knows the answer: one token if it only prefills, all other tokens if it decodes."""

    def script(request: EngineRequest) -> list[RequestOutput]:
        start = len(request.output_token_ids)
        assert request.output_token_ids == tuple(token_ids[:start])
        if request.kv_transfer is not None and request.kv_transfer.role is TransferRole.PRODUCER:
            return outputs_of(request, token_ids[start : start + 1], start, FinishReason.HANDED_OVER)
        return outputs_of(request, token_ids[start:], start, finish)

    return script


def beginning(token_ids: list[int]) -> Script:
    """A worker that sends these tokens and then nothing."""
    return partial(outputs_of, token_ids=token_ids, finish=None)


def failing(kind: ErrorKind, message: str, after: Sequence[int] = ()) -> Script:
    """A worker that ends every request with an error, after these tokens."""

    def script(request: EngineRequest) -> list[RequestOutput]:
        failure = failure_of(request, kind, message)
        failure.first_position += len(after)
        return [*outputs_of(request, [*after], finish=None), failure]

    return script


def failure_of(request: EngineRequest, kind: ErrorKind, message: str) -> RequestOutput:
    return RequestOutput(
        request_id=request.request_id,
        first_position=len(request.output_token_ids),
        finish_reason=FinishReason.ERROR,
        error=message,
        error_kind=kind,
    )


def tokens_of(events: list[RequestEvent]) -> list[int]:
    return [token_id for event in events for token_id in event.token_ids]


async def refusal(call: Awaitable[object]) -> GatewayError:
    """The error with which the gateway ends a call over gRPC."""
    with pytest.raises(GatewayError) as caught:
        await call
    return caught.value


class GatewayUnderTest:
    def __init__(self, gateway: Gateway, client: GatewayClient, workers: dict[str, ScriptedWorker]) -> None:
        self.gateway = gateway
        self.client = client
        self.workers = workers

    @property
    def dispatcher(self) -> Dispatcher:
        """The gateway's dispatcher, which counts requests."""
        return self.gateway._driver.dispatcher

    @property
    def http_url(self) -> str:
        return f"http://127.0.0.1:{self.gateway.http_port}"

    @property
    def grpc_target(self) -> str:
        return f"127.0.0.1:{self.gateway.grpc_port}"

    def http(self, **options: Any) -> httpx2.AsyncClient:
        """A client whose URLs are paths of this gateway."""
        return httpx2.AsyncClient(base_url=self.http_url, timeout=60.0, **options)

    async def ask(self, text: str | None = "Hello", **request: Any) -> list[RequestEvent]:
        """All events of a request over gRPC."""
        return [event async for event in self.client.generate(text=text, **request)]

    def add(self, name: str, script: Script) -> ScriptedWorker:
        """A decode worker that joins."""
        worker = self.workers[name] = ScriptedWorker(name, WorkerRole.DECODE, script)
        self.gateway.workers.add_worker(worker.endpoint)
        return worker

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not condition():
                await asyncio.sleep(0.01)


@asynccontextmanager
async def gateway_with(
    folder: Path,
    prefill: Mapping[str, Script],
    decode: Mapping[str, Script],
    *,
    load_failure_policy: LoadFailurePolicy = "retry",
    control: ControlApi | None = None,
    network: NetworkConfig = NETWORK,
    credentials: Credentials = NO_CREDENTIALS,
    log_prompts: bool = False,
    max_model_len: int = 256,
    answer_format: AnswerFormat | None = None,
    **config: object,
) -> AsyncIterator[GatewayUnderTest]:
    """A gateway whose workers follow scripts. At the end, no request may be in flight.

    `credentials` are the client's. Prompts are handed over unless a test sets another mode, since the
    decisions of `auto` depend on times. `answer_format` replaces the format that the model's template would
    select.
    """
    tokenizer = Tokenizer(folder)
    if answer_format is not None:
        tokenizer.answer_format = answer_format
    model = ServedModel(
        "tiny",
        str(folder),
        max_model_len,
        tokenizer.vocab_size,
        (2,),
        "float32",
        "float32",
        read_sampling_defaults(folder),
    )
    base = {"grpc_port": 0, "http_port": 0, "placement_timeout_s": 20.0, "routing_mode": "disaggregated"}
    settings = GatewayConfig(**{**base, **config})  # type: ignore[arg-type]
    gateway = Gateway(
        settings,
        network,
        KEYS.request,
        KEYS.prefix,
        load_failure_policy,
        model,
        tokenizer,
        SystemClock(),
        control,
        log_prompts=log_prompts,
    )
    workers = {
        name: ScriptedWorker(name, WorkerRole.PREFILL, script, network=network)
        for name, script in prefill.items()
    }
    workers |= {
        name: ScriptedWorker(name, WorkerRole.DECODE, script, network=network)
        for name, script in decode.items()
    }
    try:
        await gateway.start()
        for worker in workers.values():
            gateway.workers.add_worker(worker.endpoint)
        async with GatewayClient(f"127.0.0.1:{gateway.grpc_port}", credentials=credentials) as client:
            under_test = GatewayUnderTest(gateway, client, workers)
            await under_test.until(lambda: len(gateway.workers.statuses) == len(workers))
            yield under_test
            assert under_test.dispatcher.num_in_flight == 0
    finally:
        await gateway.stop(grace_s=0.0)
        for worker in workers.values():
            worker.stop()
