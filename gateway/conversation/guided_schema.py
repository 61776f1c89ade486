"""A tool's JSON schema as a grammar guides it: closed objects, one way of spacing, no remarks that guide nothing."""

import json
from collections.abc import Mapping
from typing import Any

from baton.errors import InvalidRequest
from gateway.conversation.messages import Tool

MAX_NESTED = 100
"""Levels of a schema; deeper ones are refused, since everything here walks them."""

FORMATS = frozenset(
    "date-time date time duration email hostname ipv4 ipv6 uuid uri json-pointer".split()  # noqa: SIM905
)
"""Formats of strings that are guided. JSON Schema has all others, such as `int32`, as remarks."""

REMARKS = frozenset(
    {
        "title",
        "description",
        "default",
        "examples",
        "deprecated",
        "readOnly",
        "writeOnly",
        "$comment",
        "$schema",
    }
)
"""They guide nothing, and are most of many schemas."""

SPACING_KEY = "x-guidance"
SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""As Python's `json.dumps` and chat templates' `tojson` write: earlier calls are found again in the prefix cache, and a
small model cannot lose itself in spaces."""

ANY_ARGUMENTS = json.dumps({"type": "object", SPACING_KEY: SPACING})
DEFINITIONS = ("$defs", "definitions")

_OPENING = frozenset(
    "additionalProperties patternProperties unevaluatedProperties allOf anyOf oneOf $ref if not".split()  # noqa: SIM905
)
"""An object with one of these says by itself which properties it has, or shares that with others."""

_SCHEMAS = ("items", "additionalProperties", "contains", "not", "if", "then", "else")
_LISTS = ("prefixItems", "anyOf", "oneOf", "allOf")
_MAPS = ("properties", "patternProperties", *DEFINITIONS, "dependentSchemas")


def guided_schema(tool: Tool) -> str:
    """The schema of a tool's arguments as JSON text. InvalidRequest names `tools`.

    An object that lists its properties has no others, unless it says so: what a model adds, no tool reads.
    """
    check_parameters(tool)
    is_closing = '"allOf"' not in json.dumps(tool.parameters)  # whose parts see each other's properties
    schema = _guided(tool.parameters, is_closing)
    return json.dumps({"type": "object", **schema, SPACING_KEY: SPACING}, ensure_ascii=False)


def spaced(source: str) -> str:
    """A schema of any kind with the spacing of arguments; what is no schema, or too deep, stays as it is."""
    try:
        schema = json.loads(source)
        return json.dumps(schema | {SPACING_KEY: SPACING}) if isinstance(schema, dict) else source
    except (ValueError, RecursionError):
        return source


def check_parameters(tool: Tool) -> None:
    """InvalidRequest if a tool's parameters are no schema of an object, or nest too deep to be read."""
    kind = tool.parameters.get("type", "object")
    if kind != "object":
        raise InvalidRequest(
            "tools", f"the parameters of '{tool.name}' must be a schema of type object, got {kind!r}"
        )
    if _levels(tool.parameters) > MAX_NESTED:
        raise InvalidRequest(
            "tools", f"the parameters of '{tool.name}' nest more than {MAX_NESTED} levels deep"
        )


def _guided(schema: Any, is_closing: bool) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    guided: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _SCHEMAS:
            guided[key] = _guided(value, is_closing)
        elif key in _LISTS and isinstance(value, list):
            guided[key] = [_guided(part, is_closing) for part in value]
        elif key in _MAPS and isinstance(value, Mapping):
            guided[key] = {name: _guided(part, is_closing) for name, part in value.items()}
        elif key not in REMARKS and (key != "format" or (isinstance(value, str) and value in FORMATS)):
            guided[key] = value
    if is_closing and "properties" in guided and _OPENING.isdisjoint(guided):
        guided["additionalProperties"] = False
    return guided


def _levels(schema: object) -> int:
    """How deep values nest; stops just above MAX_NESTED."""
    level, values = 0, [schema]
    while values and level <= MAX_NESTED:
        level += 1
        below: list[object] = []
        for value in values:
            if isinstance(value, Mapping):
                below += value.values()
            elif isinstance(value, list):
                below += value
        values = below
    return level
