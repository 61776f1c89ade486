"""Which trace of its client's an HTTP request belongs to, by its headers."""

from starlette.datastructures import Headers

from gateway.call_ids import TraceContext, trace_context_from


def trace_of(headers: Headers) -> TraceContext | None:
    """None if they name none."""
    return trace_context_from(headers.getlist("traceparent"), headers.getlist("tracestate"))
