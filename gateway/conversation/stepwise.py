"""Stepwise: runs a parser that is a generator over a reader, piece by piece; the same for all formats."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from gateway.conversation.events import AnswerEvent
from gateway.conversation.reader import Reader, Steps


class Stepwise(ABC):
    """The base of an AnswerParser; subclasses add `part` and `may_reason`. However the text is divided into
    pieces, the joined events are the same."""

    def __init__(self) -> None:
        """`_run` only begins with the first text. So a subclass may call this first, and then set its
        attributes."""
        self._reader = Reader()
        self._events: list[AnswerEvent] = []
        self._turn = self._run()

    def push(self, text: str) -> Sequence[AnswerEvent]:
        self._reader.push(text)
        return self._go_on()

    def flush(self) -> Sequence[AnswerEvent]:
        self._reader.end()
        return self._go_on()

    @abstractmethod
    def _run(self) -> Steps[None]:
        """Reads the whole turn from the reader, and adds its events. Yields when the reader has no more
        text."""

    def _go_on(self) -> list[AnswerEvent]:
        next(self._turn, None)
        events = self._events[:]
        self._events.clear()
        return events
