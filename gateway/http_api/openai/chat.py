"""ChatAnswer: one chat completion, whole or as a stream."""

from collections.abc import Sequence

from gateway.http_api.openai.answers import ChatChoice, ChatCompletion, ChatLogprobs, ChatMessageAnswer, Usage
from gateway.http_api.openai.choices import Collected
from gateway.http_api.openai.events import EventWriter, Head
from gateway.http_api.openai.logprobs import chat_logprobs
from gateway.requests.client_request import Delta
from gateway.text import Tokenizer

ROLE = '"delta":{"role":"assistant","content":""}'
"""Opens every choice of a stream."""


class ChatAnswer:
    """How one chat completion is written; see `respond.Answer`."""

    def __init__(self, head: Head, num_choices: int, tokenizer: Tokenizer, has_logprobs: bool) -> None:
        self._head = head
        self._num_choices = num_choices
        self._tokenizer = tokenizer
        self._has_logprobs = has_logprobs

    def events(self, says_usage: bool) -> EventWriter:
        return EventWriter(
            self._head,
            object="chat.completion.chunk",
            before_text='"delta":{"content":',
            after_text="}",
            logprobs_of=self._logprobs if self._has_logprobs else None,
            says_usage=says_usage,
        )

    def opening(self, events: EventWriter) -> bytes:
        return b"".join(events.opening(index, ROLE) for index in range(self._num_choices))

    def whole(self, answers: Sequence[Collected], usage: Usage) -> ChatCompletion:
        head = self._head
        choices = [
            ChatChoice(
                index,
                ChatMessageAnswer("assistant", answer.text),
                chat_logprobs(self._tokenizer, answer.logprobs) if self._has_logprobs else None,
                answer.finish_reason,
            )
            for index, answer in enumerate(answers)
        ]
        return ChatCompletion(head.id, "chat.completion", head.created, head.model, choices, usage)

    def _logprobs(self, index: int, delta: Delta) -> ChatLogprobs:  # noqa: ARG002 - EventWriter's signature
        return chat_logprobs(self._tokenizer, delta.logprobs)
