"""Reader: reads an answer's text, which arrives in pieces, as if it were whole; the same for all formats.

Its methods are generators, which yield when they need more text. So a parser is sequential code, and its
decisions depend only on the text, not on where a piece ended. Text that may be read a second time is at most
MAX_ATTEMPT_CHARACTERS long by default. So the time of a push is proportional to the length of its text.
"""

import json
import re
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]
"""A generator that yields whenever it needs more text, and returns T at its end."""

MAX_ATTEMPT_CHARACTERS = 1_024
"""Longest beginning of a call, from its marker to its arguments. A longer beginning counts as text."""
MAX_HELD_SPACES = 128
"""At most this many spaces at the end of a text wait for the next characters. If a marker follows, the spaces are
dropped."""

_SPACES = " \t\r\n"
_STRUCTURE = re.compile(r'["{}\[\]]')
_STRING_STOP = re.compile(r'["\\]')


class Markers:
    """Texts that end a part of an answer."""

    def __init__(self, markers: Sequence[str]) -> None:
        self._pattern = re.compile(
            "|".join(map(re.escape, sorted(markers, key=len, reverse=True))) or r"(?!)"
        )
        self._beginnings = {marker[:length] for marker in markers for length in range(1, len(marker))}
        self._longest = max(map(len, self._beginnings), default=0)

    def find(self, text: str, begin: int) -> re.Match[str] | None:
        return self._pattern.search(text, begin)

    def is_beginning(self, text: str) -> bool:
        """Whether the text is the beginning of a marker, but not a whole marker."""
        return text in self._beginnings

    def num_pending(self, text: str, begin: int) -> int:
        """How many characters at the end of `text` may be the beginning of a marker."""
        for length in range(min(self._longest, len(text) - begin), 0, -1):
            if text[len(text) - length :] in self._beginnings:
                return length
        return 0


class Reader:
    """The text so far, and the parser's position in it."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._mark: int | None = None
        """The position where the attempt began, or 0 if it began before `_text`; `rewind` returns to its beginning.
        None: there is no attempt."""
        self._before: list[str] = []
        """The part of the attempt that was read before the last push. `_text` does not have it: then each push would
        copy the whole attempt."""
        self._num_before = 0
        """The number of characters in `_before`."""
        self._limit = MAX_ATTEMPT_CHARACTERS
        self._is_ended = False
        self._cut_at: int | None = None
        """If an attempt failed because the whole text ended: the position where this attempt began. Otherwise None."""
        self.has_met_end = False
        """True if the attempt reached the end of the whole text."""

    def push(self, text: str) -> None:
        if self._mark is not None:
            self._before.append(self._text[self._mark : self._at])
            self._num_before += self._at - self._mark
            self._mark = 0
        self._text = self._text[self._at :] + text
        self._at = 0

    def end(self) -> None:
        """Call this when no more text follows."""
        self._is_ended = True

    def begin_attempt(self, limit: int = MAX_ATTEMPT_CHARACTERS) -> None:
        """Begins an attempt here; if an attempt is open, it continues. `limit`: the attempt has at most this many
        characters."""
        self._mark = self._at if self._mark is None else self._mark
        self._limit = limit
        self.has_met_end = False

    @property
    def num_tried(self) -> int:
        """How many characters the attempt has read so far."""
        assert self._mark is not None, "no attempt has begun"
        return self._num_before + self._at - self._mark

    def commit(self) -> None:
        """Ends the attempt with success: the text since `begin_attempt` stays read."""
        self._mark = None
        self._before.clear()
        self._num_before = 0

    def rewind(self) -> None:
        """Ends the attempt without success: the text since `begin_attempt` will be read again."""
        self._return_to(0)
        self._mark = None
        if self.has_met_end:
            self._cut_at = self._at

    def drop_unfinished(self) -> None:
        """Drops the rest of the text, if an attempt that began here failed because the whole text ended."""
        if self._cut_at == self._at:
            self._at = len(self._text)

    def drop_beginning(self, markers: Markers) -> Steps[None]:
        """Drops the rest of the text, if it is the beginning of a marker. Waits until this is certain."""
        while not (rest := self._text[self._at :]) or markers.is_beginning(rest):
            if self._is_ended:
                self._at = len(self._text)
                return
            yield

    def peek(self) -> Steps[str]:
        """The next character, which stays unread. Empty at the end of the text, and if an attempt is too
        long."""
        while self._at >= len(self._text):
            if self._is_ended:
                self.has_met_end = True
                return ""
            yield
        if self._mark is not None and self.num_tried >= self._limit:
            return ""
        return self._text[self._at]

    def read_arrived(self, num_characters: int) -> str:
        """Reads characters that have already arrived."""
        taken = self._text[self._at : self._at + num_characters]
        self._at += len(taken)
        return taken

    def skip(self, literal: str) -> Steps[bool]:
        """Reads `literal`. False: the text differs; then only the characters that are equal were read."""
        for character in literal:
            if (yield from self.peek()) != character:
                return False
            self._at += 1
        return True

    def skip_if_next(self, literal: str) -> Steps[bool]:
        """Reads `literal` if it comes next; otherwise reads nothing. An attempt must be open."""
        begin = self.num_tried
        if (yield from self.skip(literal)):
            return True
        self._return_to(begin)
        return False

    def skip_spaces(self) -> Steps[None]:
        while (character := (yield from self.peek())) and character in _SPACES:
            self._at += 1

    def skip_optional(self, literal: str) -> Steps[bool]:
        """Reads spaces and `literal` if they come next; otherwise reads nothing. No attempt may be open."""
        assert self._mark is None, "an attempt has begun"
        self.begin_attempt()
        yield from self.skip_spaces()
        if (yield from self.skip(literal)):
            self.commit()
            return True
        self.rewind()
        return False

    def series(
        self,
        before: str,
        between: str,
        read: Callable[[], Steps[bool]],
        end: str = "",
        limit: int = MAX_ATTEMPT_CHARACTERS,
    ) -> Steps[bool]:
        """Calls `read` after `before`, and again after each `between` that follows; then reads `end` if it comes
        next. False: `before` does not come, or the first call returned False. `read` commits the attempt in which it
        is called, or returns False."""
        self.begin_attempt(limit)
        yield from self.skip_spaces()
        if not (yield from self.skip(before)) or not (yield from read()):
            return False
        while True:
            self.begin_attempt(limit)
            yield from self.skip_spaces()
            if not (yield from self.skip(between)) or not (yield from read()):
                break
        self.rewind()
        if end:
            yield from self.skip_optional(end)
        return True

    def until(self, markers: Markers, show: Callable[[str], None]) -> Steps[tuple[int, int]]:
        """Passes the text up to the next marker to `show`, without the spaces before the marker.

        Returns the number of these spaces, and the marker's length; both stay unread. If the length is 0, the
        text has ended, and all of it was passed to `show`.
        """
        while True:
            found = markers.find(self._text, self._at)
            if found is not None:
                num_spaces = self._num_spaces(found.start())
                show(self.read_arrived(found.start() - num_spaces - self._at))
                return num_spaces, found.end() - found.start()
            if self._is_ended:
                show(self.read_arrived(len(self._text) - self._at))
                return 0, 0
            end = len(self._text) - markers.num_pending(self._text, self._at)
            show(self.read_arrived(end - self._num_spaces(end) - self._at))
            yield

    def word(self, ends: str, limit: int) -> Steps[str]:
        """Reads characters up to one of `ends`, which stays unread; at most `limit` characters."""
        characters: list[str] = []
        while len(characters) < limit and (character := (yield from self.peek())) and character not in ends:
            characters.append(self.read_arrived(1))
        return "".join(characters)

    def json_string(self) -> Steps[str | None]:
        """Reads a JSON string, and returns its value. None: no whole JSON string comes next."""
        if not (yield from self.skip('"')):
            return None
        characters = ['"']
        while characters[-1] != '"' or len(characters) == 1:
            if not (yield from self.peek()):
                return None
            characters.append(self.read_arrived(1))
            if characters[-1] == "\\":
                if not (yield from self.peek()):
                    return None
                characters[-1] += self.read_arrived(1)
        try:
            return str(json.loads("".join(characters)))
        except ValueError:
            return None

    def brackets(self) -> Steps[str | None]:
        """Reads a text in Python's notation from an opening bracket to its closing bracket. None: no such
        text comes next."""
        characters: list[str] = []
        depth, quote = 0, ""
        while character := (yield from self.peek()):
            characters.append(self.read_arrived(1))
            if quote:
                if character == "\\" and (yield from self.peek()):
                    characters.append(self.read_arrived(1))
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
        """Reads a JSON object or array, and passes it to `show` while it arrives. False: the text ended
        within it.

        Only brackets outside strings are counted; the JSON is not checked.
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

    def _return_to(self, num_tried: int) -> None:
        """Makes everything unread but the attempt's first `num_tried` characters."""
        assert self._mark is not None, "no attempt has begun"
        returned = [self._text]
        while self._num_before > num_tried:
            returned.append(self._before.pop())
            self._num_before -= len(returned[-1])
        if len(returned) > 1:
            self._text = "".join(reversed(returned))
        self._at = self._mark + num_tried - self._num_before

    def _num_spaces(self, end: int) -> int:
        """The number of spaces that the unread text has before `end`, at most MAX_HELD_SPACES."""
        begin = max(self._at, end - MAX_HELD_SPACES)
        return end - begin - len(self._text[begin:end].rstrip(_SPACES))
