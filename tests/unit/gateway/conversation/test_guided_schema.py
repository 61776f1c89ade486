"""Schemas in the form that grammars take: closed, and without remarks. Schemas that no grammar can express are
refused."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from baton.errors import InvalidRequest
from baton.sampling import MAX_GRAMMAR_CHARACTERS, GrammarKind, StructuredOutput
from gateway.conversation import Tool
from gateway.conversation.call_syntax import GuidedTool
from gateway.conversation.guided_schema import checked_response_format, guided_schema
from gateway.conversation.listed_properties import listed_properties
from gateway.conversation.lookalikes import may_be_json_call
from tests.factories.costs import expect_cost_in_proportion


def guided(schema: dict[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(guided_schema(Tool("act", None, schema)))
    spacing = result.pop("x-guidance")
    assert spacing == {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    return result


def test_objects_are_closed_unless_they_say_otherwise() -> None:
    inner = {"type": "object", "properties": {"b": {}}}
    schema = {
        "type": "object",
        "properties": {"a": inner, "c": {"type": "array", "items": inner}},
        "$defs": {"d": inner},
    }

    closed = guided(schema)

    assert closed["additionalProperties"] is False
    for part in (closed["properties"]["a"], closed["properties"]["c"]["items"], closed["$defs"]["d"]):
        assert part == {**inner, "additionalProperties": False}
    for key, value in (
        ("additionalProperties", {"type": "string"}),
        ("anyOf", [inner]),
        ("$ref", "#/$defs/d"),
    ):
        assert guided({**schema, key: value}).get("additionalProperties") != False  # noqa: E712 - not a missing one
    assert guided({"type": "object"}) == {"type": "object"}


def test_parts_of_all_of_stay_open() -> None:
    schema = {"type": "object", "allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]}

    assert guided(schema) == schema


@pytest.mark.parametrize(
    "open_schema",
    [
        {
            "properties": {"kind": {}},
            "required": ["kind"],
            "anyOf": [{"properties": {"a": {}}, "required": ["a"]}, {"properties": {"b": {}}}],
        },
        {"properties": {"kind": {}}, "$ref": "#/$defs/d", "$defs": {"d": {"properties": {"a": {}}}}},
        {
            "properties": {"kind": {}},
            "anyOf": [{"oneOf": [{"$ref": "#/$defs/d"}]}],
            "$defs": {"d": {"properties": {"a": {}}}},
        },
        {
            "properties": {"a": {}},
            "additionalProperties": True,
            "dependentSchemas": {"a": {"properties": {"b": {}}}},
        },
        {"properties": {"a": {}}, "required": ["a", "b"]},
        {"anyOf": [{"properties": {"a": {}}}, {"anyOf": [{"properties": {"b": {}}}]}], "required": ["c"]},
        {"$ref": "#/$defs/d", "required": ["c"], "$defs": {"d": {"properties": {"a": {}}}}},
        {"anyOf": [{"properties": {"a": {}}}], "additionalProperties": {"type": "string"}},
        {"anyOf": [{"properties": {"a": {}}}], "patternProperties": {"^x": {}}},
        {"anyOf": [{"properties": {"a": {}}}], "oneOf": [{"properties": {"b": {}}}]},
        {
            "anyOf": [{"properties": {"a": {}}}],
            "$ref": "#/$defs/d",
            "$defs": {"d": {"properties": {"b": {}}}},
        },
        {"properties": {"a": {}}, "minProperties": 2},
    ],
    ids=[
        "parts beside properties",
        "a reference beside properties",
        "a reference in a part beside properties",
        "a part for objects with a property",
        "required but not listed",
        "required but not listed in an alternative",
        "required but not listed in what a reference refers to",
        "alternatives beside further properties",
        "alternatives beside a pattern of properties",
        "alternatives beside alternatives",
        "alternatives beside a reference",
        "more required than listed",
    ],
)
def test_an_object_that_would_forbid_what_is_required_stays_open(open_schema: dict[str, Any]) -> None:
    schema = {"type": "object", **open_schema}

    assert guided(schema) == schema
    answer = StructuredOutput(GrammarKind.JSON_SCHEMA, json.dumps(schema))
    assert json.loads(checked_response_format(answer).source) == schema


def test_objects_of_an_answer_are_closed_unless_the_schema_allows_further_properties() -> None:
    """A small model would go on with properties of its own, up to max_tokens."""

    def taken(schema: dict[str, Any]) -> dict[str, Any]:
        answer = StructuredOutput(GrammarKind.JSON_SCHEMA, json.dumps(schema))
        result: dict[str, Any] = json.loads(checked_response_format(answer).source)
        return result

    inner = {"properties": {"b": {"type": "string"}}}
    closed = {**inner, "additionalProperties": False}
    assert taken({"properties": {"a": inner}}) == {"properties": {"a": closed}, "additionalProperties": False}
    for open_object in ({"type": "object"}, {**inner, "additionalProperties": True}):
        assert taken(open_object) == open_object


def test_a_schema_that_is_too_long_when_closed_stays_open() -> None:
    schema = {"properties": {"a": {"enum": ["x" * (MAX_GRAMMAR_CHARACTERS - 50)]}}}
    answer = StructuredOutput(GrammarKind.JSON_SCHEMA, json.dumps(schema))
    assert json.loads(checked_response_format(answer).source) == schema


def test_alternatives_that_list_all_their_properties_are_closed() -> None:
    parts = [{"type": "object", "properties": {"a": {}}}, {"type": "object", "properties": {"b": {}}}]

    assert guided({"type": "object", "anyOf": parts})["anyOf"] == [
        {**part, "additionalProperties": False} for part in parts
    ]
    first, second = guided({"type": "object", "anyOf": parts, "required": ["a"]})["anyOf"]
    assert first == {**parts[0], "additionalProperties": False}
    assert second == parts[1], "it does not list what is required"


def test_remarks_and_unknown_formats_are_left_out_but_properties_of_these_names_stay() -> None:
    schema = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "object",
        "description": "x",
        "properties": {
            "title": {"type": "string", "title": "Title", "format": "date"},
            "format": {"type": "integer", "format": "int32", "default": 1},
            "odd": {"format": ["date"], "examples": [1], "propertyNames": {"type": "string"}},
        },
    }

    assert guided(schema) == {
        "type": "object",
        "properties": {
            "title": {"type": "string", "format": "date"},
            "format": {"type": "integer"},
            "odd": {},
        },
        "additionalProperties": False,
    }


def test_an_answers_schema_is_the_clients_own_without_what_has_no_effect() -> None:
    def taken(source: str, kind: GrammarKind = GrammarKind.JSON_SCHEMA) -> str:
        return checked_response_format(StructuredOutput(kind, source)).source

    path, date = '{"type": "string", "format": "path"}', '{"type": "string", "format": "date"}'
    several = f'"properties": {{"a": {date}, "format": {path}}}, "items": {{"uniqueItems": false}}'
    left = f'"properties": {{"a": {date}, "format": {{"type": "string"}}}}, "items": {{}}'
    assert json.loads(taken(f"{{{several}}}")) == json.loads(f'{{{left}, "additionalProperties": false}}')
    assert taken('{"const": "\\ud800", "format": "path"}').isascii()
    for name in ('{"type":"string"}', '{"type":"string","description":"A"}', '{"title":"A"}', "true"):
        assert taken(f'{{"propertyNames":{name},"title":"A"}}') == "{}"
    for name in ('{"pattern":"a"}', "false", "1", "null", "[]"):
        assert taken(f'{{"propertyNames":{name}}}') == f'{{"propertyNames":{name}}}'
    for unchanged in ('{"title":"A"}', '{"format": "path"', f"[{path}]", '{"x": {"format":' * 5000):
        assert taken(unchanged) == unchanged, "the compiler says what is wrong"
    assert taken(path, GrammarKind.LARK) == path


LOOP = {"$ref": "#/$defs/loop"}
AGAIN = {"$ref": "#"}
ENDLESS: dict[str, dict[str, Any]] = {
    "a reference that leads only to itself": {"properties": {"a": LOOP}},
    "through a list of alternatives": {"properties": {"a": {"anyOf": [LOOP, {"allOf": [{}, LOOP]}]}}},
    "an object that needs itself": {"properties": {"a": AGAIN}, "required": ["a"]},
    "a property that is not listed needs the object": {"required": ["a"], "additionalProperties": AGAIN},
    "any property needs the object": {"additionalProperties": AGAIN, "minProperties": 1},
    "any listed property needs the object": {"properties": {"a": AGAIN}, "minProperties": 1},
    "any property of a pattern needs the object": {
        "patternProperties": {"^a": AGAIN},
        "additionalProperties": False,
        "required": ["a"],
    },
    "a list of itself": {"properties": {"a": {"$ref": "#/$defs/list"}}},
    "a list that begins with itself": {"properties": {"a": {"$ref": "#/$defs/pair"}}},
    "in a schema with an address of its own": {"$id": "urn:a", "properties": {"a": LOOP}},
}
DEFINITIONS = {
    "loop": LOOP,
    "list": {"type": "array", "items": {"$ref": "#/$defs/list"}, "minItems": 1},
    "pair": {"type": "array", "prefixItems": [{"$ref": "#/$defs/pair"}, True], "minItems": 1},
}


@pytest.mark.parametrize("schema", ENDLESS.values(), ids=ENDLESS)
def test_a_part_that_only_an_endless_value_would_match_is_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(
        InvalidRequest, match=r"tools: in the parameters of 'act', .* requires itself again: \{.*\};"
    ):
        guided({"type": "object", **schema, "$defs": DEFINITIONS})
    source = json.dumps({"type": "object", **schema, "$defs": DEFINITIONS})
    with pytest.raises(InvalidRequest, match=r"structured_output: in the schema, .* requires itself again"):
        checked_response_format(StructuredOutput(GrammarKind.JSON_SCHEMA, source))


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": AGAIN}},
        {"properties": {"a": {"anyOf": [AGAIN, {"type": "null"}]}}, "required": ["a"]},
        {"properties": {"a": {"type": "array", "items": AGAIN}}, "required": ["a", "b"]},
        {"properties": {"a": AGAIN, "b": {}}, "minProperties": 1},
        {"properties": {"a": AGAIN}, "minProperties": 1, "additionalProperties": True},
        {"additionalProperties": AGAIN, "minProperties": 0},
        {"patternProperties": {"^a": AGAIN, "^b": {}}, "additionalProperties": False, "required": ["b"]},
        {"patternProperties": {"^a": AGAIN}, "required": ["b"]},
        {"properties": {"a": {"type": "array", "prefixItems": [AGAIN], "items": True}}, "required": ["a"]},
        {"properties": {"a": {"properties": {"b": {"$ref": "#/properties/a"}}, "required": ["b"]}}},
        {
            "properties": {"a": {"$ref": "#named"}},
            "required": ["a", []],
            "$defs": {"b": {"$anchor": "named"}},
        },
        {"properties": {"$ref": {"const": LOOP}}, "required": {}, "$defs": {"loop": LOOP}},
        {"properties": {"a": {"$ref": "#/minItems/0"}}, "minItems": 1},
        {
            "properties": {"a": {"type": "array", "prefixItems": [LOOP], "items": LOOP, "maxItems": 0}},
            "$defs": DEFINITIONS,
        },
        {
            "properties": {"a": {"$id": "urn:a", "items": LOOP, "$defs": {"loop": {"type": "null"}}}},
            "$defs": DEFINITIONS,
        },
    ],
)
def test_a_schema_may_refer_to_itself_where_a_value_can_end(schema: dict[str, Any]) -> None:
    guided({"type": "object", **schema})


@pytest.mark.parametrize(
    "schema",
    [
        {"anyOf": [{}]},
        {"minProperties": 1},
        {"properties": []},
        {"required": {}},
        {"const": {"a": 1}},
        {"enum": [{"a": 1}]},
    ],
)
def test_only_lists_of_properties_are_written_one_by_one(schema: dict[str, Any]) -> None:
    tool = Tool("act", None, {"type": "object", **schema})

    with pytest.raises(InvalidRequest, match=r"tools: .*'act'"):
        listed_properties(GuidedTool("act", guided_schema(tool), tool))


def test_a_property_has_the_definitions_that_it_may_refer_to() -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/b"}, "c": True},
        "required": ["a"],
        "$defs": {"b": {}},
    }
    tool = Tool("act", None, schema)

    first, second = listed_properties(GuidedTool("act", guided_schema(tool), tool))

    assert (first.name, first.is_required) == ("a", True)
    assert {"$ref": "#/$defs/b", "$defs": {"b": {}}}.items() <= json.loads(first.json_schema).items()
    assert (second.schema, second.is_required) == ({}, False)


def test_many_properties_and_many_required_names_take_time_in_proportion() -> None:
    def prepare(number: int) -> Callable[[], None]:
        properties: dict[str, Any] = {str(index): {"type": "null"} for index in range(number)}
        required = ["x"] * (5 * number)
        schema = {"type": "object", "properties": properties, "required": required}
        open_schema = json.dumps({**schema, "additionalProperties": {}})
        parts = [{"properties": {"x": {}}, "required": ["y"]}, {"properties": {"x": {}}}] * number

        def read() -> None:
            assert len(listed_properties(GuidedTool("act", json.dumps(schema), None))) == number + 1
            assert may_be_json_call(open_schema, {"act"})
            for names in (required, list(properties)):
                guided_schema(Tool("act", None, {"anyOf": parts, "required": names}))

        return read

    expect_cost_in_proportion(prepare, 10_000)


def test_an_answers_schema_does_not_grow_when_a_format_is_taken_out() -> None:
    schema = {"anyOf": [{"format": "path"}, {"enum": ["中" * 30_000]}]}
    answer = StructuredOutput(GrammarKind.JSON_SCHEMA, json.dumps(schema, ensure_ascii=False))
    checked = checked_response_format(answer)
    assert len(checked.source) < len(answer.source)
    assert "path" not in checked.source


def test_formats_are_taken_out_of_the_tuples_of_older_drafts() -> None:
    schema = {"items": [{"format": "path"}], "additionalItems": {"format": "path"}}
    answer = checked_response_format(StructuredOutput(GrammarKind.JSON_SCHEMA, json.dumps(schema)))
    assert json.loads(answer.source) == {"items": [{}], "additionalItems": {}}


@pytest.mark.parametrize(
    "part",
    [
        {"const": 9_007_199_254_740_993},
        {"enum": ["a", -1_234_567_890_123_456_789]},
        {"type": "array", "items": {"anyOf": [{"const": {"id": [2**64]}}]}},
    ],
)
def test_an_integer_that_a_grammar_would_change_is_refused(part: dict[str, Any]) -> None:
    schema = {"type": "object", "properties": {"id": part}}
    number = str(json.dumps(part)).strip("}]").rpartition(" ")[2].strip("[")
    for alone in (schema, part):
        source = json.dumps(alone)
        with pytest.raises(
            InvalidRequest, match=f"structured_output: in the schema, '.*' lists the integer {number}, "
        ):
            checked_response_format(StructuredOutput(GrammarKind.JSON_SCHEMA, source))
    with pytest.raises(
        InvalidRequest, match=f"tools: in the parameters of 'act', '.*' lists the integer {number}, "
    ):
        guided(schema)


def test_a_reference_to_an_unknown_keyword_hides_no_integer() -> None:
    schema: dict[str, Any] = {
        "properties": {"a": {"$ref": "#/components/id"}},
        "components": {"id": {"anyOf": [{"$ref": "#"}, {"const": 2**60 + 1}]}},
    }
    with pytest.raises(InvalidRequest, match=r"'const' lists the integer 1152921504606846977, "):
        guided(schema)
    schema["components"]["id"]["anyOf"][1] = {"const": 2**60}
    guided(schema)


def test_integers_that_a_grammar_holds_may_be_listed() -> None:
    listed = {"enum": [2**53, -(2**62), "1234567890123456789", 1e21, 10**19, -(10**20), 10**22]}
    schema = {"type": "object", "properties": {"const": listed}, "required": ["const"]}
    assert guided(schema)["properties"]["const"] == listed
    answer = StructuredOutput(GrammarKind.JSON_SCHEMA, json.dumps(listed))
    assert checked_response_format(answer) == answer
