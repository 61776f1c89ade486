"""HttpCall: the properties of an HTTP call that are not in its body; the same for every API."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Self

from fastapi import Header
from starlette.requests import Request

from baton.sampling import SamplingParams
from gateway.auth.callers import Caller
from gateway.call_ids import TraceContext
from gateway.http.request_ids import shown_id, trace_of
from gateway.http.request_limits import HOLD, HOLD_TO_END
from gateway.http.sampling_fields import SamplingFields
from gateway.preprocess import ClientRequest, Preprocessor, Prompt
from gateway.requests.request import GatewayRequest

TIMEOUT_HEADER = "x-request-timeout-ms"
MAX_TIMEOUT_MS = 24 * 3600 * 1000

TimeoutMs = Annotated[
    int | None,
    Header(
        alias=TIMEOUT_HEADER,
        ge=1,
        le=MAX_TIMEOUT_MS,
        description="After how many milliseconds the client gives up; unfinished work then ends on all workers.",
    ),
]


@dataclass(frozen=True, slots=True)
class HttpCall:
    """A request's properties outside of its body."""

    request_id: str
    shown_id: str
    """The id that headers and errors show to the client."""
    api: str
    caller: Caller
    trace: TraceContext | None
    deadline: float | None
    """When the client stops waiting, on the event loop's clock; None: the client waits without limit."""
    hold: Callable[[int], None] = field(default=lambda _: None, compare=False, repr=False)
    """Counts bytes as a part of the request's body; see HOLD."""
    hold_to_end: Callable[[int], None] = field(default=lambda _: None, compare=False, repr=False)
    """Counts bytes until the request has ended; see HOLD_TO_END."""

    @classmethod
    def of(cls, request: Request, api: str, timeout_ms: int | None, request_id: str | None = None) -> Self:
        """The properties of a call. `request_id`: the id in the body, which becomes the request's id. None: the request
        keeps the id that `RequestIds` set."""
        if request_id is not None:
            request.state.request_id = request_id
        return cls(
            request.state.request_id,
            shown_id(request.scope["state"]),
            api,
            request.state.caller,
            trace_of(request.headers),
            None if timeout_ms is None else asyncio.get_running_loop().time() + timeout_ms / 1000,
            request.scope["state"][HOLD],
            request.scope["state"][HOLD_TO_END],
        )

    async def preprocess(
        self,
        preprocessor: Preprocessor,
        body: SamplingFields,
        prompt: Prompt,
        params: SamplingParams,
        *,
        affinity_key: str | None = None,
        keep_special_tokens: bool = False,
    ) -> GatewayRequest:
        """A request with this prompt, and with the fields of `body` that are not in `params`; see
        Preprocessor."""
        client_request = ClientRequest(
            prompt=prompt,
            params=params,
            unset=body.unset,
            request_id=self.request_id,
            keep_special_tokens=keep_special_tokens,
            priority=body.priority or 0,
            cache_salt=body.cache_salt,
            skip_reading_prefix_cache=bool(body.skip_reading_prefix_cache),
            affinity_key=affinity_key,
            max_model_len=body.max_model_len,
            mode=body.mode,
            deadline=self.deadline,
            caller=self.caller,
            api=self.api,
            trace=self.trace,
        )
        return await preprocessor.preprocess(client_request)
