"""Lists a tool's parameters one by one, for families that do not write arguments as one JSON object."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from baton.errors import InvalidRequest
from baton.sampling import MAX_GRAMMAR_CHARACTERS
from gateway.conversation.call_syntax import GuidedTool
from gateway.conversation.guided_schema import SPACING_KEY, divisible
from gateway.conversation.lark import too_large
from gateway.conversation.messages import Tool
from gateway.conversation.schema_parts import DEFINITIONS, REFERENCE, resolved

_SHAPING = frozenset(
    {
        *("patternProperties", "unevaluatedProperties", "propertyNames", "minProperties", "maxProperties"),
        *("allOf", "anyOf", "oneOf", "not", "if", "then", "else", "$ref", "const", "enum"),
        *("dependentRequired", "dependentSchemas"),
    }
)
"""Keywords that say more about an object than a list of properties does."""


MAX_PARTS = 1_000
"""`value_types` reads at most this many parts of a schema. A larger schema counts as one that lists no types."""
TYPES: Mapping[type, tuple[str, ...]] = {
    str: ("string",),
    bool: ("boolean",),
    int: ("integer", "number"),
    float: ("number", "integer"),
    dict: ("object",),
    list: ("array",),
    type(None): ("null",),
}
"""The names that a schema may give to the type of a JSON value. An integer may be written as 1.0."""


@dataclass(frozen=True, slots=True)
class Property:
    """One argument."""

    name: str
    schema: Mapping[str, Any]
    shared: Mapping[str, Any]
    """The parts of the tool's schema that this schema needs."""
    is_required: bool

    @property
    def json_schema(self) -> str:
        """The schema as text for Lark's `%json`, with the definitions to which it refers. These may be large, and there
        may be thousands of properties. So the text is not stored."""
        return json.dumps({**self.schema, **self.shared}, ensure_ascii=False)


def listed_properties(guided: GuidedTool) -> list[Property]:
    """The tool's properties, and then those that are required, but not listed. Raises InvalidRequest if the schema of
    the tool's parameters does more than list properties, if the parameters are too many, or if the schema forbids a
    property that it requires."""
    schema = _listing_schema(guided)
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list):
        raise InvalidRequest("tools", f"the parameters of '{guided.name}' are not a valid schema")
    names = dict.fromkeys(name for name in required if isinstance(name, str))
    if sum(map(len, names)) > MAX_GRAMMAR_CHARACTERS:  # the grammar has all names
        raise too_large(f"more than {MAX_GRAMMAR_CHARACTERS}")
    shared, others = _shared(schema), schema.get("additionalProperties", True)
    unlisted = [name for name in names if name not in properties]
    if unlisted and others is False:
        raise InvalidRequest(
            "tools",
            f"the parameters of '{guided.name}' require '{unlisted[0]}', but additionalProperties: false forbids it",
        )
    other = _property("", others, shared, True)
    return [
        *(_property(name, part, shared, name in names) for name, part in properties.items()),
        *(replace(other, name=name) for name in unlisted),
    ]


def _listing_schema(guided: GuidedTool) -> dict[str, Any]:
    """The tool's schema, each of whose properties is usable alone (see `divisible`). Raises InvalidRequest if
    the schema says more about the object than a list of properties does."""
    schema = divisible(guided.schema)
    if shaping := sorted(_SHAPING & schema.keys()):
        raise InvalidRequest(
            "tools",
            f"this model writes arguments one by one, so the parameters of '{guided.name}' can only be guided if "
            f"their schema just lists properties; remove {', '.join(shaping)}",
        )
    return schema


def _shared(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The parts of a tool's schema that the schema of each property needs."""
    return {key: schema[key] for key in (*DEFINITIONS, SPACING_KEY) if key in schema}


def _property(name: str, part: object, shared: Mapping[str, Any], is_required: bool) -> Property:
    return Property(name, part if isinstance(part, dict) else {}, shared, is_required)


def unlisted_property(guided: GuidedTool) -> Property | None:
    """The schema for every argument of a tool that lists and requires no properties, but allows some. None for any
    other tool. Raises InvalidRequest if the schema of the tool's parameters does more than list properties."""
    schema = _listing_schema(guided)
    part = schema.get("additionalProperties", False)
    if schema.get("properties") or schema.get("required") or part is False:
        return None
    return _property("", part, _shared(schema), False)


def property_schema(tool: Tool | None, name: str) -> Mapping[str, Any]:
    """The schema of a tool's property. Empty if the tool or the property is unknown."""
    parameters = {} if tool is None else tool.parameters
    properties = parameters.get("properties", {})
    is_listed = isinstance(properties, Mapping) and name in properties
    schema = properties[name] if is_listed else parameters.get("additionalProperties")
    return schema if isinstance(schema, Mapping) else {}


def value_types(schema: Mapping[str, Any], root: Mapping[str, Any]) -> frozenset[str]:
    """JSON's types that a value of this schema may have. Empty: the schema does not list them. `root`: the schema in
    which references are looked up."""
    types: set[str] = set()
    references: set[str] = set()
    parts: list[Any] = [schema]
    for part in parts:  # the body appends to the list
        if not isinstance(part, Mapping) or len(parts) > MAX_PARTS:
            return frozenset()
        kinds, alternatives = part.get("type"), part.get("anyOf", part.get("oneOf"))
        values = [part["const"]] if "const" in part else part.get("enum")
        if isinstance(kinds, str):
            types.add(kinds)
        elif isinstance(kinds, list):
            types.update(kind for kind in kinds if isinstance(kind, str))
        elif isinstance(values, list):
            types.update(name for kind in set(map(type, values)) for name in TYPES[kind])
        elif isinstance(reference := part.get(REFERENCE), str):
            if reference not in references:
                references.add(reference)
                parts.append(resolved(root, reference))
        elif isinstance(alternatives, list):
            parts += alternatives
        elif isinstance(all_of := part.get("allOf"), list) and len(all_of) == 1:
            parts += all_of
        else:
            return frozenset()
    return frozenset(types)
