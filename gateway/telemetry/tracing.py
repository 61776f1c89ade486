"""Tracing: exports ended requests as OpenTelemetry spans, to a collector that speaks OTLP over HTTP.

Spans are made from a request's record after the request has ended, so tracing delays no token. All times are
on the gateway's clock. A worker reports durations, and offsets from the moment when it received a request.
The gateway counts these offsets from the moment when it sent the request. So a worker's spans may be early by
the network delay, but the difference of two clocks never makes them wrong. See docs/observability.md for the
spans.

This module needs the extra `otel`. gateway/telemetry/trace_export.py imports it only if traces are
configured.
"""

import asyncio
import threading
import time
from collections.abc import Mapping
from contextlib import suppress

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from baton.version import baton_version
from gateway.requests.record import CLIENTS_CHOICES, RequestRecord
from gateway.telemetry.timeline import TimelineStage, stages_of

MAX_QUEUED_SPANS = 4096
"""Limit for spans that wait for the collector. Further spans are dropped."""

EXPORT_TIMEOUT_S = 5.0
STOP_TIMEOUT_S = 1.0


class Tracing:
    """The request driver calls `ended`. A separate thread sends the spans; they are dropped if no collector
    accepts them."""

    def __init__(self, endpoint: str, sample_ratio: float, model_name: str, instance: str) -> None:
        """`endpoint`: the collector's base URL. `instance` distinguishes this gateway from other gateways.

        `sample_ratio`: of the requests without a trace context, the share that is traced. If a client sends a trace
        context, the context decides.
        """
        self._model_name = model_name
        self._exporter = OTLPSpanExporter(f"{endpoint.rstrip('/')}/v1/traces", timeout=EXPORT_TIMEOUT_S)
        processor = BatchSpanProcessor(self._exporter, max_queue_size=MAX_QUEUED_SPANS)
        self._provider = TracerProvider(
            ParentBased(TraceIdRatioBased(sample_ratio)),
            _resource(instance),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("baton")
        self._propagator = TraceContextTextMapPropagator()

    def ended(self, record: RequestRecord) -> None:
        """Makes the spans of a request that ended. Never raises, never blocks."""
        ended_ns = time.time_ns()
        arrived_ns = ended_ns - round((record.ended_at - record.arrived_at) * 1e9)
        trace = record.trace
        carrier = {} if trace is None else {"traceparent": trace.parent, "tracestate": trace.state}
        parent = self._propagator.extract(carrier, Context())
        root = self._tracer.start_span(
            f"{_operation(record)} {self._model_name}",
            parent,
            SpanKind.SERVER,
            _attributes(record, self._model_name),
            start_time=arrived_ns,
        )
        if root.is_recording():
            self._add_spans(set_span_in_context(root, Context()), stages_of(record), arrived_ns)
            if (kind := record.error_kind) is not None:
                root.set_attribute("error.type", kind)
                if kind not in CLIENTS_CHOICES:
                    root.set_status(Status(StatusCode.ERROR, kind))
        root.end(ended_ns)

    def close(self) -> None:
        """Sends the remaining spans, which may take EXPORT_TIMEOUT_S."""
        self._provider.shutdown()

    async def stop(self) -> None:
        """Sends the remaining spans for up to STOP_TIMEOUT_S, then drops the rest."""
        loop, is_over = asyncio.get_running_loop(), asyncio.Event()

        def send_the_rest() -> None:
            self.close()
            with suppress(RuntimeError):  # the loop is closed, so no code waits any more
                loop.call_soon_threadsafe(is_over.set)

        # A daemon thread, since a collector that does not answer may block it for EXPORT_TIMEOUT_S.
        threading.Thread(target=send_the_rest, name="last spans", daemon=True).start()
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await is_over.wait()
        except TimeoutError:
            self._exporter.shutdown()  # type: ignore[no-untyped-call]

    def _add_spans(self, parent: Context, stages: list[TimelineStage], arrived_ns: int) -> None:
        for stage in stages:
            span = self._tracer.start_span(
                stage.name, parent, attributes=stage.attributes, start_time=_at(arrived_ns, stage.began_s)
            )
            for name, at_s in stage.events:
                span.add_event(name, timestamp=_at(arrived_ns, at_s))
            if stage.failure is not None:
                span.set_status(Status(StatusCode.ERROR, stage.failure))
            self._add_spans(set_span_in_context(span, Context()), stage.inside, arrived_ns)
            span.end(_at(arrived_ns, stage.ended_s))


def _resource(instance: str) -> Resource:
    """The gateway's resource attributes. Environment variables take precedence (OTEL_SERVICE_NAME and
    others)."""
    usual = {
        "service.name": "baton-gateway",
        "service.version": baton_version(),
        "service.instance.id": instance,
    }
    return Resource.create(usual).merge(OTELResourceDetector().detect())


def _at(arrived_ns: int, since_arrival_s: float) -> int:
    return arrived_ns + round(since_arrival_s * 1e9)


def _operation(record: RequestRecord) -> str:
    """The operation's name in OpenTelemetry's conventions for generative AI."""
    return "chat" if record.is_chat else "text_completion"


def _attributes(record: RequestRecord, model_name: str) -> Mapping[str, str | int | float]:
    values: dict[str, str | int | float | None] = {
        "gen_ai.operation.name": _operation(record),
        "gen_ai.provider.name": "baton",
        "gen_ai.request.model": model_name,
        "gen_ai.response.model": model_name,
        "gen_ai.usage.input_tokens": record.num_prompt_tokens,
        "gen_ai.usage.output_tokens": record.num_output_tokens,
        "gen_ai.response.time_to_first_chunk": record.ttft_s,
        "baton.request.id": record.request_id,
        "baton.request.caller": record.caller.name,
        "baton.request.api": record.api,
        "baton.request.outcome": record.outcome.value,
        "baton.request.path": record.path,
        "baton.request.attempts": record.num_attempts,
    }
    attributes: dict[str, str | int | float] = {
        key: value for key, value in values.items() if value is not None
    }
    return attributes
