"""Writes a stream's answer as server-sent events.

There is an event per token, so the constant parts are written only once. The JSON is ASCII, because some
clients split lines at characters such as U+2028.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import TypeAdapter

from baton.request import FinishReason
from gateway.http.openai.answers import Usage
from gateway.http.whole_json import in_ascii
from gateway.requests.request import Delta

DONE = b"data: [DONE]\n\n"

LogprobsOf = Callable[[int, Delta], Iterator[str]]
"""Arguments: a choice's index and its delta. Returns the delta's log-probabilities, as JSON in the API's
shape."""

ContentsOf = Callable[[int, Delta], Sequence[tuple[str, str]]]
"""Arguments: a choice's index and its delta. Returns the contents of the delta's events in JSON, each with
its finish reason. The result is empty while the parser still waits for more text."""

FINISH_REASONS = {
    None: "null",
    FinishReason.STOP: '"stop"',
    FinishReason.LENGTH: '"length"',
}

_text = json.JSONEncoder().encode
_USAGE = TypeAdapter(Usage)


@dataclass(frozen=True, slots=True)
class Head:
    """The values at the beginning of each chunk of an answer."""

    id: str
    created: int
    model: str


@dataclass(slots=True)
class EventWriter:
    """Writes one answer's events. `before_text` and `after_text` surround a piece of text in a choice."""

    head: Head
    object: str
    before_text: str
    after_text: str
    logprobs_of: LogprobsOf | None = None
    contents_of: ContentsOf | None = None
    """None: each delta is one piece of text."""
    says_usage: bool = False
    """If true, every chunk has the key `usage`, as in OpenAI's streams if a client asks for usage."""
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
        """The events of one choice's delta. The first event contains its log-probabilities."""
        logprobs = "null"
        if self.logprobs_of is not None:
            logprobs = in_ascii("".join(self.logprobs_of(index, delta)))
        if self.contents_of is not None:
            pieces = []
            for content, reason in self.contents_of(index, delta):
                pieces.append(self._event(index, content, logprobs, reason, usage))
                logprobs = "null"
            return b"".join(pieces)
        reason = FINISH_REASONS[delta.finish.reason if delta.finish else None]
        return self._event(
            index, f"{self.before_text}{_text(delta.text)}{self.after_text}", logprobs, reason, usage
        )

    def opening(self, index: int, content: str) -> bytes:
        """The event before a choice's first piece. `content`: the JSON between its index and
        log-probabilities."""
        return self._event(index, content, "null", "null", None)

    def total(self, usage: Usage) -> bytes:
        """The last event, which has the usage and no choice."""
        return f'{self._start}],"usage":{usage_json(usage)}}}\n\n'.encode("ascii")

    def _event(self, index: int, content: str, logprobs: str, reason: str, usage: Usage | None) -> bytes:
        end = ""
        if self.says_usage:
            end = ',"usage":' + ("null" if usage is None else usage_json(usage))
        return (
            f'{self._start}{{"index":{index},{content},"logprobs":{logprobs},"finish_reason":{reason}}}]{end}}}\n\n'
        ).encode("ascii")


def usage_json(usage: Usage) -> str:
    return _USAGE.dump_json(usage).decode()


def error_event(body: dict[str, Any]) -> bytes:
    """The last event of a failed stream; no [DONE] follows. It has no name, because some clients read only
    `data`."""
    return f"data: {json.dumps(body)}\n\n".encode("ascii")
