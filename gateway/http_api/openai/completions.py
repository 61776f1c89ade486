"""CompletionAnswer: one completion of one prompt or several, whole or as a stream."""

import json
from collections.abc import Sequence

from gateway.http_api.openai.answers import Completion, CompletionChoice, CompletionLogprobs, Usage
from gateway.http_api.openai.choices import Collected
from gateway.http_api.openai.events import EventWriter, Head
from gateway.http_api.openai.logprobs import CompletionLogprobsStream
from gateway.requests.client_request import Delta


class CompletionAnswer:
    """How one completion is written; see `respond.Answer`."""

    def __init__(
        self, head: Head, echoes: Sequence[str], logprobs: Sequence[CompletionLogprobsStream] | None
    ) -> None:
        """`echoes`: what goes before each choice's text; `logprobs`: one for each choice, if they are asked for."""
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

    def whole(self, answers: Sequence[Collected], usage: Usage) -> Completion:
        head = self._head
        choices = [
            CompletionChoice(
                index,
                self._echoes[index] + answer.text,
                None if self._logprobs is None else self._logprobs[index].push(answer.logprobs),
                answer.finish_reason,
            )
            for index, answer in enumerate(answers)
        ]
        return Completion(head.id, "text_completion", head.created, head.model, choices, usage)

    def _logprobs_of(self, index: int, delta: Delta) -> CompletionLogprobs:
        assert self._logprobs is not None
        return self._logprobs[index].push(delta.logprobs)
