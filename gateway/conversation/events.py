"""What an answer consists of, as events in the order in which the model wrote it.

Adjacent events of one kind may be cut anywhere; joined they are the same, however the tokens came.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum


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
    pieces: list[str] = field(default_factory=list)
    is_whole: bool = False

    @property
    def arguments(self) -> str:
        return "".join(self.pieces)


@dataclass(slots=True)
class AnswerParts:
    """A whole answer, from its events."""

    text_pieces: list[str] = field(default_factory=list)
    reasoning_pieces: list[str] = field(default_factory=list)
    calls: list[CallParts] = field(default_factory=list)

    def take_in(self, events: Iterable[AnswerEvent]) -> None:
        for event in events:
            match event:
                case Text(text):
                    self.text_pieces.append(text)
                case Reasoning(text):
                    self.reasoning_pieces.append(text)
                case CallBegins(_, name):
                    self.calls.append(CallParts(name))
                case ArgumentsDelta(index, json):
                    self.calls[index].pieces.append(json)
                case CallEnds(index):
                    self.calls[index].is_whole = True

    @property
    def text(self) -> str:
        return "".join(self.text_pieces)

    @property
    def reasoning(self) -> str:
        return "".join(self.reasoning_pieces)
