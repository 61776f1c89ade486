"""Traces of real requests, as a collector gets them over OTLP/HTTP."""

import asyncio
import gzip
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from baton.config import GatewayConfig
from baton.errors import ConfigError
from baton.kv import TransferRole
from baton.request import EngineRequest, ErrorKind, RequestOutput, StageTimes
from baton.transfer import TransferEvent, TransferEventKind, TransferRecord
from baton.v1 import generation_service_pb2 as pb
from baton.v1.generation_service_pb2_grpc import GenerationServiceStub
from baton.v1.sampling_pb2 import SamplingParams
from gateway.auth.callers import ANYBODY
from gateway.requests.record import Outcome, RequestRecord
from gateway.telemetry.trace_export import check_tracing, tracing_for
from gateway.telemetry.tracing import MAX_QUEUED_SPANS, STOP_TIMEOUT_S, Tracing, _resource
from tests.factories.gateway import GatewayUnderTest, answering, failing, gateway_with

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED, UNSAMPLED = f"00-{TRACE_ID}-{PARENT_ID}-01", f"00-{TRACE_ID}-{PARENT_ID}-00"
ANSWER = [5, 6, 7]


@contextmanager
def collector() -> Iterator[tuple[str, list[Span]]]:
    """A collector. Yields its base URL, and the spans that it receives."""
    spans: list[Span] = []

    class Receive(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                for scope in resource.scope_spans:
                    spans.extend(scope.spans)
            self.send_response(200 if self.path == "/v1/traces" else 404)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Receive) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", spans
        server.shutdown()
        thread.join()


async def complete(under_test: GatewayUnderTest, **headers: str) -> int:
    body = {"model": "tiny", "prompt": "hello world", "max_tokens": 3}
    async with under_test.http() as client:
        return (await client.post("/v1/completions", json=body, headers=headers)).status_code


def attributes_of(span: Span) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value") or "") for each in span.attributes}


def root_of(spans: list[Span]) -> Span:
    ids = {span.span_id for span in spans}
    (root,) = (span for span in spans if span.parent_span_id not in ids)
    return root


def below(spans: list[Span], parent: Span) -> list[Span]:
    return [span for span in spans if span.parent_span_id == parent.span_id]


async def test_a_request_is_a_tree_below_its_clients_span(folder: Path) -> None:
    with collector() as (endpoint, spans):
        async with gateway_with(
            folder, {"p0": answering(ANSWER)}, {"d0": answering(ANSWER)}, otlp_endpoint=endpoint
        ) as under_test:
            headers = {"traceparent": SAMPLED, "tracestate": "vendor=abc", "x-request-id": "traced"}
            assert await complete(under_test, **headers) == 200
    root = root_of(spans)
    assert (root.trace_id.hex(), root.parent_span_id.hex()) == (TRACE_ID, PARENT_ID)
    assert root.kind == Span.SPAN_KIND_SERVER
    assert {span.trace_state for span in spans} == {"vendor=abc"}
    seen = attributes_of(root)
    assert seen["gen_ai.request.model"] == "tiny"
    assert seen["gen_ai.usage.output_tokens"] == 3
    assert str(seen["baton.request.id"]).startswith("traced-")
    stages = below(spans, root)
    assert [stage.name for stage in stages] == ["preprocess", "queue", "attempt"]
    attempt = stages[-1]
    assert attributes_of(attempt)["baton.worker.prefill"] == "p0"
    assert attributes_of(attempt)["baton.worker.decode"] == "d0"
    assert [stage.name for stage in below(spans, attempt)] == ["worker_queue", "prefill", "decode"]
    assert "hello" not in str(spans)
    whole = range(root.start_time_unix_nano, root.end_time_unix_nano + 1)
    assert all(s.start_time_unix_nano in whole and s.end_time_unix_nano in whole for s in spans)
    assert all(
        abs(first.end_time_unix_nano - then.start_time_unix_nano) < 1_000 for first, then in pairwise(stages)
    )


async def test_calls_over_grpc_belong_to_their_clients_traces_too(folder: Path) -> None:
    with collector() as (endpoint, spans):
        async with gateway_with(
            folder, {}, {"d0": answering(ANSWER)}, routing_mode="local", otlp_endpoint=endpoint
        ) as under_test:
            target = under_test.grpc_target
            metadata = (("traceparent", SAMPLED), ("tracestate", "a=1"), ("tracestate", "b=2"))
            async with grpc.aio.insecure_channel(target) as channel:
                request = pb.GenerateRequest(text="hello", sampling_params=SamplingParams(max_tokens=3))
                call = GenerationServiceStub(channel).Generate(request, metadata=metadata)
                assert [response async for response in call]
    root = root_of(spans)
    assert (root.trace_id.hex(), root.parent_span_id.hex()) == (TRACE_ID, PARENT_ID)
    assert (root.name, root.trace_state) == ("text_completion tiny", "a=1,b=2")


@pytest.mark.parametrize(("ratio", "is_traced"), [(1.0, True), (0.0, False)])
async def test_the_pages_requests_are_traced_as_any_others(
    folder: Path, ratio: float, is_traced: bool
) -> None:
    with collector() as (endpoint, spans):
        config: dict[str, Any] = {"otlp_endpoint": endpoint, "trace_sample_ratio": ratio}
        async with (
            gateway_with(folder, {}, {"d0": answering(ANSWER)}, routing_mode="local", **config) as under_test,
            under_test.http() as client,
        ):
            answer = await client.post("/cluster/try", json={"prompt": "hello", "max_tokens": 3})
            assert "event: end" in answer.text, answer.text
    assert bool(spans) == is_traced
    if is_traced:
        assert root_of(spans).name == "chat tiny"
        assert attributes_of(root_of(spans))["baton.request.api"] == "page"


async def test_a_request_that_failed_says_so_at_each_attempt(folder: Path) -> None:
    with collector() as (endpoint, spans):
        async with gateway_with(
            folder,
            {},
            {"d0": failing(ErrorKind.INTERNAL, "secret words")},
            routing_mode="local",
            otlp_endpoint=endpoint,
        ) as under_test:
            assert await complete(under_test) == 503
    root = root_of(spans)
    assert not root.parent_span_id
    assert (root.status.code, root.status.message) == (Status.STATUS_CODE_ERROR, "WorkerUnavailable")
    attempts = [stage for stage in below(spans, root) if stage.name == "attempt"]
    assert len(attempts) == attributes_of(root)["baton.request.attempts"] > 1
    assert {attempt.status.code for attempt in attempts} == {Status.STATUS_CODE_ERROR}
    assert attributes_of(attempts[0])["error.type"] == "failed"
    assert "secret words" not in str(spans)


async def test_a_request_that_moved_has_both_attempts_and_its_hand_over(folder: Path) -> None:
    """A worker's times of a hand-over count from its request, and lie inside their attempt."""
    requests: list[EngineRequest] = []

    def decode(request: EngineRequest) -> list[RequestOutput]:
        requests.append(request)
        if len(requests) == 1:
            return failing(ErrorKind.INTERNAL, "broken")(request)
        assert request.kv_transfer is not None
        events = (
            TransferEvent(TransferEventKind.ASKED, 1e-6),
            TransferEvent(TransferEventKind.FIRST_PIECE, 2e-6),
            TransferEvent(TransferEventKind.VERIFIED, 3e-6),
        )
        record = TransferRecord(
            role=TransferRole.CONSUMER,
            peer="p0",
            attempt=request.kv_transfer.attempt,
            transport="shared_memory",
            num_bytes=4096,
            events=events,
        )
        *others, last = answering(ANSWER)(request)
        last.stage_times = StageTimes(
            transfer_bytes=4096, decode_s=1e-6, first_step_s=1e-9, transfers=(record,)
        )
        return [*others, last]

    with collector() as (endpoint, spans):
        async with gateway_with(
            folder, {"p0": answering(ANSWER)}, {"d0": decode, "d1": decode}, otlp_endpoint=endpoint
        ) as under_test:
            assert await complete(under_test) == 200
    root = root_of(spans)
    assert root.status.code == Status.STATUS_CODE_UNSET
    stages = below(spans, root)
    assert [stage.name for stage in stages] == ["preprocess", "queue", "attempt", "queue", "attempt"]
    failed, good = stages[2], stages[4]
    assert (failed.status.code, good.status.code) == (Status.STATUS_CODE_ERROR, Status.STATUS_CODE_UNSET)
    assert [attributes_of(stage)["baton.attempt.number"] for stage in (failed, good)] == [0, 1]
    assert not [span for span in below(spans, failed) if span.name.startswith("transfer")]
    (transfer,) = [span for span in below(spans, good) if span.name == "transfer consumer"]
    seen = attributes_of(transfer)
    assert (seen["baton.worker"], seen["baton.transfer.peer"]) in {("d0", "p0"), ("d1", "p0")}
    assert (seen["baton.transfer.transport"], seen["baton.transfer.bytes"]) == ("shared_memory", 4096)
    assert [event.name for event in transfer.events] == ["asked", "first_piece", "verified"]
    assert transfer.start_time_unix_nano == pytest.approx(good.start_time_unix_nano + 1_000, abs=1_000)
    assert transfer.end_time_unix_nano - transfer.start_time_unix_nano == pytest.approx(2_000, abs=2)


@pytest.mark.parametrize(
    ("ratio", "traceparent", "is_traced"),
    [
        (1.0, UNSAMPLED, False),
        (0.0, SAMPLED, True),
        (0.0, None, False),
        (1.0, "nonsense", True),
    ],
)
async def test_clients_decide_what_is_sampled_where_they_say(
    folder: Path, ratio: float, traceparent: str | None, is_traced: bool
) -> None:
    with collector() as (endpoint, spans):
        async with gateway_with(
            folder,
            {},
            {"d0": answering(ANSWER)},
            routing_mode="local",
            otlp_endpoint=endpoint,
            trace_sample_ratio=ratio,
        ) as under_test:
            assert await complete(under_test, **({"traceparent": traceparent} if traceparent else {})) == 200
    assert bool(spans) == is_traced


async def test_an_unreachable_collector_costs_nothing(folder: Path) -> None:
    async with gateway_with(
        folder, {}, {"d0": answering(ANSWER)}, routing_mode="local", otlp_endpoint="http://127.0.0.1:9"
    ) as under_test:
        assert await complete(under_test) == 200


def test_a_collector_that_does_not_answer_holds_up_no_end() -> None:
    """It accepts connections, and does nothing else."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        tracing = Tracing(f"http://127.0.0.1:{server.getsockname()[1]}", 1.0, "tiny", "g0")
        record = RequestRecord(
            request_id="r",
            caller=ANYBODY,
            api="chat",
            trace=None,
            is_chat=True,
            outcome=Outcome.FINISHED,
            error=None,
            arrived_at=0.0,
            ended_at=1.0,
            num_prompt_tokens=1,
            num_output_tokens=1,
            num_attempts=0,
            path=None,
            finish=None,
            ttft_parts=None,
        )
        for _ in range(MAX_QUEUED_SPANS):  # three spans each: most are dropped
            tracing.ended(record)
        began_at = time.monotonic()
        asyncio.run(tracing.stop())
        assert time.monotonic() - began_at < STOP_TIMEOUT_S + 2.0


def test_a_gateways_name_from_the_environment_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _resource("g0").attributes["service.name"] == "baton-gateway"
    monkeypatch.setenv("OTEL_SERVICE_NAME", "ours")
    seen = _resource("g0").attributes
    assert (seen["service.name"], seen["service.instance.id"]) == ("ours", "g0")


def test_an_endpoint_without_the_extra_is_an_error_that_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "gateway.telemetry.tracing", None)
    with pytest.raises(ConfigError, match=r"baton\[otel\]"):
        tracing_for(GatewayConfig(otlp_endpoint="http://127.0.0.1:4318"), "tiny", "g0")


@pytest.mark.parametrize(
    ("variable", "value", "complaint"),
    [
        ("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "8192", "max_export_batch_size must be"),
        ("OTEL_BSP_SCHEDULE_DELAY", "0", "schedule_delay_millis must be positive"),
        ("OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", "abc", "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT must be"),
    ],
)
def test_a_variable_that_opentelemetry_refuses_is_an_error_before_workers_start(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, complaint: str
) -> None:
    check_tracing(config := GatewayConfig(otlp_endpoint="http://127.0.0.1:4318"))
    monkeypatch.setenv(variable, value)
    with pytest.raises(
        ConfigError, match=rf"perhaps because of an environment variable \(OTEL_\.\.\.\): .*{complaint}"
    ):
        check_tracing(config)


def test_a_share_of_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="needs an otlp_endpoint"):
        GatewayConfig(trace_sample_ratio=0.5)
