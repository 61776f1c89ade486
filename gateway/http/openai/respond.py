"""Generated: the HTTP response with completions, whole or as server-sent events."""

import logging
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.choices import ChoiceDelta, in_turns
from gateway.error_codes import codes_of
from gateway.http.answering import answering
from gateway.http.errors import body_of
from gateway.http.event_stream import EventStream, Write, while_connected
from gateway.http.openai.answers import Usage
from gateway.http.openai.choices import Collected, UsageCount
from gateway.http.openai.events import DONE, EventWriter, error_event
from gateway.http.openai.fields import StreamOptions
from gateway.http.whole_json import send_json
from gateway.requests.driver import RequestDriver
from gateway.requests.request import GatewayRequest
from gateway.token_parts import ReasoningCount

logger = logging.getLogger(__name__)


class OpenAIAnswer(Protocol):
    """Writes an answer in one of the API's two shapes: completions or chat completions."""

    def events(self, says_usage: bool) -> EventWriter:
        """The writer of a stream's events."""

    def opening(self, events: EventWriter) -> bytes:
        """The events that a stream sends before its first token, in the same write as that token."""

    def collectors(self) -> list[Collected]:
        """One collector for each choice, which collects the whole answer."""

    def whole(self, answers: Sequence[Collected], usage: Usage) -> Iterator[str]:
        """The whole answer, as JSON in pieces that are each quick to make."""


class Generated(Response):
    """Generates the answers while it sends them. If the client disconnects, its requests end on all workers.

    Errors before the first token are raised, so the response has an error status. A later error becomes a
    stream's last event.
    """

    def __init__(
        self,
        driver: RequestDriver,
        requests: Sequence[GatewayRequest],
        num_samples: int,
        answer: OpenAIAnswer,
        stream_options: StreamOptions | None,
        names: Mapping[str, str],
        *,
        is_chat: bool,
    ) -> None:
        """`requests`: `num_samples` requests for each prompt. `stream_options`: None for a whole answer.
        `names`: the client's names of fields, by our names."""
        super().__init__()
        self._driver = driver
        self._requests = requests
        self._answer = answer
        self._stream_options = stream_options
        self._names = names
        prompts = requests[::num_samples]
        num_prompt_tokens = sum(len(prompt.prompt_token_ids) for prompt in prompts)
        says_usage = stream_options is None or bool(stream_options.include_usage)
        reasoning = [ReasoningCount(request) for request in requests] if is_chat and says_usage else None
        self._usage = UsageCount(num_prompt_tokens, num_samples, reasoning)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._stream_options is None:
            await while_connected(receive, self._send_whole(send))
        else:
            await EventStream(partial(self._stream, self._stream_options))(scope, receive, send)

    def _answering(self) -> AbstractAsyncContextManager[AsyncGenerator[Sequence[ChoiceDelta], None]]:
        return answering(self._driver, self._requests, self._names)

    async def _send_whole(self, send: Send) -> None:
        answers = self._answer.collectors()
        async with self._answering() as batches:
            async for index, delta in in_turns(batches):
                self._usage.take(index, delta)
                answers[index].take(delta)
        await send_json(self._answer.whole(answers, self._usage.usage), send)

    async def _stream(self, options: StreamOptions, write: Write) -> None:
        """Sends the events of each delta; events that are available together are sent together."""
        events = self._answer.events(bool(options.include_usage))
        says_usage_so_far = options.continuous_usage_stats and options.include_usage
        opening = self._answer.opening(events)
        is_open = False
        try:
            async with self._answering() as batches:
                async for batch in batches:
                    pieces = [] if is_open else [opening]
                    for index, delta in batch:
                        self._usage.take(index, delta)
                        usage = self._usage.usage if says_usage_so_far else None
                        pieces.append(events.piece(index, delta, usage))
                    is_open = True
                    await write(b"".join(pieces))
            last = events.total(self._usage.usage) + DONE if options.include_usage else DONE
        except Exception as error:
            if not is_open:
                raise
            last = _last_words(error, self._requests[0].request_id)
        await write(last)


def _last_words(error: Exception, request_id: str) -> bytes:
    if codes_of(error).is_internal:
        extra = {"request_id": request_id}
        logger.error("the stream of request %s failed", request_id, exc_info=error, extra=extra)
    return error_event(body_of(error))
