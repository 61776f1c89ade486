"""AnswerParser: turns one answer's text into events while it arrives; the same for all formats."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from gateway.conversation.events import AnswerEvent, AnswerPart
from gateway.conversation.reader import Reader, Steps


class AnswerParser(ABC):
    """Runs the generator `_run` on each new piece of text. Raises no error, whatever the model wrote. However the
    text is divided into pieces, the joined events are the same."""

    def __init__(self, *, may_reason: bool) -> None:
        """`_run` does not run before the first text arrives. So a subclass may call this first, and then set its
        attributes."""
        self.part = AnswerPart.TEXT
        """The part of the answer to which the next character belongs, judged by the text so far. It changes
        with the character that completes a tag."""
        self.may_reason = may_reason
        """True during reasoning, and while reasoning may still begin."""
        self._reader = Reader()
        self._events: list[AnswerEvent] = []
        self._turn = self._run()

    def push(self, text: str) -> Sequence[AnswerEvent]:
        """Adds text, and returns the events that are now certain. Text that may still become part of a tag or a call is
        kept back."""
        self._reader.push(text)
        return self._resume()

    def flush(self) -> Sequence[AnswerEvent]:
        """Ends the answer, and returns the remaining events."""
        self._reader.end()
        return self._resume()

    @abstractmethod
    def _run(self) -> Steps[None]:
        """Reads the whole turn from the reader, adds its events, and keeps `part` and `may_reason` up to date.
        Yields when the reader has no more text."""

    def _resume(self) -> list[AnswerEvent]:
        next(self._turn, None)
        events = self._events[:]
        self._events.clear()
        return events
