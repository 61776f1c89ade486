"""The events of an answer: its parts, in the order in which the model wrote them.

Adjacent events of one kind may divide a text at any place. Joined, they are the same, however the model's text was
divided into pieces.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from io import StringIO


@dataclass(frozen=True, slots=True)
class Text:
    """More text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """More of the model's reasoning before its answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegins:
    """A call begins; its arguments follow. Calls are numbered from 0, and never overlap."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsDelta:
    """More of a call's arguments. All such parts joined are the JSON of the arguments, as the model wrote
    it."""

    index: int
    json: str


@dataclass(frozen=True, slots=True)
class CallEnds:
    """All arguments of the call were sent. If the answer ends within a call, this event is missing."""

    index: int


AnswerEvent = Text | Reasoning | CallBegins | ArgumentsDelta | CallEnds


class AnswerPart(Enum):
    """The kinds of parts of an answer."""

    TEXT = "text"
    REASONING = "reasoning"
    CALL = "call"


@dataclass(slots=True)
class CallParts:
    """The part of a call that has arrived."""

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
    """Collects a whole answer from its events. There may be a hundred thousand events, so it uses little
    memory."""

    calls: list[CallParts] = field(default_factory=list)
    _text: StringIO = field(default_factory=StringIO)
    _reasoning: StringIO = field(default_factory=StringIO)

    def add_text(self, text: str) -> None:
        """Does what `add_events` does with one event Text."""
        self._text.write(text)

    def add_events(self, events: Iterable[AnswerEvent]) -> None:
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
        """True if the answer has calls, and all of them are complete."""
        return bool(self.calls) and self.calls[-1].is_whole
