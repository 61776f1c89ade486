"""Stepwise: runs a parser that is written as steps over a reader, piece by piece; knows no format."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from gateway.conversation.events import AnswerEvent
from gateway.conversation.reader import Reader, Steps


class Stepwise(ABC):
    """An AnswerParser but for its `part`. Text, in any pieces, gives the same events but for where they are cut."""

    def __init__(self) -> None:
        """`_run` begins with the first text, so a subclass may set what it needs afterwards."""
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
        """Reads the whole turn from the reader, and adds its events. It waits where the reader has no more text."""

    def _go_on(self) -> list[AnswerEvent]:
        next(self._turn, None)
        events = self._events[:]
        self._events.clear()
        return events
