"""The parts of /openapi.json beyond request bodies: streams, headers and errors."""

from typing import Any

from gateway.http.anthropic.answers import ErrorAnswer, StreamEvent
from gateway.http.schemas import whole_schema

ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorAnswer, "description": "The request is invalid, or cannot be served now"},
    "5XX": {
        "model": ErrorAnswer,
        "description": "No worker could serve the request, or not in time; 529: no room at present",
    },
}

HEADERS: dict[str, Any] = {
    "parameters": [
        {
            "name": name,
            "in": "header",
            "required": False,
            "schema": {"type": "string"},
            "description": description,
        }
        for name, description in (
            ("anthropic-version", "Accepted and ignored: answers have the shape of 2023-06-01."),
            ("anthropic-beta", "Accepted and ignored: fields decide, and unknown ones are refused."),
            ("x-api-key", "The key, in place of `Authorization: Bearer`."),
        )
    ]
}


def message_answers() -> dict[int | str, dict[str, Any]]:
    """Responses of a route whose answer may be a stream."""
    data = {
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": whole_schema(StreamEvent),
    }
    event = {
        "type": "object",
        "properties": {
            "event": {"type": "string", "description": "As `type` in the data."},
            "data": data,
        },
        "required": ["event", "data"],
    }
    return {
        200: {
            "description": "A stream if `stream` is true",
            "content": {"text/event-stream": {"itemSchema": event}},
        },
        **ERRORS,
    }
