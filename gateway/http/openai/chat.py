"""ChatAnswer: one chat completion, whole or as a stream."""

from collections.abc import Iterator, Sequence

from gateway.http.openai.answers import Usage
from gateway.http.openai.chat_parts import ChatParts
from gateway.http.openai.choices import Collected, whole_answer
from gateway.http.openai.events import EventWriter, Head
from gateway.http.openai.logprobs import ChatTokens, LogprobColumns
from gateway.requests.request import Delta

ROLE = '"delta":{"role":"assistant","content":""}'
"""The first delta of each choice of a stream."""
ROLE_BEFORE_CALLS = '"delta":{"role":"assistant","content":null}'
"""The first delta of each choice if the answers may have calls instead of content."""


class ChatAnswer:
    """Writes one chat completion; see `respond.Answer`."""

    def __init__(
        self,
        head: Head,
        num_choices: int,
        tokens: ChatTokens | None,
        parts: ChatParts | None = None,
        may_call: bool = False,
    ) -> None:
        """`tokens` writes log-probabilities; None if the client does not want them. `parts`: None if the
        answers are only text. `may_call`: answers may have calls."""
        self._head = head
        self._num_choices = num_choices
        self._tokens = tokens
        self._parts = parts
        self._role = ROLE_BEFORE_CALLS if may_call else ROLE

    def events(self, says_usage: bool) -> EventWriter:
        return EventWriter(
            self._head,
            object="chat.completion.chunk",
            before_text='"delta":{"content":',
            after_text="}",
            logprobs_of=None if self._tokens is None else self._logprobs,
            contents_of=None if self._parts is None else self._parts.contents,
            says_usage=says_usage,
        )

    def opening(self, events: EventWriter) -> bytes:
        return b"".join(events.opening(index, self._role) for index in range(self._num_choices))

    def collectors(self) -> list[Collected]:
        if self._parts is None:
            return [Collected() for _ in range(self._num_choices)]
        return [self._parts.collector(index) for index in range(self._num_choices)]

    def whole(self, answers: Sequence[Collected], usage: Usage) -> Iterator[str]:
        choices = (self._choice(index, answer) for index, answer in enumerate(answers))
        return whole_answer(self._head, "chat.completion", choices, usage)

    def _choice(self, index: int, answer: Collected) -> Iterator[str]:
        """The JSON of a ChatChoice, without the beginning up to its index."""
        reason: str = answer.finish_reason
        yield '"message":{"role":"assistant"'
        if self._parts is None:
            yield ',"content":"'
            yield from answer.text()
            yield '","refusal":null}'
        else:
            yield from self._parts.message(index, answer)
            reason = self._parts.finish_reason(answer)
        yield ',"logprobs":'
        yield from ("null",) if self._tokens is None else self._tokens.write(answer.logprobs)
        yield f',"finish_reason":"{reason}"}}'

    def _logprobs(self, index: int, delta: Delta) -> Iterator[str]:  # noqa: ARG002 - EventWriter's signature
        assert self._tokens is not None
        return self._tokens.write(LogprobColumns(delta.logprobs))
