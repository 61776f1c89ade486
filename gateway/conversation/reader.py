"""Reader: an answer's text, read as if it were whole though it comes in pieces; knows no format.

Its generators yield where they need more text, so a parser is straight code, and what it decides depends on the text
alone, never on where a piece ended. What may have to be taken back is at most MAX_ATTEMPT_CHARACTERS long, so a push
costs time in proportion to its own length.
"""

import json
import re
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]
"""Runs until it needs more text, and returns T at its end."""

MAX_ATTEMPT_CHARACTERS = 1_024
"""The longest beginning of a call, from its marker to its arguments. A longer one is text."""
MAX_HELD_SPACES = 128
"""Spaces at the end of a text that are held back, since a marker would drop them."""

_SPACES = " \t\r\n"
_STRUCTURE = re.compile(r'["{}\[\]]')
_STRING_STOP = re.compile(r'["\\]')


class Markers:
    """Texts that end a stretch of text."""

    def __init__(self, markers: Sequence[str]) -> None:
        self._pattern = re.compile(
            "|".join(map(re.escape, sorted(markers, key=len, reverse=True))) or r"(?!)"
        )
        self._beginnings = {marker[:length] for marker in markers for length in range(1, len(marker))}
        self._longest = max(map(len, self._beginnings), default=0)

    def find(self, text: str, begin: int) -> re.Match[str] | None:
        return self._pattern.search(text, begin)

    def is_beginning(self, text: str) -> bool:
        """Whether it is the beginning of a marker, and not all of it."""
        return text in self._beginnings

    def num_pending(self, text: str, begin: int) -> int:
        """Characters at the end of `text` that may be the beginning of a marker."""
        for length in range(min(self._longest, len(text) - begin), 0, -1):
            if text[len(text) - length :] in self._beginnings:
                return length
        return 0


class Reader:
    """Where a parser is in the text so far."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._mark: int | None = None
        """Where an attempt began, to which `rewind` returns."""
        self._limit = MAX_ATTEMPT_CHARACTERS
        self._is_ended = False
        self._cut_at: int | None = None
        """Where an attempt began that the text's end cut off."""
        self.has_met_end = False
        """The attempt came to where the text ends."""

    def push(self, text: str) -> None:
        keep = self._at if self._mark is None else self._mark
        self._text = self._text[keep:] + text
        self._at -= keep
        self._mark = None if self._mark is None else 0

    def end(self) -> None:
        """No more text comes."""
        self._is_ended = True

    def begin_attempt(self, limit: int = MAX_ATTEMPT_CHARACTERS) -> None:
        """From here on, or from where an attempt has begun already; `limit`: its most characters."""
        self._mark = self._at if self._mark is None else self._mark
        self._limit = limit
        self.has_met_end = False

    def commit(self) -> None:
        """What was read since `begin_attempt` is what it seemed."""
        self._mark = None

    def rewind(self) -> None:
        """It is not: it will be read again."""
        assert self._mark is not None, "no attempt has begun"
        self._at, self._mark = self._mark, None
        if self.has_met_end:
            self._cut_at = self._at

    def drop_unfinished(self) -> None:
        """Drops all that is left, if an attempt that began here has met its end."""
        if self._cut_at == self._at:
            self._at = len(self._text)

    def drop_beginning(self, markers: Markers) -> Steps[None]:
        """Drops all that is left, if it is the beginning of a marker."""
        while not (rest := self._text[self._at :]) or markers.is_beginning(rest):
            if self._is_ended:
                self._at = len(self._text)
                return
            yield

    def peek(self) -> Steps[str]:
        """The next character; empty at the end, and where an attempt is too long."""
        while self._at >= len(self._text):
            if self._is_ended:
                self.has_met_end = True
                return ""
            yield
        if self._mark is not None and self._at - self._mark >= self._limit:
            return ""
        return self._text[self._at]

    def take(self, num_characters: int) -> str:
        """Characters that are there already."""
        taken = self._text[self._at : self._at + num_characters]
        self._at += len(taken)
        return taken

    def skip(self, literal: str) -> Steps[bool]:
        """Whether this comes next; if not, as much of it as did come is read."""
        for character in literal:
            if (yield from self.peek()) != character:
                return False
            self._at += 1
        return True

    def next_is(self, literal: str) -> Steps[bool]:
        """Skips this if it comes next, else nothing. Within an attempt."""
        assert self._mark is not None, "no attempt has begun"
        begin = self._at - self._mark
        if (yield from self.skip(literal)):
            return True
        self._at = self._mark + begin
        return False

    def skip_spaces(self) -> Steps[None]:
        while (character := (yield from self.peek())) and character in _SPACES:
            self._at += 1

    def skip_optional(self, literal: str) -> Steps[bool]:
        """Skips spaces and this, if it comes next; else nothing. Begins and ends an attempt of its own."""
        assert self._mark is None, "an attempt has begun"
        self.begin_attempt()
        yield from self.skip_spaces()
        if (yield from self.skip(literal)):
            self.commit()
            return True
        self.rewind()
        return False

    def until(self, markers: Markers, show: Callable[[str], None]) -> Steps[tuple[int, int]]:
        """Shows the text up to the next marker, less spaces before it. Returns how many these are, and the marker's
        length, both still to be read; a length of 0: the text has ended, and all of it was shown."""
        while True:
            found = markers.find(self._text, self._at)
            if found is not None:
                num_spaces = self._num_spaces(found.start())
                show(self.take(found.start() - num_spaces - self._at))
                return num_spaces, found.end() - found.start()
            if self._is_ended:
                show(self.take(len(self._text) - self._at))
                return 0, 0
            end = len(self._text) - markers.num_pending(self._text, self._at)
            show(self.take(end - self._num_spaces(end) - self._at))
            yield

    def word(self, ends: str, limit: int) -> Steps[str]:
        """The characters up to one of `ends`, which stays; at most `limit`."""
        characters: list[str] = []
        while len(characters) < limit and (character := (yield from self.peek())) and character not in ends:
            characters.append(self.take(1))
        return "".join(characters)

    def json_string(self) -> Steps[str | None]:
        """A whole JSON string's value; None if there is none."""
        if not (yield from self.skip('"')):
            return None
        characters = ['"']
        while characters[-1] != '"' or len(characters) == 1:
            if not (yield from self.peek()):
                return None
            characters.append(self.take(1))
            if characters[-1] == "\\":
                if not (yield from self.peek()):
                    return None
                characters[-1] += self.take(1)
        try:
            return str(json.loads("".join(characters)))
        except ValueError:
            return None

    def brackets(self) -> Steps[str | None]:
        """A text that comes next from one bracket to its partner, in Python's notation; None if there is none."""
        characters: list[str] = []
        depth, quote = 0, ""
        while character := (yield from self.peek()):
            characters.append(self.take(1))
            if quote:
                if character == "\\" and (yield from self.peek()):
                    characters.append(self.take(1))
                elif character == quote:
                    quote = ""
            elif character in "'\"":
                quote = character
            elif character in "([{":
                depth += 1
            elif character in ")]}":
                depth -= 1
            if not quote and depth <= 0:
                return "".join(characters) if len(characters) > 1 else None
        return None

    def json_container(self, show: Callable[[str], None]) -> Steps[bool]:
        """Shows an object or array that comes next, as it comes. Whether its last bracket came.

        Brackets outside strings are counted, and nothing else is looked at.
        """
        depth, is_string = 0, False
        begin = self._at
        while True:
            pattern = _STRING_STOP if is_string else _STRUCTURE
            found = pattern.search(self._text, self._at)
            if found is not None and not (found[0] == "\\" and found.end() == len(self._text)):
                self._at = found.end() + (found[0] == "\\")
                if found[0] == '"':
                    is_string = not is_string
                elif found[0] != "\\":
                    depth += 1 if found[0] in "{[" else -1
                    if depth == 0:
                        show(self._text[begin : self._at])
                        return True
                continue
            self._at = len(self._text) if found is None or self._is_ended else found.start()
            show(self._text[begin : self._at])
            if self._is_ended:
                return False
            yield
            begin = self._at

    def _num_spaces(self, end: int) -> int:
        """Spaces that the unread text has before `end`, as far as they are held back."""
        begin = max(self._at, end - MAX_HELD_SPACES)
        return end - begin - len(self._text[begin:end].rstrip(_SPACES))
