"""Writes an error's status and body in the shape of the API that was called; does not know our exceptions."""

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import Scope

from gateway.http.dialects import Dialect, dialect_of
from gateway.http.request_ids import shown_id

OPENAI_TYPES = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
}
"""OpenAI's `type` of an error by status. Other statuses are `invalid_request_error` or `server_error`."""

SITE_OVERLOADED = 529
"""Anthropic's status if the whole gateway has no room. 429 means that the caller's own limit is reached."""

ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    431: "request_too_large",
    503: "overloaded_error",
    504: "timeout_error",
    SITE_OVERLOADED: "overloaded_error",
}
"""Anthropic's `type` of an error by status. Other statuses are `invalid_request_error` or `api_error`."""

OPENAI_CODES = {413: "request_entity_too_large", 429: "rate_limit_exceeded"}
"""OpenAI's `code` of an error, by status. For other statuses, it is Python's name of the status. Python's name of 413
depends on its version."""

ANTHROPIC_DETAILS = {"thread": {"error_code": "thread_unsupported_request"}}
"""Anthropic's `details` of a refusal, by field. The tool runner of the `anthropic` package sends the field `thread`. If
it gets these details, it continues without the field."""

MAX_MESSAGE_CHARACTERS = 2_000
"""Limit for the message and for the name of the field: they may contain client input, which must not be
returned in full."""


def openai_error(
    status: int, message: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """The body of an error. By default, `code` is the status's code in OPENAI_CODES, otherwise the status's name."""
    kind = OPENAI_TYPES.get(HTTPStatus(status), "invalid_request_error" if status < 500 else "server_error")
    code = code or OPENAI_CODES.get(status) or HTTPStatus(status).phrase.lower().replace(" ", "_")
    param = None if param is None else _short(param)
    return {"error": {"message": _short(message), "type": kind, "param": param, "code": code}}


def anthropic_error(status: int, message: str, request_id: str, param: str | None = None) -> dict[str, Any]:
    """The body of an error. This shape has no key for the field, so the message must name the field."""
    kind = ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    error: dict[str, Any] = {"type": kind, "message": _short(message)}
    if param in ANTHROPIC_DETAILS:
        error["details"] = ANTHROPIC_DETAILS[param]
    return {"type": "error", "error": error, "request_id": request_id}


def _short(text: str) -> str:
    return text if len(text) <= MAX_MESSAGE_CHARACTERS else f"{text[: MAX_MESSAGE_CHARACTERS - 3]}..."


def error_response(
    scope: Scope,
    status: int,
    message: str,
    *,
    param: str | None = None,
    code: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> JSONResponse:
    """The response for an error. `param` and `code` are sent only to OpenAI's clients."""
    if dialect_of(scope["path"]) is Dialect.ANTHROPIC:
        body = anthropic_error(status, message, shown_id(scope["state"]), param)
        return JSONResponse(body, status, headers)
    return JSONResponse(openai_error(status, message, param, code), status, headers)
