"""How deep grammars go: ordinary ones pass, hostile ones are named with the limit, and no text takes long."""

import json

import pytest

from baton.errors import InvalidRequest
from baton.sampling import MAX_GRAMMAR_CHARACTERS, GrammarKind, StructuredOutput
from gateway.grammars.depth import MAX_DEPTH, check_depth
from tests.factories.hostile_grammars import JSON, LARK, REGEX, SHAPES

FLAT = {
    "a long enum",
    "many optional characters",
    "many unicode classes",
    "a huge repetition",
    "many alternatives",
}
"""Not deep: other limits are for them."""

HIDDEN = {"a schema within rules"}
"""Deep in a way that is not looked into: the process that compiles is for them."""

TREE = {
    "$defs": {
        "tree": {
            "type": "object",
            "properties": {"left": {"$ref": "#/$defs/tree"}, "right": {"$ref": "#/$defs/leaf~1or~0tree"}},
        },
        "leaf/or~tree": {"anyOf": [{"$ref": "#/$defs/tree"}, {"$ref": "#"}, {"type": "integer"}]},
    },
    "$ref": "#/$defs/tree",
}


@pytest.mark.parametrize("name", SHAPES)
def test_small_ones_of_every_shape_pass(name: str) -> None:
    check_depth(SHAPES[name].of(20))


@pytest.mark.parametrize("name", [name for name in SHAPES if name not in FLAT | HIDDEN])
def test_a_grammar_that_is_too_deep_is_refused_with_the_limit(name: str) -> None:
    with pytest.raises(
        InvalidRequest, match=rf"structured_output: its .* \d+ levels deep, at most {MAX_DEPTH} are"
    ):
        check_depth(SHAPES[name].of())


@pytest.mark.parametrize("name", sorted(FLAT | HIDDEN))
def test_a_shallow_grammar_passes_however_long_it_is(name: str) -> None:
    check_depth(SHAPES[name].of())


def test_schemas_may_refer_to_themselves() -> None:
    many = {f"field{number}": {"$ref": "#/$defs/tree"} for number in range(MAX_DEPTH)}
    schema = {**TREE, "properties": many}
    check_depth(StructuredOutput(JSON, json.dumps(schema)))


def test_references_count_like_brackets() -> None:
    def chain(num_links: int) -> StructuredOutput:
        return SHAPES["chain of rules"].of(num_links)

    check_depth(chain(MAX_DEPTH - 2))
    with pytest.raises(InvalidRequest):
        check_depth(chain(MAX_DEPTH + 1))


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        (LARK, 'start: "((((" | /\\((((/ | rest // ((((\nrest: "\\"((" # ((('),
        (REGEX, r"\(\(\(|[((((]|[\](((]|(a)"),
        (JSON, '{"enum": ["[[[[", "{{{{", "\\"[["]}'),
    ],
)
def test_brackets_within_strings_and_comments_are_none(kind: GrammarKind, source: str) -> None:
    check_depth(StructuredOutput(kind, (source + " ") * (20_000 // len(source)) if kind is REGEX else source))


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        (LARK, '"' + '\\"' * MAX_GRAMMAR_CHARACTERS),
        (LARK, "/a" * MAX_GRAMMAR_CHARACTERS),
        (LARK, "a" * MAX_GRAMMAR_CHARACTERS),
        (LARK, ("a" + " " * 79 + "\n") * MAX_GRAMMAR_CHARACTERS),
        (LARK, "a b\n" * MAX_GRAMMAR_CHARACTERS),
        (REGEX, "[\\]" * MAX_GRAMMAR_CHARACTERS),
        (JSON, "[" + '"\\"' * MAX_GRAMMAR_CHARACTERS),
        (JSON, "not JSON"),
        (JSON, '{"$ref": "#/x/' + "9" * 5_000 + '", "x": [' + "{}," * 600 + "1]}"),
        (JSON, '{"$ref": "#/none", "allOf": [{"$ref": 3}, {"$ref": "#/allOf/1"}, {"$ref": "elsewhere"}]}'),
    ],
)
def test_whatever_is_no_grammar_passes_and_none_makes_the_search_go_back(
    kind: GrammarKind, source: str
) -> None:
    """Expressions that went back would take minutes for these, and the test would not end."""
    check_depth(StructuredOutput(kind, source[:MAX_GRAMMAR_CHARACTERS]))
