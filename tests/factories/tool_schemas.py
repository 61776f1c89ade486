"""Fifty JSON schemas of tools' arguments, as agents have them: nested, enums, optional, arrays, references, unicode."""

from itertools import product
from typing import Any

Schema = dict[str, Any]

TEXT: Schema = {"type": "string", "maxLength": 24}
VALUES: dict[str, Schema] = {
    "text": TEXT,
    "any text": {"type": "string"},
    "number": {"type": "number", "minimum": 0, "maximum": 99},
    "integer": {"type": "integer", "minimum": -5, "maximum": 500},
    "flag": {"type": "boolean"},
    "enum": {"enum": ["low", "medium", "high"]},
    "unicode enum": {"enum": ["Grüße", "日本", 'a "b"', "c\\d"]},
    "mixed enum": {"enum": ["auto", 0, None, True]},
    "constant": {"const": "v1"},
    "nullable": {"type": ["string", "null"], "maxLength": 12},
    "date": {"type": "string", "format": "date"},
    "pattern": {"type": "string", "pattern": "^[A-Z]{3}-[0-9]{2}$"},
    "list": {"type": "array", "items": TEXT, "minItems": 1, "maxItems": 3},
    "list of lists": {
        "type": "array", "maxItems": 2, "items": {"type": "array", "maxItems": 2, "items": {"type": "integer"}},
    },
    "pair": {
        "type": "array", "prefixItems": [{"type": "integer"}, {"type": "boolean"}], "items": False, "minItems": 2,
    },
    "either": {"anyOf": [{"type": "integer"}, {"enum": ["none"]}]},
    "map": {"type": "object", "additionalProperties": {"type": "integer"}, "maxProperties": 2},
}  # fmt: skip
"""Schemas for one argument."""

PLACE: Schema = {
    "type": "object",
    "properties": {"street": TEXT, "größe": {"type": "integer"}, "kind": {"enum": ["Haus", "家"]}},
    "required": ["street"],
}
TREE: Schema = {
    "type": "object",
    "properties": {
        "name": TEXT,
        "children": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2},
    },
    "required": ["name"],
}


def tool_schemas() -> list[Schema]:
    """Always the same fifty schemas, each for an object."""
    alone = [_object({"value": value}, ["value"]) for value in VALUES.values()]
    optional = [
        _object({"must": VALUES[first], "may": VALUES[second]}, ["must"])
        for first, second in zip(VALUES, [*VALUES][5:], strict=False)
    ]
    nested = [
        _object({"a": _object({"b": _object({"deep": VALUES[name], "also": TEXT}, ["deep"])}, ["b"])}, ["a"])
        for name in ("integer", "unicode enum", "list", "either", "flag", "nullable", "pattern", "map")
    ]  # fmt: skip
    places: tuple[Schema, ...] = (
        {"$ref": "#/$defs/place"},
        {"type": "array", "items": {"$ref": "#/$defs/place"}, "maxItems": 2},
    )
    referring = [
        {**_object({"from": value, "名前": other}, ["from", "名前"]), "$defs": {"place": PLACE, "tree": TREE}}
        for value, other in product(places, (TEXT, places[0], VALUES["flag"], VALUES["unicode enum"]))
    ]
    others = [
        {**_object({"root": {"$ref": "#/$defs/tree"}}, ["root"]), "$defs": {"tree": TREE}},
        _object({}, []),
        _object(dict.fromkeys(("a", "b c", "ü", 'q"', "日本語"), VALUES["flag"]), ["a", "ü", 'q"']),
        _object({"edits": {"type": "array", "items": PLACE, "minItems": 1, "maxItems": 2}}, ["edits"]),
        _object({"value": {"allOf": [PLACE, {"properties": {"zip": TEXT}, "required": ["zip"]}]}}, ["value"]),
    ]
    schemas = [*alone, *optional, *nested, *referring, *others]
    assert len(schemas) == 50, len(schemas)
    return schemas


def _object(properties: dict[str, Schema], required: list[str]) -> Schema:
    return {"type": "object", "properties": properties, "required": required}
