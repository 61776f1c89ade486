"""ChatAnswer: one chat completion, whole or as a stream."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from gateway.call_ids import CallIds
from gateway.conversation import (
    AnswerEvent,
    AnswerParser,
    AnswerParts,
    ArgumentsDelta,
    CallBegins,
    CallEnds,
    Reasoning,
    Text,
)
from gateway.http.openai.answers import Usage
from gateway.http.openai.choices import Collected, UsageCount
from gateway.http.openai.fields import StreamOptions
from gateway.http.openai.logprobs import ChatTokens, RankedTokens
from gateway.http.openai.openai_answer import NO_END, AnswerHead, OpenAIAnswer, end_json
from gateway.http.whole_json import ascii_json, json_string, string_pieces
from gateway.requests.request import Delta
from gateway.token_parts import TokenParts

ROLE = '"delta":{"role":"assistant","content":""}'
"""The first delta of each choice of a stream."""
ROLE_BEFORE_CALLS = '"delta":{"role":"assistant","content":null}'
"""The first delta of each choice if the answers may have calls instead of content."""
NOTHING_NEW = '"delta":{}'
EMPTY_TEXT = '"delta":{"content":""}'
"""The last delta of a choice that has neither text nor calls: as in a whole answer, its content is not null."""


class ChatAnswer(OpenAIAnswer):
    """Writes one chat completion: text, reasoning and calls."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    has_prompt_logprobs_by_choice = False

    def __init__(
        self,
        head: AnswerHead,
        count: UsageCount,
        options: StreamOptions | None,
        tokens: ChatTokens | None,
        parsers: Sequence[AnswerParser | None],
        ranked_tokens: RankedTokens | None = None,
        *,
        includes_reasoning: bool = True,
        may_call: bool = False,
        texts: Sequence[TokenParts] | None = None,
    ) -> None:
        """`tokens` writes log-probabilities; None if the client does not want them. `parsers`: an entry for each
        choice; None if the choice is only text. `may_call`: answers may have calls. `texts`: for each choice, the
        TokenParts that find the tokens of its text; only these tokens then have log-probabilities. None: all tokens
        have them."""
        logprobs = None if tokens is None else [tokens] * len(parsers)
        super().__init__(head, count, options, len(parsers), logprobs, ranked_tokens)
        self._parsers = parsers
        self._texts = texts
        self._includes_reasoning = includes_reasoning
        self._role = ROLE_BEFORE_CALLS if may_call else ROLE
        self._call_ids = [CallIds() for _ in parsers]
        self._ends_with_call = [False] * len(parsers)
        """For each choice: whether its last call is complete. Calls never overlap, so then all its calls are
        complete."""
        self._has_content = [not may_call] * len(parsers)
        """For each choice of a stream: whether it has text (ROLE has an empty one) or calls."""

    def opening(self) -> bytes:
        usage = self._usage_so_far
        events = (self._event(index, self._role, usage=usage) for index in range(len(self._choices)))
        return "".join(events).encode("ascii")

    def piece(self, index: int, delta: Delta) -> bytes:
        return super().piece(index, self._with_logprobs_of_text(index, delta))

    def on_delta(self, index: int, delta: Delta) -> None:
        super().on_delta(index, self._with_logprobs_of_text(index, delta))

    def _with_logprobs_of_text(self, index: int, delta: Delta) -> Delta:
        if self._texts is None:
            return delta
        logprobs = self._texts[index].on_tokens(delta.token_ids, delta.logprobs)
        if delta.finish is not None:
            logprobs += self._texts[index].flush()
        return replace(delta, logprobs=tuple(each for _, each in logprobs))

    def _events(self, index: int, delta: Delta, logprobs: str, usage: Usage | None) -> str:
        events = self._events_of(index, delta)
        if events is None:
            end = NO_END if delta.finish is None else end_json(delta.finish)
            content = f'"delta":{{"content":{ascii_json(delta.text)}}}'
            return self._event(index, content, logprobs, end, usage)
        written = ""
        for content, end in self._contents(index, delta, events):
            written += self._event(index, content, logprobs, end, usage)
            logprobs = "null"
        return written

    def _contents(self, index: int, delta: Delta, events: Sequence[AnswerEvent]) -> list[tuple[str, str]]:
        """The contents of the delta's events in JSON, each with the JSON of its end. While the parser waits for
        more text, there are no contents. If the delta has log-probabilities, an empty content then carries them. The
        finish reason has a separate event, as in OpenAI's streams of calls."""
        joined = _joined(events)
        contents = [(content, NO_END) for event in joined if (content := self._content(index, event))]
        if delta.finish is not None:
            last = NOTHING_NEW if self._has_content[index] else EMPTY_TEXT
            contents.append((last, end_json(delta.finish, self._ends_with_call[index])))
        if delta.logprobs and not contents:
            contents.append((NOTHING_NEW, NO_END))
        return contents

    def _whole_content(self, index: int, choice: Collected) -> Iterator[str]:
        """The JSON of a ChatMessageAnswer."""
        parts = choice.parts
        yield '"message":{"role":"assistant","content":'
        if parts.calls and not parts.text:
            yield "null"
        else:
            yield '"'
            yield from choice.text()
            yield '"'
        yield ',"refusal":null'
        if reasoning := parts.reasoning:
            for key in ("reasoning_content", "reasoning"):
                yield f',"{key}":"'
                yield from string_pieces(reasoning)
                yield '"'
        yield from self._calls(index, parts)
        yield "}"

    def _calls(self, index: int, parts: AnswerParts) -> Iterator[str]:
        before = ',"tool_calls":['
        for number, call in enumerate(parts.calls):
            call_id = self._call_ids[index].of(number)
            name = json_string(call.name)
            yield f'{before}{{"id":"{call_id}","type":"function","function":{{"name":{name},"arguments":"'
            yield from string_pieces(call.arguments)
            yield '"}}'
            before = ","
        if parts.calls:
            yield "]"

    def _events_of(self, index: int, delta: Delta) -> list[AnswerEvent] | None:
        parser = self._parsers[index]
        if parser is None:
            return None
        events = delta.events(parser)
        if self._includes_reasoning:
            return events
        return [event for event in events if not isinstance(event, Reasoning)]

    def _content(self, index: int, event: AnswerEvent) -> str | None:
        self._has_content[index] |= isinstance(event, Text | CallBegins)
        match event:
            case Text(text):
                return f'"delta":{{"content":{ascii_json(text)}}}'
            case Reasoning(text):
                reasoning = ascii_json(text)
                return f'"delta":{{"reasoning_content":{reasoning},"reasoning":{reasoning}}}'
            case CallBegins(number, name):
                self._ends_with_call[index] = False
                call_id = self._call_ids[index].of(number)
                function = f'{{"name":{ascii_json(name)},"arguments":""}}'
                call = f'{{"index":{number},"id":"{call_id}","type":"function","function":{function}}}'
            case ArgumentsDelta(number, json):
                call = f'{{"index":{number},"function":{{"arguments":{ascii_json(json)}}}}}'
            case CallEnds():
                self._ends_with_call[index] = True
                return None
        return f'"delta":{{"tool_calls":[{call}]}}'


def _joined(events: Sequence[AnswerEvent]) -> Iterator[AnswerEvent]:
    """Joins adjacent events of the same kind, so that they are sent as one."""
    waiting: AnswerEvent | None = None
    for event in events:
        match waiting, event:
            case Text(before), Text(text):
                waiting = Text(before + text)
            case Reasoning(before), Reasoning(text):
                waiting = Reasoning(before + text)
            case ArgumentsDelta(number, before), ArgumentsDelta(_, json):
                waiting = ArgumentsDelta(number, before + json)
            case _:
                if waiting is not None:
                    yield waiting
                waiting = event
    if waiting is not None:
        yield waiting
