"""MessageAnswer: one message, whole or as a stream."""

from collections.abc import Iterator

from baton.request import FinishReason
from gateway.http.anthropic.answers import MessageEnd, MessageTokensDetails, MessageUsage
from gateway.http.anthropic.content import BlockStep, ContentBlocks
from gateway.http.anthropic.events import PING, EventWriter, error_event
from gateway.http.anthropic.whole import CollectedMessage, MessageHead
from gateway.http.dialects import Dialect
from gateway.http.error_shapes import anthropic_error
from gateway.http.errors import message_of, status_of
from gateway.http.openai.choices import UsageCount
from gateway.requests.request import Delta, Finish, GatewayRequest


class MessageAnswer:
    """An Answer (see gateway.http.generated): one message."""

    def __init__(
        self,
        request: GatewayRequest,
        head: MessageHead,
        shown_id: str,
        *,
        shows_thinking: bool,
        max_tokens: int,
    ) -> None:
        """`shown_id`: the call's id that the headers show; errors repeat it. `max_tokens`: the value in the client's
        body; the request may have a smaller value if the prompt leaves less room."""
        self._head = head
        self._shown_id = shown_id
        self._is_capped = request.sampling_params.max_tokens < max_tokens
        self._blocks = ContentBlocks(shows_thinking)
        self._parser = request.new_parser()
        self._count = UsageCount.of([request], 1, counts_reasoning=True)
        self._events = EventWriter(head)
        self._message = CollectedMessage()
        self._finish: Finish | None = None

    def ping(self) -> bytes:
        return PING

    def opening(self) -> bytes:
        return self._events.opening(self._usage)

    def piece(self, index: int, delta: Delta) -> bytes:
        piece = self._events.steps(self._steps(index, delta))
        if delta.finish is None:
            return piece
        last = self._events.steps(self._blocks.end())
        return piece + last + self._events.closing(self._stop(delta.finish), self._usage)

    def ending(self) -> bytes:
        return b""

    def failure(self, error: Exception) -> bytes:
        status = status_of(error, Dialect.ANTHROPIC)
        return error_event(anthropic_error(status, message_of(error), self._shown_id))

    def on_delta(self, index: int, delta: Delta) -> None:
        self._message.on_steps(self._steps(index, delta))
        self._finish = delta.finish

    def whole(self) -> Iterator[str]:
        assert self._finish is not None, "an answer ends with its finish"
        return self._message.write(self._head, self._stop(self._finish), self._usage)

    def _steps(self, index: int, delta: Delta) -> list[BlockStep]:
        self._count.on_delta(index, delta)
        return self._blocks.on_events(delta.events(self._parser))

    @property
    def _usage(self) -> MessageUsage:
        """The usage so far. The number of cached prompt tokens is only known at the answer's end."""
        count = self._count
        return MessageUsage(
            input_tokens=count.num_prompt_tokens - count.num_cached_tokens,
            cache_creation_input_tokens=0,
            cache_read_input_tokens=count.num_cached_tokens,
            output_tokens=count.num_completion_tokens,
            output_tokens_details=MessageTokensDetails(count.num_reasoning_tokens),
        )

    def _stop(self, finish: Finish) -> MessageEnd:
        if finish.reason is FinishReason.LENGTH:
            return MessageEnd("model_context_window_exceeded" if self._is_capped else "max_tokens", None)
        if finish.matched_stop is not None:
            return MessageEnd("stop_sequence", finish.matched_stop)
        return MessageEnd("tool_use" if self._blocks.asks_for_results else "end_turn", None)
