"""HttpCall: the properties of an HTTP call that are not in its body; the same for every API."""

import asyncio
from dataclasses import dataclass
from typing import Annotated, Self

from fastapi import Header
from starlette.requests import Request

from gateway.auth.callers import Caller
from gateway.call_ids import TraceContext
from gateway.http.request_ids import trace_of

TIMEOUT_HEADER = "x-request-timeout-ms"
MAX_TIMEOUT_MS = 24 * 3600 * 1000

TimeoutMs = Annotated[
    int | None,
    Header(
        alias=TIMEOUT_HEADER,
        ge=1,
        le=MAX_TIMEOUT_MS,
        description="When the client gives up, in milliseconds; unfinished work then ends on all workers.",
    ),
]


@dataclass(frozen=True, slots=True)
class HttpCall:
    """A request's properties outside of its body."""

    request_id: str
    api: str
    caller: Caller
    trace: TraceContext | None
    deadline: float | None
    """A time of the event loop's clock; None: the client waits without limit."""

    @classmethod
    def of(cls, request: Request, api: str, timeout_ms: int | None, request_id: str | None = None) -> Self:
        """`request_id`: an id in the body. It becomes the request's id; an id in a header does not."""
        if request_id is not None:
            request.state.request_id = request_id
        return cls(
            request.state.request_id,
            api,
            request.state.caller,
            trace_of(request.headers),
            None if timeout_ms is None else asyncio.get_running_loop().time() + timeout_ms / 1000,
        )

    @property
    def time_left_s(self) -> float | None:
        if self.deadline is None:
            return None
        return max(0.0, self.deadline - asyncio.get_running_loop().time())
