"""The parts of /openapi.json beyond request bodies: streams, headers and errors."""

from typing import Any

from gateway.http.openai.answers import ErrorAnswer
from gateway.http.schemas import whole_schema

ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorAnswer, "description": "The request is invalid, or cannot be served now"},
    "5XX": {"model": ErrorAnswer, "description": "No worker could serve the request, or not in time"},
}


def answers_of(chunk: type) -> dict[int | str, dict[str, Any]]:
    """Responses of a route whose answer may be a stream of `chunk`."""
    json = {"contentMediaType": "application/json"}
    data = {
        "type": "string",
        "anyOf": [
            json | {"contentSchema": whole_schema(chunk), "description": "A part of the answer"},
            json | {"contentSchema": whole_schema(ErrorAnswer), "description": "Nothing comes after it"},
            {"const": "[DONE]", "description": "After the last part"},
        ],
    }
    event = {"type": "object", "properties": {"data": data}, "required": ["data"]}
    stream = {"itemSchema": event}
    return {
        200: {"description": "A stream if `stream` is true", "content": {"text/event-stream": stream}},
        **ERRORS,
    }
