"""For models whose calls have no marker: checks whether JSON of a response format may look like a call."""

import json
from collections.abc import Mapping, Set
from typing import Any

from gateway.conversation.json_call import ARGUMENTS, OTHER_KEYS

_SHAPING = frozenset(
    {
        "$ref",
        "allOf",
        "not",
        "if",
        "patternProperties",
        "dependentSchemas",
        "dependentRequired",
        "propertyNames",
    }
)
"""Keywords that change which objects are valid, and that this module does not follow."""


def may_be_json_call(source: str, tool_names: Set[str]) -> bool:
    """Whether `read_json_call` may read a value of this schema as a call of one of these tools.

    Only names and types are compared. Under a grammar, models write an object's properties in the schema's
    order, and further properties after them. If a keyword has a wrong type, or the schema is too deep, the
    result is true.
    """
    try:
        return _may_be_call(json.loads(source), tool_names)
    except RecursionError:
        return True
    except ValueError:
        return False  # the schema is not JSON; making its grammar raises the error


def _may_be_call(schema: Any, tool_names: Set[str]) -> bool:
    if not isinstance(schema, Mapping):
        return schema is not False
    if not _may_be(schema, "object"):
        return False
    if not _SHAPING.isdisjoint(schema):
        return True
    for key in ("anyOf", "oneOf"):
        if key in schema:
            parts = schema[key]
            if not isinstance(parts, list) or "properties" in schema:
                return True
            return any(_may_be_call(part, tool_names) for part in parts)
    if values := _listed(schema):
        return any(isinstance(value, Mapping) for value in values)
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, Mapping) or not isinstance(required, list):
        return True
    # a set, since a list would be searched for each property
    names = {name for name in required if isinstance(name, str)}
    has_name = False
    for key, part in properties.items():
        if key in ARGUMENTS and has_name and _may_be(part, "object"):
            return True
        if key == "name" and _may_be_name(part, tool_names):
            has_name = True
        elif key in names and key not in OTHER_KEYS:
            return False
    return has_name or schema.get("additionalProperties") is not False


def _may_be(schema: Any, kind: str) -> bool:
    if not isinstance(schema, Mapping) or "type" not in schema:
        return schema is not False
    kinds = schema["type"]
    return kind in (kinds if isinstance(kinds, list) else [kinds])


def _may_be_name(schema: Any, tool_names: Set[str]) -> bool:
    if not _may_be(schema, "string"):
        return False
    values = _listed(schema) if isinstance(schema, Mapping) else []
    return not values or any(isinstance(value, str) and value in tool_names for value in values)


def _listed(schema: Mapping[str, Any]) -> list[Any]:
    """The values that the schema lists. Empty: it lists none, so any value is possible."""
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum", [])
    return values if isinstance(values, list) else []
