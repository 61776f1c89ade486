"""Lark: writes a grammar in llguidance's dialect of Lark, rule by rule; the same for all formats."""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from baton.errors import InvalidRequest
from baton.sampling import MAX_GRAMMAR_CHARACTERS


def _no_id(_: str) -> None:
    return None


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens of a tokenizer that a grammar may name."""

    id_of: Callable[[str], int | None] = _no_id
    text_ids: Sequence[int] = ()
    """Ids of all tokens that are no special tokens. Text in a grammar never contains special tokens."""
    _texts: dict[int, str] = field(default_factory=dict, init=False, repr=False, compare=False)
    """The results of `text_ids_except`."""

    def text_ids_except(self, token_id: int) -> str:
        """The `text_ids` except one, as `ranges`. They are found once, which takes hundredths of a second for a large
        vocabulary."""
        if token_id not in self._texts:
            self._texts[token_id] = ranges(each for each in self.text_ids if each != token_id)
        return self._texts[token_id]


class Lark:
    """A grammar's rules and terminals so far. The caller chooses their names. Expressions are strings."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._lines: list[str] = []
        self._num_counted = 0

    def rule(self, name: str, expression: str, options: str = "") -> str:
        """Defines a rule and returns its name. An upper-case name defines a terminal, which is one regular
        expression."""
        self._lines.append(f"{name}{options}: {expression}")
        return name

    def counted(self, text: str) -> str:
        """The text, which will be a part of a rule. Raises InvalidRequest once such texts are too long together.
        Otherwise the definitions of a schema could be written thousands of times before the grammar is checked."""
        self._num_counted += len(text)
        if self._num_counted > MAX_GRAMMAR_CHARACTERS:
            raise too_large(f"more than {MAX_GRAMMAR_CHARACTERS}")
        return text

    def marker(self, text: str) -> str:
        """The expression for a marker: its token if the marker is one token, otherwise its text."""
        token_id = self._vocabulary.id_of(text)
        return quoted(text) if token_id is None else f"<[{token_id}]>"

    def marked(self, text: str, *markers: str) -> str:
        """The expression for a text that may contain markers. Only markers that are tokens divide the text."""
        tokens = [marker for marker in markers if self.is_token(marker)]
        parts = re.split(f"({'|'.join(map(re.escape, tokens))})", text) if tokens else [text]
        return " ".join(self.marker(part) if part in tokens else quoted(part) for part in parts if part)

    def is_token(self, text: str) -> bool:
        return self._vocabulary.id_of(text) is not None

    def text_without(self, name: str, *markers: str, also: str = "") -> str:
        """Defines a terminal: any text that contains none of the markers, even if their letters are separate
        tokens. `also`: further conditions, as Lark text.

        All markers are in one condition. With a condition for each marker, the library's lexer would exceed its limits
        where a text may still become one of several markers.
        """
        excluded = f" & ~/(?s:.*)({'|'.join(map(escaped, markers))})(?s:.*)/" if markers else ""
        return self.rule(name, f"/(?s:.*)/{excluded}{also}")

    def up_to(self, name: str, marker: str, shunned: Sequence[str] = ()) -> str:
        """Defines a rule: any text up to the first marker, and the marker. The text contains no `shunned`
        marker."""
        if self.is_token(marker):
            text = self.text_without(f"{name.upper()}_TEXT", marker, *shunned)
            return self.rule(name, f"{text} {self.marker(marker)}")
        text = self.text_without(f"{name.upper()}_TEXT", *shunned)
        return self.rule(name, f"{text} {quoted(marker)}", "[lazy]")

    def tokens_up_to(self, name: str, marker: str, limit: int) -> str:
        """Defines a rule: at most `limit` tokens of text, and the marker, which must be one token."""
        token_id = self._vocabulary.id_of(marker)
        assert token_id is not None, f"{marker!r} is not one token"
        free = self._vocabulary.text_ids_except(token_id)
        text = f"<[{free}]>{{0,{limit}}}" if limit else ""  # llguidance refuses {0,0}
        return self.rule(name, f"{text} {self.marker(marker)}")

    def source(self) -> str:
        return "%llguidance {}\n" + "\n".join(self._lines) + "\n"


def too_large(number: str) -> InvalidRequest:
    """The error for a grammar that has this number of characters."""
    return InvalidRequest(
        "tools",
        f"the schemas of the tools that may be called make a grammar of {number} characters, at most "
        f"{MAX_GRAMMAR_CHARACTERS} are allowed; offer fewer or smaller tools, or leave out strict",
    )


def quoted(text: str) -> str:
    """The text as a string of a grammar, which is written like a JSON string."""
    return json.dumps(text, ensure_ascii=False)


def escaped(text: str) -> str:
    """The text for use in a regular expression between slashes, with its special characters escaped."""
    return re.sub(r"[\\.+*?()|\[\]{}^$/]", lambda found: "\\" + found[0], text)


def escaped_slashes(pattern: str) -> str:
    """The regular expression for use between slashes, in one line: slashes and line ends are escaped."""
    return re.sub(r"\\.|/|\n", _escaped_slash, pattern, flags=re.DOTALL)


def _escaped_slash(found: re.Match[str]) -> str:
    return {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}.get(found[0], found[0])


def ranges(ids: Iterable[int]) -> str:
    """The ids as ranges, such as `0-5,7-7`."""
    ordered = sorted(ids)
    begins = [i for i, value in enumerate(ordered) if i == 0 or ordered[i - 1] != value - 1]
    ends = [*(begin - 1 for begin in begins[1:]), len(ordered) - 1]
    return ",".join(f"{ordered[begin]}-{ordered[end]}" for begin, end in zip(begins, ends, strict=True))
