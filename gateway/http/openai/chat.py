"""ChatAnswer: one chat completion, whole or as a stream."""

from collections.abc import Iterator, Sequence

from gateway.http.openai.answers import Usage
from gateway.http.openai.choices import Collected, whole_answer
from gateway.http.openai.events import EventWriter, Head
from gateway.http.openai.logprobs import ChatTokens, LogprobColumns
from gateway.requests.request import Delta

ROLE = '"delta":{"role":"assistant","content":""}'
"""Opens every choice of a stream."""


class ChatAnswer:
    """Writes one chat completion; see `respond.Answer`."""

    def __init__(self, head: Head, num_choices: int, tokens: ChatTokens | None) -> None:
        """`tokens` writes log-probabilities, if they are asked for."""
        self._head = head
        self._num_choices = num_choices
        self._tokens = tokens

    def events(self, says_usage: bool) -> EventWriter:
        return EventWriter(
            self._head,
            object="chat.completion.chunk",
            before_text='"delta":{"content":',
            after_text="}",
            logprobs_of=None if self._tokens is None else self._logprobs,
            says_usage=says_usage,
        )

    def opening(self, events: EventWriter) -> bytes:
        return b"".join(events.opening(index, ROLE) for index in range(self._num_choices))

    def whole(self, answers: Sequence[Collected], usage: Usage) -> Iterator[str]:
        return whole_answer(self._head, "chat.completion", map(self._choice, answers), usage)

    def _choice(self, answer: Collected) -> Iterator[str]:
        """ChatChoice after its index."""
        yield '"message":{"role":"assistant","content":"'
        yield from answer.text()
        yield '","refusal":null},"logprobs":'
        yield from ("null",) if self._tokens is None else self._tokens.write(answer.logprobs)
        yield f',"finish_reason":"{answer.finish_reason}"}}'

    def _logprobs(self, index: int, delta: Delta) -> Iterator[str]:  # noqa: ARG002 - EventWriter's signature
        assert self._tokens is not None
        return self._tokens.write(LogprobColumns(delta.logprobs))
