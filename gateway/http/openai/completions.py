"""CompletionAnswer: the answer to one or more prompts, whole or as a stream."""

import json
from collections.abc import Iterator, Sequence

from gateway.http.openai.answers import Usage
from gateway.http.openai.choices import Collected, whole_answer
from gateway.http.openai.events import EventWriter, Head
from gateway.http.openai.logprobs import CompletionLogprobsStream, LogprobColumns
from gateway.http.whole_json import string_pieces
from gateway.requests.request import Delta


class CompletionAnswer:
    """Writes one completion; see `respond.Answer`."""

    def __init__(
        self, head: Head, echoes: Sequence[str], logprobs: Sequence[CompletionLogprobsStream] | None
    ) -> None:
        """`echoes`: the text before each choice's text. `logprobs`: one writer for each choice; None if the
        client does not want log-probabilities."""
        self._head = head
        self._echoes = echoes
        self._logprobs = logprobs

    def events(self, says_usage: bool) -> EventWriter:
        return EventWriter(
            self._head,
            object="text_completion",
            before_text='"text":',
            after_text="",
            logprobs_of=None if self._logprobs is None else self._logprobs_of,
            says_usage=says_usage,
        )

    def opening(self, events: EventWriter) -> bytes:
        return b"".join(
            events.opening(index, f'"text":{json.dumps(echo)}')
            for index, echo in enumerate(self._echoes)
            if echo
        )

    def collectors(self) -> list[Collected]:
        return [Collected() for _ in self._echoes]

    def whole(self, answers: Sequence[Collected], usage: Usage) -> Iterator[str]:
        choices = (self._choice(index, answer) for index, answer in enumerate(answers))
        return whole_answer(self._head, "text_completion", choices, usage)

    def _choice(self, index: int, answer: Collected) -> Iterator[str]:
        """The JSON of a CompletionChoice, without the beginning up to its index."""
        yield '"text":"'
        yield from string_pieces(self._echoes[index])
        yield from answer.text()
        yield '","logprobs":'
        yield from ("null",) if self._logprobs is None else self._logprobs[index].write(answer.logprobs)
        yield f',"finish_reason":"{answer.finish_reason}"}}'

    def _logprobs_of(self, index: int, delta: Delta) -> Iterator[str]:
        assert self._logprobs is not None
        return self._logprobs[index].write(LogprobColumns(delta.logprobs))
