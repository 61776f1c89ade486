"""A stream's answer as server-sent events: everything that does not change is written once, since there is an event for
every token.

JSON is ASCII here, as some clients split lines at U+2028 and its like.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pydantic import TypeAdapter

from baton.request import FinishReason
from gateway.http_api.openai.answers import ChatLogprobs, CompletionLogprobs, Usage
from gateway.requests.client_request import Delta

DONE = b"data: [DONE]\n\n"

AnyLogprobs = ChatLogprobs | CompletionLogprobs
LogprobsOf = Callable[[int, Delta], AnyLogprobs]
"""Of a choice's delta, in the shape of its API."""

FINISH_REASONS = {
    None: "null",
    FinishReason.STOP: '"stop"',
    FinishReason.LENGTH: '"length"',
}

_text = json.JSONEncoder().encode
_LOGPROBS: TypeAdapter[AnyLogprobs] = TypeAdapter(AnyLogprobs)
_USAGE = TypeAdapter(Usage)


@dataclass(frozen=True, slots=True)
class Head:
    """What all of an answer's chunks begin with."""

    id: str
    created: int
    model: str


@dataclass(slots=True)
class EventWriter:
    """Writes one answer's events. `before_text` and `after_text` stand around a piece of text in a choice."""

    head: Head
    object: str
    before_text: str
    after_text: str
    logprobs_of: LogprobsOf | None = None
    says_usage: bool = False
    """Every chunk has the key `usage`, as OpenAI does once a client wants to know."""
    _start: str = field(init=False)

    def __post_init__(self) -> None:
        head = {
            "id": self.head.id,
            "object": self.object,
            "created": self.head.created,
            "model": self.head.model,
        }
        self._start = f'data: {json.dumps(head, separators=(",", ":"))[:-1]},"choices":['

    def piece(self, index: int, delta: Delta, usage: Usage | None = None) -> bytes:
        """What is new of one choice."""
        logprobs = "null"
        if self.logprobs_of is not None:
            logprobs = _LOGPROBS.dump_json(self.logprobs_of(index, delta), ensure_ascii=True).decode()
        reason = FINISH_REASONS[delta.finish.reason if delta.finish else None]
        return self._event(
            index, f"{self.before_text}{_text(delta.text)}{self.after_text}", logprobs, reason, usage
        )

    def opening(self, index: int, content: str) -> bytes:
        """Before a choice's first piece; `content` is JSON, as between index and log-probabilities."""
        return self._event(index, content, "null", "null", None)

    def total(self, usage: Usage) -> bytes:
        """The event that has no choice."""
        return f'{self._start}],"usage":{_USAGE.dump_json(usage).decode()}}}\n\n'.encode("ascii")

    def _event(self, index: int, content: str, logprobs: str, reason: str, usage: Usage | None) -> bytes:
        end = ""
        if self.says_usage:
            end = ',"usage":' + ("null" if usage is None else _USAGE.dump_json(usage).decode())
        return (
            f'{self._start}{{"index":{index},{content},"logprobs":{logprobs},"finish_reason":{reason}}}]{end}}}\n\n'
        ).encode("ascii")


def error_event(body: dict[str, Any]) -> bytes:
    """The last event of a stream that fails, which no [DONE] follows. Nameless: some clients read `data` alone."""
    return f"data: {json.dumps(body)}\n\n".encode("ascii")
