"""MessageResponse: the HTTP response with a message, whole or as server-sent events."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from baton.request import FinishReason
from gateway.choices import AnswerParsers, in_turns
from gateway.error_codes import codes_of
from gateway.http.answering import answering
from gateway.http.anthropic.answers import OutputTokensDetails, Stop, Usage
from gateway.http.anthropic.content import ContentBlocks
from gateway.http.anthropic.events import EventWriter, error_event
from gateway.http.anthropic.whole import CollectedMessage, Head
from gateway.http.dialects import Dialect
from gateway.http.error_shapes import anthropic_error
from gateway.http.errors import message_of, status_of
from gateway.http.event_stream import EventStream, Write, while_connected
from gateway.http.request_ids import shown_id
from gateway.http.whole_json import send_json
from gateway.requests.driver import RequestDriver
from gateway.requests.request import Delta, Finish, GatewayRequest
from gateway.token_parts import ReasoningCount

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class AnswerCount:
    """Counts the usage of one answer. The number of cached prompt tokens is only known at the answer's
    end."""

    num_prompt_tokens: int
    reasoning: ReasoningCount
    num_output_tokens: int = 0
    num_cached_tokens: int = 0

    def take(self, delta: Delta) -> None:
        self.num_output_tokens += len(delta.token_ids)
        self.reasoning.take(delta.token_ids)
        if delta.finish is not None:
            self.num_cached_tokens = delta.finish.num_cached_tokens

    @property
    def usage(self) -> Usage:
        """The usage so far."""
        return Usage(
            input_tokens=self.num_prompt_tokens - self.num_cached_tokens,
            cache_creation_input_tokens=0,
            cache_read_input_tokens=self.num_cached_tokens,
            output_tokens=self.num_output_tokens,
            output_tokens_details=OutputTokensDetails(self.reasoning.num_tokens),
        )


class MessageResponse(Response):
    """Generates the answer while it sends it. If the client disconnects, its request ends on all workers.

    Errors before the first token are raised, so the response has an error status. A later error becomes a
    stream's last event.
    """

    def __init__(
        self,
        driver: RequestDriver,
        request: GatewayRequest,
        head: Head,
        names: Mapping[str, str],
        *,
        is_stream: bool,
        shows_thinking: bool,
        max_tokens: int,
    ) -> None:
        """`names`: the client's names of fields, by our names. `max_tokens`: the value of the client's body;
        the request may have a smaller value if the prompt leaves less room."""
        super().__init__()
        self._driver = driver
        self._request = request
        self._head = head
        self._names = names
        self._is_stream = is_stream
        self._is_capped = request.sampling_params.max_tokens < max_tokens
        self._blocks = ContentBlocks(shows_thinking)
        self._parsers = AnswerParsers([request])
        self._count = AnswerCount(len(request.prompt_token_ids), ReasoningCount(request))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._is_stream:
            await while_connected(receive, self._send_whole(send))
            return

        async def produce(write: Write) -> None:
            await self._stream(write, shown_id(scope["state"]))

        await EventStream(produce)(scope, receive, send)

    async def _send_whole(self, send: Send) -> None:
        message = CollectedMessage()
        finish: Finish | None = None
        async with answering(self._driver, [self._request], self._names) as batches:
            async for _, delta in in_turns(batches):
                self._count.take(delta)
                message.take(self._blocks.take(self._parsers.events(0, delta)))
                finish = delta.finish
        assert finish is not None
        await send_json(message.write(self._head, self._stop(finish), self._count.usage), send)

    async def _stream(self, write: Write, request_id: str) -> None:
        """Sends the events of each delta without delay."""
        events = EventWriter(self._head)
        is_open = False
        try:
            async with answering(self._driver, [self._request], self._names) as batches:
                async for batch in batches:
                    pieces = [] if is_open else [events.opening(self._count.usage)]
                    for _, delta in batch:
                        pieces.append(self._piece(events, delta))
                    is_open = True
                    await write(b"".join(pieces))
        except Exception as error:
            if not is_open:
                raise
            await write(_last_words(error, request_id))

    def _piece(self, events: EventWriter, delta: Delta) -> bytes:
        self._count.take(delta)
        piece = events.steps(self._blocks.take(self._parsers.events(0, delta)))
        if delta.finish is None:
            return piece
        last = events.steps(self._blocks.end())
        return piece + last + events.closing(self._stop(delta.finish), self._count.usage)

    def _stop(self, finish: Finish) -> Stop:
        if finish.reason is FinishReason.LENGTH:
            return Stop("model_context_window_exceeded" if self._is_capped else "max_tokens", None)
        if finish.matched_stop is not None:
            return Stop("stop_sequence", finish.matched_stop)
        return Stop("tool_use" if self._blocks.asks_for_results else "end_turn", None)


def _last_words(error: Exception, request_id: str) -> bytes:
    if codes_of(error).is_internal:
        extra = {"request_id": request_id}
        logger.error("the stream of request %s failed", request_id, exc_info=error, extra=extra)
    return error_event(anthropic_error(status_of(error, Dialect.ANTHROPIC), message_of(error), request_id))
