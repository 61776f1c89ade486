"""A reference may lead to any part of a schema. Keywords of draft 3 are refused."""

import json
from typing import Any
from urllib.parse import quote

import pytest

from baton.errors import InvalidRequest
from baton.sampling import GrammarKind, StructuredOutput
from gateway.conversation import Tool
from gateway.conversation.guided_schema import checked_response_format, divisible, guided_schema
from gateway.conversation.schema_parts import resolved, schemas_in

NAMES = (
    *(
        "X",
        "",
        "ä",
        "a/b",
        "a~b",
        "~1",
        "%",
        "%25",
        "a%2Fb",
        "0",
        "x-whole",
        "$ref",
        "$defs",
        "const",
        "default",
    ),
    *("enum", "examples", "items", "properties", "required", "title", "anyOf"),
)


def pointer(*names: str) -> str:
    return "#/" + "/".join(quote(name.replace("~", "~0").replace("/", "~1"), safe="$~") for name in names)


def schema_with(name: str, *path: str) -> dict[str, Any]:
    """A schema with a part of this name, at the end of this path, that refers to itself."""
    reference = {"$ref": pointer(*path, name)}
    part = {
        "type": "object",
        "properties": {
            "b": {"type": "string", "format": "path"},
            "const": {"anyOf": [reference, {"type": "null"}]},
        },
        "required": ["b"],
    }
    value: dict[str, Any] = {name: part}
    for key in reversed(path):
        value = {key: value}
    return {"type": "object", "properties": {"a": reference}, **value}


def guided(schema: dict[str, Any]) -> dict[str, Any]:
    read: dict[str, Any] = json.loads(guided_schema(Tool("act", parameters=schema)))
    return read


def formatted(schema: dict[str, Any]) -> dict[str, Any]:
    output = StructuredOutput(GrammarKind.JSON_SCHEMA, json.dumps(schema))
    read: dict[str, Any] = json.loads(checked_response_format(output).source)
    return read


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("path", [("components", "schemas"), ("x",), ("definitions",)])
def test_a_part_under_an_unknown_keyword_is_guided_like_a_definition(
    name: str, path: tuple[str, ...]
) -> None:
    for guide in (guided, formatted):
        part = resolved(guide(schema_with(name, *path)), pointer(*path, name))
        defined = resolved(guide(schema_with(name, "$defs")), pointer("$defs", name))
        assert part["properties"]["b"] == defined["properties"]["b"] == {"type": "string"}
        assert part["additionalProperties"] is defined["additionalProperties"] is False


@pytest.mark.parametrize("name", NAMES)
def test_references_of_a_divided_schema_lead_to_its_definitions(name: str) -> None:
    schema = schema_with(name, "components", "schemas")
    part = schema["components"]["schemas"][name]
    divided = divisible(json.dumps(schema))
    references = [part["$ref"] for part in schemas_in(divided) if "$ref" in part]
    assert len(references) == 2
    for reference in references:
        found = resolved({"$defs": divided["$defs"]}, reference)
        assert found["required"] == part["required"]


def test_an_encoded_reference_of_a_divided_schema_leads_to_its_definition() -> None:
    schema = schema_with("X", "$defs") | {"properties": {"a": {"$ref": "#/%24defs/X"}, "b": {"$ref": "#"}}}
    divided = divisible(json.dumps(schema))
    assert divided["properties"]["a"]["$ref"] == "#/%24defs/X"
    assert resolved(divided, divided["properties"]["b"]["$ref"])["properties"] == divided["properties"]


def test_values_stay_even_if_a_reference_leads_to_them() -> None:
    value = {"properties": {"a": {"format": "path"}}, "$ref": "#/y"}
    schema = {"const": value, "properties": {"a": {"$ref": "#/const"}}, "x": {"const": 1, "title": "X"}}
    assert guided(schema)["const"] == value
    assert guided(schema)["x"] == schema["x"], "no reference leads to it"
    assert divisible(json.dumps(schema))["const"] == value


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ({"type": "string", "required": True}, "'required' has the form of draft 3 of JSON Schema"),
        ({"type": "integer", "divisibleBy": 5}, "use multipleOf"),
        ({"$ref": "#/x", "x": {"divisibleBy": 5}}, None),
        ({"required": False, "extends": "Other", "disallow": ["x"]}, None),
    ],
)
def test_a_keyword_that_restricts_only_in_draft_3_is_refused(part: dict[str, Any], words: str | None) -> None:
    schema = {"type": "object", "properties": {"divisibleBy": part, "required": {"type": "boolean"}}}
    if words is None:
        guided(schema)
        formatted(schema)
        return
    with pytest.raises(InvalidRequest, match=f"tools: in the parameters of 'act', .*{words}"):
        guided(schema)
    for source in (schema, part):
        with pytest.raises(InvalidRequest, match=f"structured_output: in the schema, .*{words}"):
            formatted(source)


@pytest.mark.parametrize(("key", "instead"), [("extends", "allOf"), ("disallow", "not")])
def test_in_a_schema_of_draft_3_its_keywords_are_refused(key: str, instead: str) -> None:
    schema = {"type": "object", "properties": {"a": {key: {"type": "integer"}}}}
    guided(schema)
    schema["$schema"] = "http://json-schema.org/draft-03/schema#"
    with pytest.raises(InvalidRequest, match=f"'{key}' has the form of draft 3 .*; use {instead}"):
        guided(schema)
