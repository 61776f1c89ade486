"""The depth of a grammar: nested brackets, and rules that refer to rules.

The library that compiles grammars recurses once per level, and crashes if there are too many levels. With a limit, most
texts that are too deep get an error that says what to change. `gateway/grammars/check.py` catches the others.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from baton.errors import InvalidRequest
from baton.sampling import GrammarKind, StructuredOutput
from gateway.conversation.schema_parts import resolved

MAX_DEPTH = 500

T = TypeVar("T")

# None of these patterns backtracks, so each takes time in proportion to the text.
_LARK_TOKEN = re.compile(
    r"""
      "(?:\\[\s\S]|[^"\\])*+"?                # a string
    | /(?![/\ ])(?:\\.|[^/\\\n])*+/?           # a regular expression
    | (?://|\#)[^\n]*+                         # a comment
    | ^[ \t]*+[?!]?(?P<rule>[a-zA-Z_][\w-]*+)[^:\n]{0,80}+:
    | (?P<reference>[a-zA-Z_][\w-]*+)
    | (?P<open>[(\[{])
    | (?P<close>[)\]}])
    """,
    re.MULTILINE | re.VERBOSE,
)
_REGEX_TOKEN = re.compile(r"\\[\s\S]|\[(?:\\[\s\S]|[^\]\\])*+\]?|(?P<open>\()|(?P<close>\))")
_JSON_TOKEN = re.compile(r'"(?:\\[\s\S]|[^"\\])*+"?|(?P<open>[\[{])|(?P<close>[\]}])')


def check_depth(output: StructuredOutput) -> None:
    """Raises InvalidRequest if a grammar is deeper than MAX_DEPTH levels. Invalid grammars pass."""
    match output.kind:
        case GrammarKind.JSON_SCHEMA:
            depth, what = _schema_depth(output.source), "its schemas nest and refer to each other"
        case GrammarKind.REGEX:
            depth, what = _bracket_depth(_REGEX_TOKEN.finditer(output.source)), "its brackets nest"
        case GrammarKind.LARK:
            depth, what = _lark_depth(output.source), "its rules nest and refer to each other"
    if depth > MAX_DEPTH:
        raise InvalidRequest(
            "structured_output", f"{what} {depth} levels deep, at most {MAX_DEPTH} are allowed"
        )


def _schema_depth(source: str) -> int:
    if source.count("{") + source.count("[") + source.count('"$ref"') <= MAX_DEPTH:
        return 0  # it cannot be too deep, so ordinary schemas are not parsed here
    try:
        schema = json.loads(source)
    except ValueError:
        return 0
    except RecursionError:
        return _bracket_depth(_JSON_TOKEN.finditer(source))

    def below(value: Any) -> Iterable[Any]:
        if isinstance(value, dict):
            target = resolved(schema, value.get("$ref"))
            rest = [part for key, part in value.items() if key not in ("$defs", "definitions")]
            return [*([] if target is None else [target]), *rest]
        return value if isinstance(value, list) else ()

    return _longest_path(schema, below, id)


def _lark_depth(source: str) -> int:
    """The longest chain of rules that refer to each other, plus the deepest brackets within one rule."""
    references: dict[str, list[str]] = {}
    brackets: dict[str, list[re.Match[str]]] = {}
    name = ""
    for token in _LARK_TOKEN.finditer(source):
        if token["rule"]:
            name = token["rule"]
        elif token["reference"]:
            references.setdefault(name, []).append(token["reference"])
        elif token["open"] or token["close"]:
            brackets.setdefault(name, []).append(token)
    deepest = max(map(_bracket_depth, brackets.values()), default=0)
    return _longest_path("start", lambda rule: references.get(rule, ()), lambda rule: rule) + deepest - 1


def _bracket_depth(tokens: Iterable[re.Match[str]]) -> int:
    """The largest number of brackets that are open at once."""
    depth = deepest = 0
    for token in tokens:
        if token["open"]:
            depth += 1
            deepest = max(deepest, depth)
        elif token["close"]:
            depth = max(0, depth - 1)
    return deepest


def _longest_path(start: T, below: Callable[[T], Iterable[T]], key: Callable[[T], object]) -> int:
    """The number of nodes of the longest path of a depth-first search, which enters each node once."""
    entered = {key(start)}
    path: list[Iterator[T]] = [iter(below(start))]
    deepest = 1
    while path:
        node = next(path[-1], None)
        if node is None:
            path.pop()
        elif key(node) not in entered:
            entered.add(key(node))
            path.append(iter(below(node)))
            deepest = max(deepest, len(path))
    return deepest
