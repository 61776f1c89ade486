"""The parts of /openapi.json that the APIs share: errors, and streams of server-sent events."""

from typing import Any

from pydantic import TypeAdapter

from gateway.http.openai.answers import ErrorAnswer

Responses = dict[int | str, dict[str, Any]]
"""A route's responses by status."""


def errors_of(
    shape: type, unavailable: str = "No worker could serve the request, or none in time"
) -> Responses:
    """The error responses of a route. `shape`: the body of an error. `unavailable`: the description of statuses from
    500 on."""
    return {
        "4XX": {"model": shape, "description": "The request is invalid, or cannot be served now"},
        "5XX": {"model": shape, "description": unavailable},
    }


ERRORS = errors_of(ErrorAnswer)
"""The errors of OpenAI's API, and of Baton's own paths."""


def event_stream(
    data: dict[str, Any], *, is_named: bool = True, description: str = "A stream if `stream` is true"
) -> dict[str, Any]:
    """A response of server-sent events. `data`: the schema of an event's data, which is a string.
    `is_named`: each event has a name."""
    properties = {"event": {"type": "string", "description": "The kind of event"}} if is_named else {}
    properties["data"] = {"type": "string", **data}
    event = {"type": "object", "properties": properties, "required": [*properties]}
    return {"description": description, "content": {"text/event-stream": {"itemSchema": event}}}


def json_text(shape: Any) -> dict[str, Any]:
    """The schema of a string with JSON of this shape. It cannot refer to other schemas, so the definitions
    that it uses are copied into it."""
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

    return {"contentMediaType": "application/json", "contentSchema": inlined(schema)}
