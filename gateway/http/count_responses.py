"""CountResponses: reports the status and route of every response, and its error if it has one."""

from collections.abc import Callable, Collection
from http import HTTPMethod
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.telemetry.call_log import CallError, OnCallError

OnResponse = Callable[[str, str, int], None]
"""Called with the method, the route and the status."""

OTHER = "(other)"
"""Replaces unknown methods and paths in metrics, since clients could send any number of different ones."""

METHODS = frozenset(HTTPMethod)


class CountResponses:
    """An ASGI middleware. The application that it wraps must set the route in the scope that it gets, not in a copy."""

    def __init__(
        self, app: ASGIApp, routes: Collection[str], on_response: OnResponse, on_error: OnCallError
    ) -> None:
        """`routes`: known paths. If a call was refused before routing, its path is reported only if it is
        known."""
        self._app = app
        self._routes = frozenset(routes)
        self._on_response = on_response
        self._on_error = on_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                method = scope["method"] if scope["method"] in METHODS else OTHER
                route = self._route(scope)
                self._on_response(method, route, message["status"])
                self._report_error(scope.get("state", {}), f"{method} {route}")
            await send(message)

        await self._app(scope, receive, counted)

    def _route(self, scope: Scope) -> str:
        path: str = scope["path"]
        return getattr(scope.get("route"), "path", path if path in self._routes else OTHER)

    def _report_error(self, state: dict[str, Any], call: str) -> None:
        if (error := state.get("error")) is None:
            return
        caller = state.get("caller")
        self._on_error(
            CallError(
                api="http",
                error=error,
                caller=None if caller is None else caller.name,
                call=call,
                request_id=state["request_id"],
            )
        )
