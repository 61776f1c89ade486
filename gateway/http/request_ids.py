"""RequestIds: every response names its request, in the header `x-request-id`."""

from collections.abc import Mapping
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.call_ids import offered_id, request_id_for

HEADER = "x-request-id"


class RequestIds:
    """Gives each request an id of its own in `request.state.request_id`; an id in the body may replace it.

    The response repeats the id from the request's header if it is fit for a log, else this one.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        state["offered_id"] = offered_id(Headers(scope=scope).get(HEADER))
        state["request_id"] = request_id_for(state["offered_id"])

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[HEADER] = shown_id(state)
            await send(message)

        await self._app(scope, receive, send_named)


def shown_id(state: Mapping[str, Any]) -> str:
    """The id that the client knows, from the state set above."""
    shown: str = state["offered_id"] or state["request_id"]
    return shown
