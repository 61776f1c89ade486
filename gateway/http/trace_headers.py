"""The client's trace context of an HTTP request, from its headers."""

from starlette.datastructures import Headers

from gateway.call_ids import TraceContext, trace_context_from


def trace_of(headers: Headers) -> TraceContext | None:
    """None if the headers contain none."""
    return trace_context_from(headers.getlist("traceparent"), headers.getlist("tracestate"))
