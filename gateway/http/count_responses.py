"""CountResponses: tells somebody the status of every response by the route that answered, and what was wrong if it
was an error."""

from collections.abc import Callable, Collection
from http import HTTPMethod
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.telemetry.call_error import CallError, OnCallError

OnResponse = Callable[[str, str, int], None]
"""Method, route, status."""

OTHER = "(other)"
"""Stands for methods and paths that there are not: clients choose them, and could choose any number."""

METHODS = frozenset(HTTPMethod)


class CountResponses:
    """An ASGI middleware; the application below it must be the router's own, or one that hands its scope on."""

    def __init__(
        self, app: ASGIApp, routes: Collection[str], on_response: OnResponse, on_error: OnCallError
    ) -> None:
        """`routes`: where a call that was not even routed wanted to go, if it is one of these."""
        self._app = app
        self._routes = frozenset(routes)
        self._on_response = on_response
        self._on_error = on_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                method = scope["method"] if scope["method"] in METHODS else OTHER
                route = self._route(scope)
                self._on_response(method, route, message["status"])
                self._tell_error(scope.get("state", {}), f"{method} {route}")
            await send(message)

        await self._app(scope, receive, counted)

    def _route(self, scope: Scope) -> str:
        path: str = scope["path"]
        return getattr(scope.get("route"), "path", path if path in self._routes else OTHER)

    def _tell_error(self, state: dict[str, Any], call: str) -> None:
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
