"""The parts of /openapi.json beyond request bodies: streams, headers and errors."""

from typing import Any

from gateway.http.anthropic.answers import MessageErrorAnswer, StreamEvent
from gateway.http.description import errors_of, event_stream, json_text

ERRORS = errors_of(
    MessageErrorAnswer, "No worker could serve the request, or not in time; 529: no room at present"
)

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

MESSAGE_ANSWERS = {200: event_stream(json_text(StreamEvent)), **ERRORS}
"""The responses of a route whose answer may be a stream."""
