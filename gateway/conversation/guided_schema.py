"""Converts JSON schemas for grammars: closes objects, drops keywords without effect, and fixes the spacing of calls."""

import json
import math
from collections.abc import Mapping, Set
from dataclasses import replace
from typing import Any, TypeGuard
from urllib.parse import unquote

from baton.errors import InvalidRequest
from baton.sampling import MAX_GRAMMAR_CHARACTERS, GrammarKind, StructuredOutput
from gateway.conversation.endless_schema import check_ends
from gateway.conversation.messages import Tool
from gateway.conversation.schema_checks import DRAFT_3, LONG_NUMBER, check_schema
from gateway.conversation.schema_parts import (
    ALTERNATIVES,
    CONDITIONS,
    DEFINITIONS,
    MAPS,
    REFERENCE,
    SCHEMAS,
    TUPLES,
    VALUES,
    schemas_in,
)

MAX_NESTED = 100
"""A schema has at most this many levels. Deeper schemas are refused, because the functions below recurse into all
levels."""

FORMATS = frozenset(
    "date-time date time duration email hostname ipv4 ipv6 uuid uri".split()  # noqa: SIM905
)
"""Formats of strings that a grammar enforces. Other formats, such as `int32`, have no effect on what is
valid."""

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
"""Keywords that have no effect on what is valid. They are the largest part of many schemas."""

SPACING_KEY = "x-guidance"
SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""The spacing of Python's `json.dumps` and of `tojson` in chat templates. With this spacing, a call has the same tokens
in later prompts, so they are found in the prefix cache. A small model cannot write spaces without end."""

ANSWER_SPACING = {"whitespace_pattern": r"[ \t]{1,128}|[ \t]{0,8}(\r?\n){1,2}[ \t]{0,128}"}
"""The spaces and line ends that an answer in JSON may have in one place: enough for the lines of a deep object. Without
a limit, a small model may write line ends until `max_tokens`."""

ANY_ARGUMENTS = json.dumps({"type": "object", SPACING_KEY: SPACING})
WHOLE = "x-whole"
"""The name of a whole schema among its own definitions. It is made longer if the schema already contains it. See
`divisible`."""

MAX_BOUND = 2**63 - 2048
"""The compiler of grammars refuses many larger bounds of numbers, for example the minimum of 64-bit integers."""
LOWER_BOUNDS = ("minimum", "exclusiveMinimum")
UPPER_BOUNDS = ("maximum", "exclusiveMaximum")
LEAST_STEP = 1e-40
"""The step from 0 to the next number. A grammar has no room for many more digits."""
MAX_EDGE = 2**50
"""From this number on, four steps of a float are 1 or more."""

_OPENING = frozenset(
    "additionalProperties patternProperties unevaluatedProperties allOf anyOf oneOf $ref if not".split()  # noqa: SIM905
)
"""If an object has one of these keywords, `properties` does not list all properties that the object may have, so the
object is not closed."""

_SAME_OBJECT = (REFERENCE, "anyOf", "oneOf", *CONDITIONS)
"""Keywords whose schemas apply to the same object as `properties` beside them."""
_BESIDE = frozenset(
    "properties patternProperties additionalProperties unevaluatedProperties minProperties".split()  # noqa: SIM905
)
"""If an object has one of these keywords, its alternatives must accept properties that they do not list."""
_CHANGED = ("format", "uniqueItems", "propertyNames", "properties", *LOWER_BOUNDS, *UPPER_BOUNDS)
"""Only schemas that have one of these keywords may need a change for a grammar."""
_TYPES = ["null", "boolean", "number", "string", "array", "object"]


def guided_schema(tool: Tool) -> str:
    """The schema of a tool's arguments as JSON text. Raises InvalidRequest, which names `tools`, if the tool's
    parameters cannot be guided.

    If an object lists its properties, further ones are forbidden unless the schema allows them: no tool reads
    properties that a model invents, and a small model may invent them without end.
    """
    check_parameters(tool)
    whose = f"the parameters of '{tool.name}'"
    check_schema("tools", whose, tool.parameters)
    guided = _guided(tool.parameters, _may_close(tool.parameters), _parts_of(tool.parameters))
    schema = {"type": "object", **guided, SPACING_KEY: SPACING}
    source = json.dumps(schema, ensure_ascii=False)
    # A larger schema is not checked: its grammar is mostly too large anyway.
    if REFERENCE in source and len(source) <= MAX_GRAMMAR_CHARACTERS:
        check_ends("tools", whose, schema)
    return source


def divisible(source: str) -> dict[str, Any]:
    """Parses the JSON text of a schema, and makes its parts usable alone. If a part of the result gets the result's
    definitions, all references in the part are valid. For this, the whole schema becomes one more definition, and
    references to anything but definitions lead into it."""
    schema: dict[str, Any] = json.loads(source)
    if REFERENCE not in source:
        return schema
    name = WHOLE
    while f'"{name}"' in source:
        name += "-"
    if (moved := _with_moved_references(schema, name, _parts_of(schema))) == schema:
        return schema
    whole = {key: value for key, value in moved.items() if key not in (*DEFINITIONS, SPACING_KEY, "$id")}
    definitions = moved.get(DEFINITIONS[0])
    others = definitions if isinstance(definitions, dict) else {}
    return {**moved, DEFINITIONS[0]: {**others, name: whole}}


def _with_moved_references(value: Any, whole: str, parts: Set[int]) -> Any:
    """The value, with references to anything but definitions moved into the definition that is called `whole`."""
    if isinstance(value, list):
        return [_with_moved_references(each, whole, parts) for each in value]
    if not isinstance(value, Mapping):
        return value
    is_part = id(value) in parts
    moved: dict[str, Any] = {
        key: each if is_part and key in VALUES else _with_moved_references(each, whole, parts)
        for key, each in value.items()
    }
    first, *path = str(moved.get(REFERENCE, "")).split("/") if is_part else [""]
    if first == "#" and not (path and unquote(path[0]) in DEFINITIONS):
        moved[REFERENCE] = "/".join(("#", DEFINITIONS[0], whole, *path))
    return moved


def spaced(source: str) -> str:
    """The schema, with the spacing that the arguments of calls have. A text that is no schema, or too deep, is returned
    unchanged."""
    try:
        schema = json.loads(source)
        return json.dumps(schema | {SPACING_KEY: SPACING}) if isinstance(schema, dict) else source
    except (ValueError, RecursionError):
        return source


def with_limited_spaces(response_format: StructuredOutput) -> StructuredOutput:
    """The response format, with ANSWER_SPACING if it is a JSON schema. A text that would become too long stays."""
    text = response_format.source.rstrip(" \t\r\n")
    try:
        is_schema = response_format.kind is GrammarKind.JSON_SCHEMA and isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        is_schema = False  # the compiler says what is wrong
    inside = text[:-1]
    comma = "" if inside.strip() == "{" else ","
    source = f'{inside}{comma}"{SPACING_KEY}":{json.dumps(ANSWER_SPACING)}}}'
    if not is_schema or len(source) > MAX_GRAMMAR_CHARACTERS:
        return response_format
    return replace(response_format, source=source)


def checked_response_format(response_format: StructuredOutput) -> StructuredOutput:
    """The response format with closed objects, as in the schemas of tools, and without keywords that have no effect:
    the compiler of grammars refuses some of these. Raises InvalidRequest if a client's schema has a part that only an
    endless value would match, if `check_schema` refuses it, or if it has SPACING_KEY, with which an answer might not be
    JSON. The compiler reads this key only at the schema's top.
    """
    may_change = any(f'"{key}"' in response_format.source for key in _CHANGED)
    signs = (SPACING_KEY, REFERENCE, r"\u", *DRAFT_3)
    has_sign = may_change or any(sign in response_format.source for sign in signs)
    has_sign = has_sign or LONG_NUMBER.search(response_format.source) is not None
    if response_format.kind is not GrammarKind.JSON_SCHEMA or not has_sign:
        return response_format
    try:
        schema = json.loads(response_format.source)
        if not isinstance(schema, dict):
            return response_format
        if SPACING_KEY in schema:
            raise InvalidRequest("structured_output", f"the schema has the key '{SPACING_KEY}'; remove it")
        check_schema("structured_output", "the schema", schema)
        parts = _parts_of(schema)
        guided = _guided(schema, _may_close(schema), parts) if may_change else schema
        check_ends("structured_output", "the schema", guided)
        if guided != schema:
            source = _short_json(guided)
            if len(source) > MAX_GRAMMAR_CHARACTERS:  # only the closed schema is too long
                source = _short_json(_guided(schema, False, parts))
            return replace(response_format, source=source)
    except (ValueError, RecursionError):
        pass  # the compiler says what is wrong
    return response_format


def _short_json(schema: object) -> str:
    """JSON without escapes for characters beyond ASCII, which could make it too long. Raises ValueError for half of a
    surrogate pair, which only an escape can express."""
    source = json.dumps(schema, ensure_ascii=False, separators=(",", ":"))
    source.encode()
    return source


def check_parameters(tool: Tool) -> None:
    """Raises InvalidRequest if a tool's parameters are nested too deep."""
    if _levels(tool.parameters) > MAX_NESTED:
        raise InvalidRequest(
            "tools", f"the parameters of '{tool.name}' nest more than {MAX_NESTED} levels deep"
        )


def _may_close(schema: Any) -> bool:
    """Whether objects may be closed. Each part of `allOf` must accept all properties. So must the target of a `$ref`
    beside `properties` or `required`, even if the `$ref` is within `anyOf` or the like."""
    if isinstance(schema, list):
        return all(map(_may_close, schema))
    if not isinstance(schema, Mapping):
        return True
    has_more = "required" in schema or _has_more(schema)
    is_extended = "allOf" in schema or (has_more and _refers(schema))
    return not is_extended and all(map(_may_close, schema.values()))


def _has_more(schema: Mapping[str, Any]) -> bool:
    """Whether the object of a schema may have properties that one of its alternatives does not list."""
    return not _BESIDE.isdisjoint(schema) or sum(key in schema for key in _SAME_OBJECT) > 1


def _refers(schema: Any) -> bool:
    """Whether a `$ref` applies to the same object as this schema."""
    if isinstance(schema, list):
        return any(map(_refers, schema))
    if not isinstance(schema, Mapping):
        return False
    return REFERENCE in schema or any(_refers(schema[key]) for key in _SAME_OBJECT if key in schema)


def _guided(
    schema: Any, closes: bool, parts: Set[int], needed: tuple[frozenset[str | None], ...] = ()
) -> Any:
    """The schema without keywords that have no effect. `closes`: its objects are closed, too. `parts`: see
    `_parts_of`. `needed`: the names that schemas of the same object require; None: a name that no object has."""
    if not isinstance(schema, Mapping):
        return schema
    guided: dict[str, Any] = {}
    closes_parts = closes and not _has_more(schema)
    if isinstance(required := schema.get("required"), list):
        needed = (*needed, frozenset(name if isinstance(name, str) else None for name in required))
    for key, value in schema.items():
        if key in CONDITIONS:
            guided[key] = _guided(value, closes_parts, parts, needed)
        elif key in TUPLES and isinstance(value, list):
            guided[key] = [_guided(part, closes, parts) for part in value]
        elif key in ALTERNATIVES and isinstance(value, list):
            guided[key] = [_guided(part, closes_parts, parts, needed) for part in value]
        elif key in SCHEMAS:
            guided[key] = _guided(value, closes, parts)
        elif key in MAPS and isinstance(value, Mapping):
            closes_value = closes_parts if key == "dependentSchemas" else closes
            guided[key] = {name: _guided(part, closes_value, parts) for name, part in value.items()}
        elif not _is_idle(key, value):
            guided[key] = value if key in VALUES else _elsewhere(_bound(key, value), closes, parts)
    if _is_whole(guided.get("multipleOf")):
        guided["type"] = _with_integers(guided.get("type", _TYPES))
    _move_edges(guided)
    has_all = "properties" in guided and _OPENING.isdisjoint(guided) and _lists_enough(guided, needed)
    if closes and has_all:
        guided["additionalProperties"] = False
    return guided


def _elsewhere(value: Any, closes: bool, parts: Set[int]) -> Any:
    """The value of an unknown keyword, in which a reference may have its target."""
    if isinstance(value, list):
        return [_elsewhere(each, closes, parts) for each in value]
    if not isinstance(value, Mapping):
        return value
    if id(value) in parts:
        return _guided(value, closes, parts)
    return {name: _elsewhere(each, closes, parts) for name, each in value.items()}


def _parts_of(schema: Mapping[str, Any]) -> frozenset[int]:
    """The ids of the objects in a schema that are schemas."""
    return frozenset(map(id, schemas_in(schema)))


def _is_whole(factor: Any) -> bool:
    """Whether only integers are multiples of this number."""
    return isinstance(factor, int | float) and factor > 0 and factor % 1 == 0


def _with_integers(kinds: Any) -> Any:
    """The value of `type`, with integers in place of all numbers, for a number that cannot have a fraction. With the
    type `number`, the library's matcher fails if a token that is no text follows such a number, as in GLM."""
    if isinstance(kinds, list):
        return [_with_integers(kind) for kind in kinds]
    return "integer" if kinds == "number" else kinds


def _bound(key: str, value: Any) -> Any:
    """The value of a keyword. A bound beyond MAX_BOUND becomes MAX_BOUND, so a few valid values are excluded."""
    if isinstance(value, int | float) and key in LOWER_BOUNDS:
        return max(value, -MAX_BOUND)
    if isinstance(value, int | float) and key in UPPER_BOUNDS:
        return min(value, MAX_BOUND)
    return value


def _move_edges(schema: dict[str, Any]) -> None:
    """Moves an exclusive bound of numbers a little if it is an integer. Otherwise the library's grammar
    allows the bound itself if the other bound is less than 1 away, perhaps in another part of the schema: it
    writes 0 for 0 < x < 0.5. The library reads a number of many digits inexactly, so the bound moves by more
    than one float."""
    kinds = schema.get("type", "number")
    if "number" not in (kinds if isinstance(kinds, list) else [kinds]):
        return
    for bound, others, sign in ((LOWER_BOUNDS[1], UPPER_BOUNDS, 1), (UPPER_BOUNDS[1], LOWER_BOUNDS, -1)):
        edge, ends = schema.get(bound), [schema[key] * sign for key in others if _is_number(schema.get(key))]
        if not _is_number(edge) or edge % 1 or not 0 <= edge * sign < MAX_EDGE:
            continue
        moved = edge + sign * (4 * math.ulp(edge) if edge else LEAST_STEP)
        if moved * sign < min(ends, default=math.inf):
            schema[bound] = moved


def _is_number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_idle(key: str, value: Any) -> bool:
    """Whether a keyword with this value has no effect on what is valid."""
    if key == "format":
        return not isinstance(value, str) or value not in FORMATS
    if key == "propertyNames":
        # Zod writes the latter for each record
        return value is True or _guided(value, False, frozenset()) in ({}, {"type": "string"})
    return key in REMARKS or (key == "uniqueItems" and value is False)


def _lists_enough(schema: Mapping[str, Any], needed: tuple[frozenset[str | None], ...]) -> bool:
    """Whether `properties` lists all required names, and enough names for `minProperties`. Quick even if many schemas
    require many names."""
    properties, number = schema["properties"], schema.get("minProperties", 0)
    if not isinstance(properties, Mapping) or not isinstance(number, int):
        return True
    return number <= len(properties) and all(properties.keys() >= names for names in needed)


def _levels(schema: object) -> int:
    """The number of levels of nested values."""
    level, values = 0, [schema]
    while values:
        level += 1
        below: list[object] = []
        for value in values:
            if isinstance(value, Mapping):
                below += value.values()
            elif isinstance(value, list):
                below += value
        values = below
    return level
