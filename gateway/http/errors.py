"""Our errors as HTTP answers in OpenAI's shape, in one place."""

import logging
import math
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import Scope

from baton.errors import (
    BatonError,
    DeadlineTooClose,
    InvalidRequest,
    Overloaded,
    RequestAborted,
    Unauthenticated,
)
from gateway.error_codes import INTERNAL_MESSAGE, codes_of
from gateway.http.request_ids import HEADER, shown_id
from gateway.http.validation import first_problem
from gateway.telemetry.call_log import INTERNAL_ERROR

logger = logging.getLogger(__name__)

TYPES = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
}
"""OpenAI's `type` of an error, where it is neither an invalid request nor a server error."""

HTTP_ERRORS = {
    404: "NotFound",
    405: "MethodNotAllowed",
    408: "SlowBody",
    413: "TooLarge",
    415: "UnsupportedMediaType",
    431: "TooLarge",
}
"""Errors of calls that never reached our own code."""

MAX_PATH_CHARACTERS = 200
"""Longest part of a path that is repeated in a message."""


def error_body(
    status: int, message: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """The shape that OpenAI's clients expect; by default, `code` repeats the status by name."""
    kind = TYPES.get(HTTPStatus(status), "invalid_request_error" if status < 500 else "server_error")
    by_name = HTTPStatus(status).phrase.lower().replace(" ", "_")
    return {"error": {"message": message, "type": kind, "param": param, "code": code or by_name}}


def body_of(error: BaseException) -> dict[str, Any]:
    """Also used for an error in mid-stream, after the status was sent. The text of an internal error is not sent."""
    codes = codes_of(error)
    message = INTERNAL_MESSAGE if codes.is_internal else str(error)
    param = error.field if isinstance(error, InvalidRequest) else None
    return error_body(codes.http, message, param, codes.openai)


def headers_of(error: BatonError) -> Mapping[str, str]:
    """Which credentials to send, or when to retry: in whole seconds as in HTTP, and in milliseconds, which OpenAI's
    client reads first. Otherwise that client would also retry after a deadline of its own."""
    if isinstance(error, Unauthenticated):
        return {"www-authenticate": "Bearer"}
    if isinstance(error, RequestAborted | DeadlineTooClose):
        return {"x-should-retry": "false"}
    if not isinstance(error, Overloaded):
        return {}
    return {
        "retry-after": str(math.ceil(error.retry_after_s)),
        "retry-after-ms": str(math.ceil(error.retry_after_s * 1000)),
    }


def add_handlers(app: Starlette) -> None:
    """Every error in `app` gets a response of one shape."""
    app.add_exception_handler(BatonError, _baton_error)
    app.add_exception_handler(RequestValidationError, _bad_field)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _bug)


def note_error(scope: Scope, error: str) -> None:
    """Records the error of a call for metrics and logs; called by whatever sends the error."""
    scope.setdefault("state", {})["error"] = error


def answer_of(scope: Scope, error: BatonError) -> JSONResponse:
    """The response for a call that ended with this error."""
    note_error(scope, type(error).__name__)
    return JSONResponse(body_of(error), codes_of(error).http, headers_of(error))


async def _baton_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, BatonError)
    if codes_of(error).is_internal:
        return await _bug(request, error)
    return answer_of(request.scope, error)


async def _bad_field(request: Request, error: Exception) -> JSONResponse:
    """The first problem of a body, by the name of its field."""
    assert isinstance(error, RequestValidationError)
    note_error(request.scope, InvalidRequest.__name__)
    field, problem = first_problem(error.errors(), error.body)
    return JSONResponse(error_body(HTTPStatus.BAD_REQUEST, f"{field}: {problem}", field), 400)


async def _http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    note_error(request.scope, HTTP_ERRORS.get(error.status_code, InvalidRequest.__name__))
    path = request.scope["path"]  # `request.url` would parse what follows // as a host
    message = f"{request.method[:20]} {path[:MAX_PATH_CHARACTERS]}: {error.detail}"
    return JSONResponse(error_body(error.status_code, message), error.status_code, error.headers)


async def _bug(request: Request, error: Exception) -> JSONResponse:
    """Runs outside of every middleware, so it must add the request's id itself."""
    request_id = request.state.request_id
    note_error(request.scope, INTERNAL_ERROR)
    logger.error(
        "%s %s failed, request %s",
        request.method,
        request.url.path,
        request_id,
        exc_info=error,
        extra={"request_id": request_id},
    )
    headers = {HEADER: shown_id(request.scope["state"])}
    return JSONResponse(body_of(error), codes_of(error).http, headers)
