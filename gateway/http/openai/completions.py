"""CompletionAnswer: the answer to one or more prompts, whole or as a stream."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from baton.request import FinishReason
from gateway.http.openai.answers import Usage
from gateway.http.openai.choices import Collected, UsageCount
from gateway.http.openai.fields import StreamOptions
from gateway.http.openai.logprobs import CompletionLogprobsStream, RankedTokens
from gateway.http.openai.openai_answer import NO_END, AnswerHead, OpenAIAnswer, end_json
from gateway.http.whole_json import ascii_json, string_pieces
from gateway.requests.request import Delta


class CompletionAnswer(OpenAIAnswer):
    """Writes one completion."""

    kind = chunk_kind = "text_completion"
    has_prompt_logprobs_by_choice = True

    def __init__(
        self,
        head: AnswerHead,
        count: UsageCount,
        options: StreamOptions | None,
        echoes: Sequence[str],
        logprobs: Sequence[CompletionLogprobsStream] | None,
        ranked_tokens: RankedTokens | None = None,
        *,
        is_echo: bool = False,
        is_only_echo: bool = False,
    ) -> None:
        """`echoes`: the text before each choice's text. `logprobs`: one writer for each choice; None if the
        client does not want log-probabilities. `is_echo`: log-probabilities begin with those of the prompt.
        `is_only_echo`: the client does not want the answer's tokens.
        """
        super().__init__(head, count, options, len(echoes), logprobs, ranked_tokens)
        self._echoes = echoes
        self._echoes_logprobs = is_echo and logprobs is not None
        self._is_only_echo = is_only_echo
        self._unsent = dict(enumerate(echoes)) if self._echoes_logprobs else {}
        """For each choice: the prompt's text, which a stream sends with the choice's first log-probabilities."""

    def opening(self) -> bytes:
        if self._echoes_logprobs:
            return b""
        usage = self._usage_so_far
        echoes = [(index, ascii_json(echo)) for index, echo in enumerate(self._echoes) if echo]
        events = (self._event(index, f'"text":{echo}', usage=usage) for index, echo in echoes)
        return "".join(events).encode("ascii")

    def piece(self, index: int, delta: Delta) -> bytes:
        shown = self._shown(delta)
        if (echo := self._unsent.pop(index, None)) is not None:
            shown = replace(shown, text=echo + shown.text)
        return super().piece(index, shown)

    def on_delta(self, index: int, delta: Delta) -> None:
        super().on_delta(index, self._shown(delta))

    def _shown(self, delta: Delta) -> Delta:
        """What the client sees of a delta, with the log-probabilities of the prompt among those of the answer."""
        if self._is_only_echo:
            finish = delta.finish and replace(delta.finish, reason=FinishReason.LENGTH, stop_reason=None)
            delta = Delta(finish=finish, prompt_logprobs=delta.prompt_logprobs)
        if self._echoes_logprobs and delta.prompt_logprobs:
            delta = replace(delta, logprobs=(*delta.prompt_logprobs, *delta.logprobs))
        return delta

    def _events(self, index: int, delta: Delta, logprobs: str, usage: Usage | None) -> str:
        end = NO_END if delta.finish is None else end_json(delta.finish)
        return self._event(index, f'"text":{ascii_json(delta.text)}', logprobs, end, usage)

    def _whole_content(self, index: int, choice: Collected) -> Iterator[str]:
        yield '"text":"'
        yield from string_pieces(self._echoes[index])
        yield from choice.text()
        yield '"'
