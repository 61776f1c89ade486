"""What an answer consists of, as events in the order in which the model wrote it.

Adjacent events of one kind may be cut anywhere; joined they are the same, however the tokens came.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from io import StringIO


@dataclass(frozen=True, slots=True)
class Text:
    """More of what the user is to read."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """More of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegins:
    """A call, whose arguments follow. Calls are numbered from 0, and never overlap."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsDelta:
    """More of a call's arguments: all of them joined are its JSON, as the model wrote it."""

    index: int
    json: str


@dataclass(frozen=True, slots=True)
class CallEnds:
    """All arguments were sent. Absent if the answer ended within the call."""

    index: int


AnswerEvent = Text | Reasoning | CallBegins | ArgumentsDelta | CallEnds


class AnswerPart(Enum):
    """What a place in an answer belongs to."""

    TEXT = "text"
    REASONING = "reasoning"
    CALL = "call"


@dataclass(slots=True)
class CallParts:
    """A call so far."""

    name: str
    is_whole: bool = False
    _arguments: StringIO = field(default_factory=StringIO)

    def add(self, json: str) -> None:
        self._arguments.write(json)

    @property
    def arguments(self) -> str:
        return self._arguments.getvalue()


@dataclass(slots=True)
class AnswerParts:
    """A whole answer, from its events; as compact as possible, since it may have a hundred thousand of them."""

    calls: list[CallParts] = field(default_factory=list)
    _text: StringIO = field(default_factory=StringIO)
    _reasoning: StringIO = field(default_factory=StringIO)

    def take_in(self, events: Iterable[AnswerEvent]) -> None:
        for event in events:
            match event:
                case Text(text):
                    self._text.write(text)
                case Reasoning(text):
                    self._reasoning.write(text)
                case CallBegins(_, name):
                    self.calls.append(CallParts(name))
                case ArgumentsDelta(index, json):
                    self.calls[index].add(json)
                case CallEnds(index):
                    self.calls[index].is_whole = True

    @property
    def text(self) -> str:
        return self._text.getvalue()

    @property
    def reasoning(self) -> str:
        return self._reasoning.getvalue()

    @property
    def ends_with_calls(self) -> bool:
        """It asks for calls, and all of them are whole."""
        return bool(self.calls) and self.calls[-1].is_whole
