"""Ids in headers: every response names its request (`x-request-id`), and a request may belong to a trace."""

from collections.abc import Mapping
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.call_ids import TraceContext, offered_id, request_id_for, trace_context_from
from gateway.http.dialects import Dialect, dialect_of

HEADER = "x-request-id"
ANTHROPIC_HEADER = "request-id"
"""The header that Anthropic's clients read; responses on Anthropic's paths have both headers."""


class RequestIds:
    """ASGI middleware: sets `request.state.request_id`, an id that no other request has. An id in the body
    may replace it.

    The response repeats the id of the request's header if that id may appear in a log. Otherwise the response
    contains `request_id`.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = scope.setdefault("state", {})
        state["offered_id"] = offered_id(Headers(scope=scope).get(HEADER))
        state["request_id"] = request_id_for(state["offered_id"])

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(id_headers(scope))
            await send(message)

        await self._app(scope, receive, send_named)


def id_headers(scope: Scope) -> dict[str, str]:
    """The response headers that contain the request's id."""
    shown = shown_id(scope["state"])
    if dialect_of(scope["path"]) is Dialect.ANTHROPIC:
        return {HEADER: shown, ANTHROPIC_HEADER: shown}
    return {HEADER: shown}


def shown_id(state: Mapping[str, Any]) -> str:
    """The id that the client gets, from the state that `RequestIds` set."""
    shown: str = state["offered_id"] or state["request_id"]
    return shown


def trace_of(headers: Headers) -> TraceContext | None:
    """The client's trace context; None if the headers contain none."""
    return trace_context_from(headers.getlist("traceparent"), headers.getlist("tracestate"))
