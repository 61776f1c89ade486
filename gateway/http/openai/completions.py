"""CompletionAnswer: the answer to one or more prompts, whole or as a stream."""

from collections.abc import Iterator, Sequence

from gateway.http.openai.answers import Usage
from gateway.http.openai.choices import Collected, UsageCount
from gateway.http.openai.fields import StreamOptions
from gateway.http.openai.logprobs import CompletionLogprobsStream
from gateway.http.openai.openai_answer import FINISH_REASONS, AnswerHead, OpenAIAnswer
from gateway.http.whole_json import ascii_json, string_pieces
from gateway.requests.request import Delta


class CompletionAnswer(OpenAIAnswer):
    """Writes one completion."""

    kind = chunk_kind = "text_completion"

    def __init__(
        self,
        head: AnswerHead,
        count: UsageCount,
        options: StreamOptions | None,
        echoes: Sequence[str],
        logprobs: Sequence[CompletionLogprobsStream] | None,
    ) -> None:
        """`echoes`: the text before each choice's text. `logprobs`: one writer for each choice; None if the
        client does not want log-probabilities."""
        super().__init__(head, count, options, len(echoes), logprobs)
        self._echoes = echoes

    def opening(self) -> bytes:
        echoes = [(index, ascii_json(echo)) for index, echo in enumerate(self._echoes) if echo]
        return "".join(self._event(index, f'"text":{echo}') for index, echo in echoes).encode("ascii")

    def _events(self, index: int, delta: Delta, logprobs: str, usage: Usage | None) -> str:
        reason = FINISH_REASONS[delta.finish.reason if delta.finish else None]
        return self._event(index, f'"text":{ascii_json(delta.text)}', logprobs, reason, usage)

    def _whole_content(self, index: int, choice: Collected) -> Iterator[str]:
        yield '"text":"'
        yield from string_pieces(self._echoes[index])
        yield from choice.text()
        yield '"'
