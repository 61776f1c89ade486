"""OpenAIAnswer: writes completions or chat completions, as a stream's events or whole.

There is an event per token, so the constant parts are written only once. The JSON of events is ASCII, because
some clients split lines at characters such as U+2028.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from pydantic import TypeAdapter
from pydantic_core import to_json

from baton.request import FinishReason
from gateway.conversation import AnswerEvent
from gateway.http.errors import body_of
from gateway.http.event_stream import blank_lines
from gateway.http.openai.answers import Usage
from gateway.http.openai.choices import Collected, UsageCount
from gateway.http.openai.fields import StreamOptions
from gateway.http.openai.logprobs import (
    ChatTokens,
    CompletionLogprobsStream,
    LogprobColumns,
    RankedTokens,
)
from gateway.http.whole_json import ascii_json, in_ascii
from gateway.requests.request import Delta, Finish

DONE = b"data: [DONE]\n\n"

NO_END = '"finish_reason":null'
"""The end of an event's choice if more follows."""

_USAGE = TypeAdapter(Usage)


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """The values at the beginning of an answer, and of each chunk of a stream."""

    id: str
    created: int
    model: str

    def json(self, kind: str) -> str:
        """The JSON up to the first choice. `kind`: the value of `object`."""
        head = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return f'{to_json(head).decode()[:-1]},"choices":['


class OpenAIAnswer(ABC):
    """An Answer (see gateway.http.generated) in one of the API's two shapes. A subclass writes what a choice
    contains."""

    kind: ClassVar[str]
    """The value of `object` in a whole answer."""
    chunk_kind: ClassVar[str]
    """The value of `object` in a stream's chunks."""
    has_prompt_logprobs_by_choice: ClassVar[bool]
    """True: each choice has vLLM's field `prompt_logprobs`. False: the answer has this field once."""

    def __init__(
        self,
        head: AnswerHead,
        count: UsageCount,
        options: StreamOptions | None,
        num_choices: int,
        logprobs: Sequence[ChatTokens] | Sequence[CompletionLogprobsStream] | None,
        ranked_tokens: RankedTokens | None = None,
    ) -> None:
        """`logprobs`: one writer for each choice; None if the client does not want log-probabilities. `ranked_tokens`
        writes the field `prompt_logprobs`; None if the client does not want it."""
        self._head = head
        self._count = count
        options = options or StreamOptions()
        self._says_usage = bool(options.include_usage)
        self._no_usage = ',"usage":null' if self._says_usage else ""
        """Every chunk has the key `usage` if the client asks for usage, as in OpenAI's streams."""
        self._says_usage_so_far = self._says_usage and bool(options.continuous_usage_stats)
        self._choices = [Collected() for _ in range(num_choices)]
        """The choices of a whole answer."""
        self._logprobs = logprobs
        self._ranked_tokens = ranked_tokens
        self._start = in_ascii(f"data: {head.json(self.chunk_kind)}")

    def ping(self) -> bytes:
        return blank_lines()

    @abstractmethod
    def opening(self) -> bytes: ...

    def piece(self, index: int, delta: Delta) -> bytes:
        self._count.on_delta(index, delta)
        logprobs = "null"
        if self._logprobs is not None:
            logprobs = in_ascii("".join(self._logprobs[index].write(LogprobColumns(delta.logprobs))))
        return self._events(index, delta, logprobs, self._usage_so_far).encode("ascii")

    def ending(self) -> bytes:
        """If the client asked for usage, the last chunk has the usage and no choice."""
        if not self._says_usage:
            return DONE
        return f'{self._start}],"usage":{usage_json(self._count.usage)}}}\n\n'.encode("ascii") + DONE

    def failure(self, error: Exception) -> bytes:
        """The event of the error; no [DONE] follows. The event has no name, because some clients read only `data`."""
        return f"data: {json.dumps(body_of(error))}\n\n".encode("ascii")

    def on_delta(self, index: int, delta: Delta) -> None:
        self._count.on_delta(index, delta)
        self._choices[index].on_delta(delta, self._events_of(index, delta))
        if self._ranked_tokens is not None and delta.prompt_logprobs:
            self._choices[index].prompt_logprobs.extend(tuple(delta.prompt_logprobs))

    def whole(self) -> Iterator[str]:
        yield self._head.json(self.kind)
        for index, choice in enumerate(self._choices):
            yield f'{"," if index else ""}{{"index":{index},'
            yield from self._whole_content(index, choice)
            yield ',"logprobs":'
            yield from ("null",) if self._logprobs is None else self._logprobs[index].write(choice.logprobs)
            assert choice.finish is not None
            yield f",{end_json(choice.finish, choice.parts.ends_with_calls)}"
            if self.has_prompt_logprobs_by_choice:
                yield from self._prompt_logprobs(choice)
            yield "}"
        yield f'],"usage":{usage_json(self._count.usage)}'
        if not self.has_prompt_logprobs_by_choice:
            yield from self._prompt_logprobs(self._choices[0])
        yield "}"

    def _prompt_logprobs(self, choice: Collected) -> Iterator[str]:
        if self._ranked_tokens is not None:
            yield ',"prompt_logprobs":'
            yield from self._ranked_tokens.write(choice.prompt_logprobs)

    @property
    def _usage_so_far(self) -> Usage | None:
        """The usage that each event has; None if the client did not ask for it."""
        return self._count.usage if self._says_usage_so_far else None

    def _event(
        self,
        index: int,
        content: str,
        logprobs: str = "null",
        end: str = NO_END,
        usage: Usage | None = None,
    ) -> str:
        """An event of a stream, with one choice. `content`: the JSON between the choice's index and its
        log-probabilities. `end`: the JSON after them."""
        usage_field = self._no_usage if usage is None else f',"usage":{usage_json(usage)}'
        return f'{self._start}{{"index":{index},{content},"logprobs":{logprobs},{end}}}]{usage_field}}}\n\n'

    def _events_of(self, _index: int, _delta: Delta) -> list[AnswerEvent] | None:
        """The events of a delta of a choice; None if the choice is only text, as it is by default."""
        return None

    @abstractmethod
    def _events(self, index: int, delta: Delta, logprobs: str, usage: Usage | None) -> str:
        """The events of a delta. The first event has `logprobs`, the delta's log-probabilities in JSON."""

    @abstractmethod
    def _whole_content(self, index: int, choice: Collected) -> Iterator[str]:
        """The JSON between a choice's index and log-probabilities, in pieces."""


def end_json(finish: Finish, ends_with_calls: bool = False) -> str:
    """The JSON of `finish_reason` and of vLLM's field `stop_reason`. `ends_with_calls`: all calls of the answer are
    complete, and there is at least one."""
    is_call = ends_with_calls and finish.reason is FinishReason.STOP
    reason = "tool_calls" if is_call else finish.reason.value
    return f'"finish_reason":"{reason}","stop_reason":{ascii_json(finish.stop_reason)}'


def usage_json(usage: Usage) -> str:
    return _USAGE.dump_json(usage).decode()
