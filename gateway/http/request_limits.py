"""RequestLimits: bounds a request's size, the time until its body arrives, and the total size of a caller's bodies.
OneLength: refuses a body with two lengths."""

import asyncio
from collections import Counter
from functools import partial

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from baton.errors import InvalidRequest
from gateway.http.error_shapes import error_response
from gateway.http.errors import HTTP_ERRORS, note_error

MAX_HEADER_BYTES = 32 * 1024
"""The request's line and all headers have at most this many bytes together. uvicorn bounds headers that are still
incomplete."""
BODY_TIMEOUT_S = 60.0
MAX_BODIES = 32
"""One caller's requests that are not being answered yet may hold, together, the bytes of this many bodies of the
largest size. A caller may have a thousand connections: without this limit, its bodies could take all memory before any
other limit applies."""
HOLD = "hold"
"""Key in the state of each request's scope. Its value is a function that counts further bytes as if they were a part of
the request's body, such as those of stored responses that the request continues or reads. Raises HTTPException with
429."""
HOLD_TO_END = "hold_to_end"
"""As HOLD, but these bytes count until the request has ended, also while it is being answered."""


class RequestLimits:
    """ASGI middleware: answers with 431 for too large headers, 413 for a too large body, 408 for a late body, and 429
    if the caller's bodies are too large together. `HttpAuthentication` must have set the caller."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._held: Counter[str] = Counter()
        """By caller's name: the bytes of the caller's requests that are not being answered yet."""
        self._too_large = f"the body may have at most {max_bytes} bytes (gateway.max_message_mib)"
        self._too_many = (
            f"your requests that are not being answered yet may have bodies of at most {MAX_BODIES * max_bytes} bytes "
            f"together ({MAX_BODIES} x gateway.max_message_mib). Stored responses that they continue or read count, "
            "too. So do items of running responses that will be stored, but are not in the prompts. Send fewer "
            "requests at once"
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        problem = self._problem(scope)
        if problem is not None:
            status, message = problem
            note_error(scope, HTTP_ERRORS.get(status, InvalidRequest.__name__))
            await error_response(scope, status, message)(scope, receive, send)
            return
        caller = scope["state"]["caller"].name
        held, held_to_end = _HeldBytes(self._held, caller), _HeldBytes(self._held, caller)
        scope["state"][HOLD] = partial(self._hold, held)
        scope["state"][HOLD_TO_END] = partial(self._hold, held_to_end)
        try:
            await self._app(scope, self._limited(receive, held), send)
        finally:
            held.release()
            held_to_end.release()

    def _problem(self, scope: Scope) -> tuple[int, str] | None:
        """The problem of the request's headers: a status and the reason. None if there is no problem."""
        headers = Headers(scope=scope)
        if _header_bytes(scope) > MAX_HEADER_BYTES:
            return 431, f"the request's line and headers may have at most {MAX_HEADER_BYTES} bytes"
        if int(headers.get("content-length", "0")) > self._max_bytes:  # h11 ensures that it is a number
            return 413, self._too_large
        return None

    def _limited(self, receive: Receive, held: "_HeldBytes") -> Receive:
        """A `receive` with limits for the body. FastAPI turns the exceptions of `receive` into responses. When the
        whole body has arrived, `receive` waits without a deadline until the client disconnects.
        """
        num_bytes, is_whole = 0, False
        deadline = asyncio.get_running_loop().time() + BODY_TIMEOUT_S

        async def receive_limited() -> Message:
            nonlocal num_bytes, is_whole
            if is_whole:
                held.release()
                return await receive()
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                raise HTTPException(408, f"the body did not arrive within {BODY_TIMEOUT_S:g} s") from None
            num_bytes += len(message.get("body", b""))
            is_whole = not message.get("more_body", False)
            if num_bytes > self._max_bytes:
                raise HTTPException(413, self._too_large)
            self._hold(held, len(message.get("body", b"")))
            return message

        return receive_limited

    def _hold(self, held: "_HeldBytes", num_bytes: int) -> None:
        if held.add(num_bytes) > MAX_BODIES * self._max_bytes:
            raise HTTPException(429, self._too_many, {"retry-after": "1", "retry-after-ms": "1000"})


class OneLength:
    """ASGI middleware: answers a request whose body has two lengths with 400, and closes its connection, as RFC 9112
    (6.1) demands. If a proxy uses one of the lengths and we the other, a request can hide in another request's body."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        if "content-length" not in headers or "transfer-encoding" not in headers:
            await self._app(scope, receive, send)
            return
        note_error(scope, InvalidRequest.__name__)
        message = "set either content-length or transfer-encoding, not both"
        refusal = error_response(scope, 400, message, headers={"connection": "close"})
        await refusal(scope, receive, send)


class _HeldBytes:
    """The bytes of one request's body, and those that count as a part of it. They count until the application has
    answered, or until it begins to wait for the client to disconnect, if that is earlier."""

    def __init__(self, by_caller: Counter[str], caller: str) -> None:
        self._by_caller = by_caller
        self._caller = caller
        self._num_bytes = 0

    def add(self, num_bytes: int) -> int:
        """Adds bytes to this body. Returns the number of bytes of all bodies of the caller."""
        self._num_bytes += num_bytes
        self._by_caller[self._caller] += num_bytes
        return self._by_caller[self._caller]

    def release(self) -> None:
        if self._num_bytes:
            self._by_caller[self._caller] -= self._num_bytes
            self._num_bytes = 0
            if not self._by_caller[self._caller]:
                del self._by_caller[self._caller]


def _header_bytes(scope: Scope) -> int:
    fields = sum(len(name) + len(value) + len(": \r\n") for name, value in scope["headers"])
    return fields + len(scope["raw_path"]) + len(scope["query_string"])
