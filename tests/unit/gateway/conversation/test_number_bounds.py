"""The bounds of numbers in schemas, as grammars can hold them."""

import json
from typing import Any

import pytest
from llguidance import LLMatcher

from baton.sampling import GrammarKind, StructuredOutput
from gateway.conversation import Tool
from gateway.conversation.guided_schema import checked_response_format, guided_schema
from tests.factories.guided import GUIDES

INT64 = {"type": "integer", "minimum": -(2**63), "maximum": 2**64 - 1}
FLOAT32 = {
    "type": "number",
    "exclusiveMinimum": -3.4028234663852886e38,
    "exclusiveMaximum": 3.4028234663852886e38,
}


@pytest.mark.parametrize("schema", [INT64, FLOAT32, {"type": "integer", "maximum": 10**30}])
def test_bounds_of_large_types_compile(schema: dict[str, Any]) -> None:
    library = GUIDES["markers are text"].library
    checked = checked_response_format(StructuredOutput(GrammarKind.JSON_SCHEMA, json.dumps(schema)))
    tool = Tool("act", None, {"type": "object", "properties": {"n": schema}})
    for source in (checked.source, guided_schema(tool)):
        matcher = LLMatcher(library, LLMatcher.grammar_from_json_schema(source), log_level=0)
        assert not matcher.is_error(), matcher.get_error()
    assert checked == checked_response_format(checked)


@pytest.mark.parametrize(
    "schema", [{"minimum": -(2**62), "maximum": 0.5}, {"minimum": 1e30, "maximum": -1e30}]
)
def test_bounds_that_a_grammar_holds_or_that_nothing_matches_stay(schema: dict[str, Any]) -> None:
    answer = StructuredOutput(GrammarKind.JSON_SCHEMA, json.dumps(schema))
    assert checked_response_format(answer) == answer


ABOVE_0 = {"$defs": {"above_0": {"type": "number", "exclusiveMinimum": 0}}}


@pytest.mark.parametrize(
    ("bounds", "inside", "outside"),
    [
        ({"exclusiveMinimum": 0, "maximum": 0.5}, ("0.5", "0.1", "0.000001"), ("0", "0.0", "0.51")),
        ({"exclusiveMinimum": 1, "exclusiveMaximum": 1.5}, ("1.1", "1.49"), ("1", "1.0", "1.5")),
        ({"exclusiveMinimum": 100, "maximum": 100.5}, ("100.1",), ("100", "100.0")),
        ({"minimum": -0.5, "exclusiveMaximum": 0}, ("-0.5", "-0.01"), ("0", "-0", "-0.51")),
        ({"minimum": -1.5, "exclusiveMaximum": -1.0}, ("-1.5", "-1.01"), ("-1", "-1.0", "-1.51")),
        ({"exclusiveMinimum": 0, "maximum": 1}, ("1", "0.1"), ("0", "1.1")),
        ({"exclusiveMinimum": 0, "maximum": 1e-50}, (), ("1",)),
        ({"exclusiveMinimum": 0.25, "maximum": 0.5}, ("0.26",), ("0.25",)),
        ({"exclusiveMinimum": 0, "allOf": [{"maximum": 0.5}]}, ("0.5", "0.1"), ("0", "0.51")),
        ({"allOf": [{"exclusiveMaximum": 5}, {"minimum": 4.5}]}, ("4.5", "4.99"), ("5", "5.0", "4")),
        ({"$ref": "#/$defs/above_0", "maximum": 0.5, **ABOVE_0}, ("0.5", "0.1"), ("0", "0.51")),
        ({"exclusiveMinimum": 0, "anyOf": [{"maximum": 0.5}, {"minimum": 7}]}, ("0.1", "7"), ("0", "6")),
        ({"exclusiveMinimum": 0}, ("0.1", "10"), ("0", "-1")),
        ({"exclusiveMinimum": 2**53}, (str(2**53 + 1),), (str(2**53), "1")),
    ],
    ids=str,
)
def test_a_number_is_never_its_exclusive_bound(
    bounds: dict[str, Any], inside: tuple[str, ...], outside: tuple[str, ...]
) -> None:
    guide, source = GUIDES["markers are text"], json.dumps({"type": "number", **bounds})
    checked = checked_response_format(StructuredOutput(GrammarKind.JSON_SCHEMA, source))
    grammar = StructuredOutput(GrammarKind.LARK, f"%llguidance {{}}\nstart: %json {checked.source}\n")
    assert [number for number in (*inside, *outside) if guide.accepts(grammar, number)] == list(inside)


@pytest.mark.parametrize(
    "schema",
    [
        {"exclusiveMinimum": True, "maximum": 1.5},
        {"exclusiveMinimum": 10**400, "maximum": 0.5},
        {"exclusiveMinimum": 10**400},
        {"type": "integer", "exclusiveMinimum": 0, "maximum": 0.5},
        {"type": ["integer", "null"], "exclusiveMinimum": 0},
        {"exclusiveMinimum": 2**60, "maximum": 2**61},
    ],
)
def test_bounds_of_integers_or_that_are_no_numbers_or_that_nothing_matches_are_the_compilers(
    schema: dict[str, Any],
) -> None:
    answer = StructuredOutput(GrammarKind.JSON_SCHEMA, json.dumps(schema))
    assert checked_response_format(answer) == answer
