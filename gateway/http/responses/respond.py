"""Responding: generates one response, sends it whole or as a stream, and stores it at its end."""

import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from baton.errors import InvalidRequest, Overloaded, RequestAborted, StoreUnavailable
from baton.request import FinishReason
from gateway.choices import in_turns
from gateway.http.errors import message_of
from gateway.http.event_stream import EventSender, EventStream, while_connected
from gateway.http.generated import answering, log_if_internal
from gateway.http.openai.logprobs import ChatTokens
from gateway.http.responses.answers import ErrorCode, IncompleteDetails, ResponseError
from gateway.http.responses.create_request import CLIENT_NAMES
from gateway.http.responses.events import ResponseEvents
from gateway.http.responses.history import History, context_pieces
from gateway.http.responses.output import Change, ResponseOutput
from gateway.http.responses.response_json import ResponseJson, ResponseState, usage_of
from gateway.http.responses.store import RunningResponse, RunningResponses, StoredResponse
from gateway.http.whole_json import portions, send_json
from gateway.requests.driver import RequestDriver
from gateway.requests.request import Delta, Finish, GatewayRequest
from gateway.token_parts import TokenParts

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Generation:
    """What to generate, and where to store the result."""

    request: GatewayRequest
    response: ResponseJson
    history: History
    own_items: Sequence[dict[str, Any]]
    stored_by: RunningResponses | None
    """Stores the response. None: the response is not stored."""
    namespaces: Mapping[str, tuple[str, str]]
    """For each function's name that the model knows: the function's namespace, and its name there."""


class Responding(Response):
    """Generates the answer while it sends it. If the client disconnects, its request ends on all workers, and
    nothing is stored.

    Errors are raised until the status is sent, so the HTTP response has an error status. A stream sends its status with
    the first event or the first ping; a later error ends it with `response.failed`.
    """

    def __init__(
        self, driver: RequestDriver, generation: Generation, tokens: ChatTokens | None, *, is_stream: bool
    ) -> None:
        """`tokens` writes log-probabilities; None if the client does not want them."""
        super().__init__()
        self._driver = driver
        self._generation = generation
        self._is_stream = is_stream
        self._parts = TokenParts(generation.request)
        self._output = ResponseOutput(generation.request.request_id, tokens, generation.namespaces)
        self._parser = generation.request.new_parser()
        self._num_tokens = 0
        self._finish: Finish | None = None
        self._running: RunningResponse | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        generation = self._generation
        if generation.stored_by is not None:
            self._running = generation.stored_by.begin(generation.request.caller.name, generation.response.id)
        try:
            if self._is_stream:
                events = ResponseEvents(generation.response)
                await EventStream(partial(self._stream, events), events.ping)(scope, receive, send)
            else:
                await while_connected(receive, self._send_whole(send))
        finally:
            if self._running is not None:
                self._running.end()

    async def _send_whole(self, send: Send) -> None:
        try:
            async with answering(self._driver, [self._generation.request], CLIENT_NAMES) as batches:
                async for _, delta in in_turns(batches):
                    for _change in self._changes(delta):
                        pass
        except RequestAborted as error:
            await self._store_cancelled(error)
            raise
        state = self._end_state()
        await self._store(state)
        await send_json(self._generation.response.pieces(state, self._output.items), send)

    async def _stream(self, events: ResponseEvents, send: EventSender) -> None:
        """Sends the events of each delta without delay."""
        try:
            async with answering(self._driver, [self._generation.request], CLIENT_NAMES) as batches:
                async for _, delta in in_turns(batches):
                    await send.send_pieces(chain(events.opening(), events.of(self._changes(delta))))
            state = self._end_state()
            await self._store(state)
        except Exception as error:
            if not send.has_begun:
                if isinstance(error, RequestAborted):
                    await self._store_cancelled(error)
                raise
            state = self._failed_state(error)
            await send.send_pieces(events.of(self._output.end(is_cut=True)))
            if not isinstance(error, StoreUnavailable):
                await self._store_if_possible(state)
        await send.send_pieces(events.ending(state, self._output.items))

    def _changes(self, delta: Delta) -> Iterator[Change]:
        """The changes that a delta causes. Use up this iterator before the next delta."""
        self._num_tokens += len(delta.token_ids)
        logprobs = self._parts.on_tokens(delta.token_ids, delta.logprobs)
        if delta.finish is not None:
            logprobs += self._parts.flush()
        yield from self._output.on_events(delta.events(self._parser), logprobs)
        if delta.finish is not None:
            self._finish = delta.finish
            yield from self._output.end(is_cut=delta.finish.reason is FinishReason.LENGTH)

    def _end_state(self) -> ResponseState:
        assert self._finish is not None, "an answer ends with its finish"
        is_cut = self._finish.reason is FinishReason.LENGTH
        num_input = len(self._generation.request.prompt_token_ids)
        return ResponseState(
            status="incomplete" if is_cut else "completed",
            completed_at=None if is_cut else int(time.time()),
            incomplete_details=IncompleteDetails("max_output_tokens") if is_cut else None,
            usage=usage_of(
                num_input, self._finish.num_cached_tokens, self._num_tokens, self._parts.num_reasoning_tokens
            ),
        )

    def _failed_state(self, error: Exception) -> ResponseState:
        if type(error) is RequestAborted:
            return ResponseState(status="cancelled")
        log_if_internal(error, self._generation.request.request_id)
        code: ErrorCode = "server_error"
        if isinstance(error, Overloaded):
            code = "rate_limit_exceeded"
        elif isinstance(error, InvalidRequest):
            code = "invalid_prompt"
        return ResponseState(status="failed", error=ResponseError(code, message_of(error)))

    async def _store_cancelled(self, error: RequestAborted) -> None:
        """Stores a cancelled response of which the client has seen nothing. RequestAborted has subclasses,
        such as a deadline's error; after one of these, nothing is stored."""
        if type(error) is RequestAborted:
            for _change in self._output.end(is_cut=True):
                pass
            await self._store_if_possible(ResponseState(status="cancelled"))

    async def _store_if_possible(self, state: ResponseState) -> None:
        try:
            await self._store(state)
        except Exception as error:  # the client gets the first error
            logger.warning("a response that ended early was not stored: %s", error)

    async def _store(self, state: ResponseState) -> None:
        generation = self._generation
        if self._running is None:
            return
        items = self._output.items
        response = await _joined(generation.response.pieces(state, items))
        context = await _joined(context_pieces(generation.history, generation.own_items, items))
        await self._running.keep(StoredResponse(response, context))


async def _joined(pieces: Iterable[str]) -> bytes:
    """Joins the pieces. Other tasks may run in between."""
    return "".join([portion async for portion in portions(pieces)]).encode()
