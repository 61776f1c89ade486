"""Schemas for /openapi.json that describe the content of a string; they cannot refer to other schemas."""

from typing import Any

from pydantic import TypeAdapter


def whole_schema(shape: Any) -> Any:
    """A schema without references: the definitions that it uses are copied into it."""
    schema = TypeAdapter(shape).json_schema(mode="serialization")
    parts = schema.pop("$defs", {})

    def inlined(value: Any) -> Any:
        if isinstance(value, list):
            return [inlined(item) for item in value]
        if not isinstance(value, dict):
            return value
        if "$ref" in value:
            return inlined(parts[value["$ref"].removeprefix("#/$defs/")])
        return {key: inlined(item) for key, item in value.items()}

    return inlined(schema)
