"""SmallWrites: sends large bodies in portions, so that a client that does not read holds little memory."""

from starlette.types import ASGIApp, Message, Receive, Scope, Send

WRITE_BYTES = 256 * 1024
"""Size of one write. The next one waits until the client has read most of it."""


class SmallWrites:
    """ASGI middleware: divides the messages of a response's body. A connection keeps a copy of a whole message that
    its client does not read. So each message has at most WRITE_BYTES bytes."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_portions(message: Message) -> None:
            body = message.get("body", b"")
            for begin in range(0, len(body) - WRITE_BYTES, WRITE_BYTES):
                portion = {"body": body[begin : begin + WRITE_BYTES], "more_body": True}
                await send({"type": "http.response.body", **portion})
            if len(body) > WRITE_BYTES:
                last = (len(body) - 1) // WRITE_BYTES * WRITE_BYTES
                message = {**message, "body": body[last:]}
            await send(message)

        await self._app(scope, receive, send_portions)
