"""Lark: a grammar in llguidance's dialect, written rule by rule; knows tokens by id and no format."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What of a tokenizer a grammar may name."""

    ids: Mapping[str, int] = field(default_factory=dict)
    special_ids: Set[int] = frozenset()
    """Of tokens that no text contains."""


class Lark:
    """Rules and terminals so far. Names are the caller's; expressions are texts."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._lines: list[str] = []

    def rule(self, name: str, expression: str, options: str = "") -> str:
        """Defines it and returns its name. Upper case: a terminal, which is matched as one regular expression."""
        self._lines.append(f"{name}{options}: {expression}")
        return name

    def marker(self, text: str) -> str:
        """A marker: its token if it is one, else its text."""
        token_id = self._vocabulary.ids.get(text)
        return quoted(text) if token_id is None else f"<[{token_id}]>"

    def is_token(self, text: str) -> bool:
        return text in self._vocabulary.ids

    def text_without(self, name: str, *markers: str, also: str = "") -> str:
        """A terminal: any text in which none of the markers stands, not even letter by letter. `also`: more that it
        must not be."""
        excluded = "".join(f" & ~/(?s:.*){escaped(marker)}(?s:.*)/" for marker in markers)
        return self.rule(name, f"/(?s:.*)/{excluded}{also}")

    def up_to(self, name: str, marker: str, shunned: Sequence[str] = ()) -> str:
        """Any text up to the first marker, and the marker. None of the `shunned` markers stands before it."""
        if self.is_token(marker):
            text = self.text_without(f"{name.upper()}_TEXT", marker, *shunned)
            return self.rule(name, f"{text} {self.marker(marker)}")
        text = self.text_without(f"{name.upper()}_TEXT", *shunned)
        return self.rule(name, f"{text} {quoted(marker)}", "[lazy]")

    def tokens_up_to(self, name: str, marker: str, limit: int) -> str:
        """At most `limit` tokens of text, and the marker, which is a token."""
        ids = self._vocabulary.ids
        free = ranges(set(ids.values()) - self._vocabulary.special_ids - {ids[marker]})
        return self.rule(name, f"<[{free}]>{{0,{limit}}} {self.marker(marker)}")

    def source(self) -> str:
        return "%llguidance {}\n" + "\n".join(self._lines) + "\n"


def quoted(text: str) -> str:
    """A text as it is; a grammar's strings are written like JSON's."""
    return json.dumps(text, ensure_ascii=False)


def escaped(text: str) -> str:
    """A text within a regular expression between slashes."""
    return re.sub(r"[\\.+*?()|\[\]{}^$/]", lambda found: "\\" + found[0], text)


def escaped_slashes(pattern: str) -> str:
    """A regular expression to stand between slashes, in one line."""
    return re.sub(r"\\.|/|\n", _escaped_slash, pattern, flags=re.DOTALL)


def _escaped_slash(found: re.Match[str]) -> str:
    return {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}.get(found[0], found[0])


def ranges(ids: Iterable[int]) -> str:
    """`0-5,7`."""
    ordered = sorted(ids)
    begins = [i for i, value in enumerate(ordered) if i == 0 or ordered[i - 1] != value - 1]
    ends = [*(begin - 1 for begin in begins[1:]), len(ordered) - 1]
    return ",".join(f"{ordered[begin]}-{ordered[end]}" for begin, end in zip(begins, ends, strict=True))
