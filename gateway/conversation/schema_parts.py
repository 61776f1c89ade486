"""The keywords of JSON schemas, the parts of a schema, and the targets of its references."""

import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

DEFINITIONS = ("$defs", "definitions")
REFERENCE = "$ref"
"""The keyword of a reference. Only a schema that refers to itself can have an endless part."""
CONDITIONS = ("not", "if", "then", "else")
TUPLES = ("prefixItems", "items")  # in older drafts of JSON Schema, `items` may be a list
SCHEMAS = ("items", "additionalItems", "additionalProperties", "contains")
ALTERNATIVES = ("anyOf", "oneOf", "allOf")
MAPS = ("properties", "patternProperties", *DEFINITIONS, "dependentSchemas")
_FURTHER = ("propertyNames", "unevaluatedItems", "unevaluatedProperties")
VALUES = ("const", "enum", "default", "examples")
"""Keywords with JSON values, which are no schemas even if they look like some."""

_INDEX = re.compile(r"[0-9]{1,9}")


def resolved(schema: Any, reference: object) -> Any:
    """The target of a JSON pointer such as `#/$defs/x` within a schema; None if the schema contains no such target."""
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        return None
    value = schema
    for part in unquote(reference).split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(value, dict) and key in value:
            value = value[key]
        elif isinstance(value, list) and _INDEX.fullmatch(key) and int(key) < len(value):
            value = value[int(key)]
        else:
            return None
    return value


def schemas_in(schema: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The schema and its parts that are schemas, each once. Parts under unknown keywords count if a reference leads to
    them."""
    parts: list[Any] = [schema]
    seen = set[int]()
    for part in parts:  # the body appends to the list
        if id(part) in seen:
            continue
        seen.add(id(part))
        if isinstance(part, list):
            parts += part
        if not isinstance(part, Mapping):
            continue
        yield part
        for key, value in part.items():
            if key in MAPS and isinstance(value, Mapping):
                parts += value.values()
            elif key in (*CONDITIONS, *TUPLES, *SCHEMAS, *ALTERNATIVES, *_FURTHER):
                parts.append(value)
            elif key == REFERENCE:
                parts.append(resolved(schema, value))
