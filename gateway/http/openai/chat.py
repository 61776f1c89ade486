"""ChatAnswer: one chat completion, whole or as a stream."""

from collections.abc import Iterator

from gateway.http.openai.answers import Usage
from gateway.http.openai.chat_parts import ChatParts
from gateway.http.openai.choices import Collected, UsageCount
from gateway.http.openai.fields import StreamOptions
from gateway.http.openai.logprobs import ChatTokens
from gateway.http.openai.openai_answer import FINISH_REASONS, Head, OpenAIAnswer, ascii_json
from gateway.requests.request import Delta

ROLE = '"delta":{"role":"assistant","content":""}'
"""The first delta of each choice of a stream."""
ROLE_BEFORE_CALLS = '"delta":{"role":"assistant","content":null}'
"""The first delta of each choice if the answers may have calls instead of content."""


class ChatAnswer(OpenAIAnswer):
    """Writes one chat completion."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(
        self,
        head: Head,
        count: UsageCount,
        options: StreamOptions | None,
        tokens: ChatTokens | None,
        parts: ChatParts | None = None,
        may_call: bool = False,
    ) -> None:
        """`tokens` writes log-probabilities; None if the client does not want them. `parts`: None if the
        answers are only text. `may_call`: answers may have calls."""
        indices = range(count.num_samples)
        choices = [Collected() if parts is None else parts.collector(index) for index in indices]
        super().__init__(head, count, options, choices, None if tokens is None else [tokens] * len(choices))
        self._parts = parts
        self._role = ROLE_BEFORE_CALLS if may_call else ROLE

    def opening(self) -> bytes:
        return "".join(self._event(index, self._role) for index in range(len(self._choices))).encode("ascii")

    def _events(self, index: int, delta: Delta, logprobs: str, usage: Usage | None) -> str:
        if self._parts is None:
            reason = FINISH_REASONS[delta.finish.reason if delta.finish else None]
            content = f'"delta":{{"content":{ascii_json(delta.text)}}}'
            return self._event(index, content, logprobs, reason, usage)
        events = ""
        for content, reason in self._parts.contents(index, delta):
            events += self._event(index, content, logprobs, reason, usage)
            logprobs = "null"
        return events

    def _whole_content(self, index: int, choice: Collected) -> Iterator[str]:
        yield '"message":{"role":"assistant"'
        if self._parts is None:
            yield ',"content":"'
            yield from choice.text()
            yield '","refusal":null}'
        else:
            yield from self._parts.message(index, choice)

    def _finish_reason(self, choice: Collected) -> str:
        return choice.finish_reason if self._parts is None else self._parts.finish_reason(choice)
