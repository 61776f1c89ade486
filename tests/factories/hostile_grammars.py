"""Grammars that try to end their compiler, in any size. Small sizes are ordinary grammars."""

import json
from collections.abc import Callable
from dataclasses import dataclass

from baton.sampling import GrammarKind, StructuredOutput


@dataclass(frozen=True, slots=True)
class HostileShape:
    """A family of grammars, and its largest size for a text of at most 100,000 characters."""

    kind: GrammarKind
    source: Callable[[int], str]
    size: int

    def of(self, size: int | None = None) -> StructuredOutput:
        return StructuredOutput(self.kind, self.source(self.size if size is None else size))


Schema = dict[str, object]


def _rules(rule: Callable[[int], str], name: str = "a") -> Callable[[int], str]:
    def source(size: int) -> str:
        rules = "".join(f"{name}{number}: {rule(number)}\n" for number in range(size))
        return f'start: {name}0\n{rules}{name}{size}: "y"'

    return source


def _definitions(link: Callable[[Schema], Schema]) -> Callable[[int], str]:
    def source(size: int) -> str:
        links = {f"{number}": link({"$ref": f"#/$defs/{number + 1}"}) for number in range(size)}
        definitions = {**links, f"{size}": {"type": "integer"}}
        return json.dumps({"$ref": "#/$defs/0", "$defs": definitions}, separators=(",", ":"))

    return source


def _mutual(size: int) -> str:
    rules = "".join(f'a{n}: a{n + 1} | a{n * 7 % size} "x"\n' for n in range(size))
    return f'start: a0\n{rules}a{size}: "y"'


def _enum(size: int) -> str:
    return json.dumps({"enum": [f"{number:03}" * 3 for number in range(size)]})


def _schema_within_rules(size: int) -> str:
    return f"start: %json {_definitions(lambda link: link)(size)}"


def _nested_arrays(size: int) -> str:
    return '{"type":"array","items":' * size + '{"type":"integer"}' + "}" * size


LARK, JSON, REGEX = GrammarKind.LARK, GrammarKind.JSON_SCHEMA, GrammarKind.REGEX

SHAPES = {
    "chain of rules": HostileShape(LARK, _rules(lambda n: f"a{n + 1}"), 7_500),
    "chain of optional rules": HostileShape(LARK, _rules(lambda n: f'(a{n + 1} "x")?'), 4_000),
    "chain of terminals": HostileShape(LARK, _rules(lambda n: f'A{n + 1} "x"', "A"), 5_000),
    "alternatives of terminals": HostileShape(LARK, _rules(lambda n: f'A{n + 1} | "x" A{n + 1}', "A"), 3_900),
    "mutually recursive rules": HostileShape(LARK, _mutual, 3_900),
    "a schema within rules": HostileShape(LARK, _schema_within_rules, 3_200),
    "deep brackets": HostileShape(LARK, lambda n: "start: " + "(" * n + '"a"' + ")" * n, 49_000),
    "chain of references": HostileShape(JSON, _definitions(lambda link: link), 3_200),
    "chain of allOf": HostileShape(JSON, _definitions(lambda link: {"allOf": [link]}), 2_200),
    "chain of anyOf": HostileShape(
        JSON, _definitions(lambda link: {"anyOf": [link, {"type": "null"}]}), 1_700
    ),
    "arrays of references": HostileShape(
        JSON, _definitions(lambda link: {"type": "array", "items": link}), 1_700
    ),
    "properties of references": HostileShape(
        JSON, _definitions(lambda link: {"type": "object", "properties": {"a": link}}), 1_400
    ),
    "nested arrays": HostileShape(JSON, _nested_arrays, 3_800),
    "a long enum": HostileShape(JSON, _enum, 6_000),
    "many optional characters": HostileShape(REGEX, lambda n: "a?" * n, 20_000),
    "many unicode classes": HostileShape(REGEX, lambda n: r"(\p{L}|\p{N}|[^\x00-\x7f])" * n, 3_800),
    "deep parentheses": HostileShape(REGEX, lambda n: "(" * n + "a" + ")" * n, 49_000),
    "a huge repetition": HostileShape(REGEX, lambda n: rf"(\p{{L}}{{1,{n}}}\w{{1,{n}}}){{1,{n}}}", 1_000),
    "many alternatives": HostileShape(
        REGEX, lambda n: "|".join(f"{'a' * (i % 50)}b{i}" for i in range(n)), 3_000
    ),
}
