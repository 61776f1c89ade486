"""Turns Baton's errors into HTTP responses."""

import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
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
    GatewayStopping,
    InvalidRequest,
    Overloaded,
    RateLimited,
    RequestAborted,
    Unauthenticated,
)
from gateway.error_codes import INTERNAL_MESSAGE, codes_of, name_of
from gateway.http.dialects import Dialect, dialect_of
from gateway.http.error_shapes import SITE_OVERLOADED, error_response, openai_error
from gateway.http.request_ids import id_headers
from gateway.http.validation import first_problem
from gateway.telemetry.call_log import INTERNAL_ERROR

logger = logging.getLogger(__name__)

HTTP_ERRORS = {
    404: "NotFound",
    405: "MethodNotAllowed",
    408: "SlowBody",
    413: "TooLarge",
    415: "UnsupportedMediaType",
    429: "RateLimited",
    431: "TooLarge",
}
"""Names, by status, of errors that the web framework or a middleware found before our routes ran."""

MAX_PATH_CHARACTERS = 200
"""An error message repeats at most this many characters of a path."""


def body_of(error: BaseException) -> dict[str, Any]:
    """The body of an error in OpenAI's shape. A stream sends it if the error happens after the status was
    sent."""
    codes = codes_of(error)
    return openai_error(codes.http, message_of(error), _param_of(error), codes.openai)


def message_of(error: BaseException) -> str:
    """The message for the client. The text of an internal error is not sent."""
    return INTERNAL_MESSAGE if codes_of(error).is_internal else str(error)


def status_of(error: BaseException, dialect: Dialect) -> int:
    """The status in this API. The two APIs differ only for a gateway that has no room for a request."""
    is_site_overloaded = isinstance(error, Overloaded) and not isinstance(error, RateLimited)
    if is_site_overloaded and dialect is Dialect.ANTHROPIC:
        return SITE_OVERLOADED
    return codes_of(error).http


def headers_of(error: BatonError) -> Mapping[str, str]:
    """Headers that say which credentials to send, or whether and when to retry.

    `retry-after` is in whole seconds, as in HTTP. The clients of OpenAI and Anthropic first read
    `retry-after-ms`. They would also retry after their own deadline has passed; `x-should-retry: false`
    prevents this.
    """
    if isinstance(error, Unauthenticated):
        return {"www-authenticate": "Bearer"}
    if isinstance(error, RequestAborted | DeadlineTooClose):
        return {"x-should-retry": "false"}
    if isinstance(error, GatewayStopping):
        return {"retry-after": "1"}
    if not isinstance(error, Overloaded):
        return {}
    return {
        "retry-after": str(math.ceil(error.retry_after_s)),
        "retry-after-ms": str(math.ceil(error.retry_after_s * 1000)),
    }


def add_handlers(app: Starlette) -> None:
    """Gives every error in `app` a response in the shape of the API that was called."""
    app.add_exception_handler(BatonError, _baton_error)
    app.add_exception_handler(RequestValidationError, _bad_field)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _unexpected_error)


def note_error(scope: Scope, error: str) -> None:
    """Records the error of a call for metrics and logs. The code that sends an error calls this."""
    scope.setdefault("state", {})["error"] = error


@contextmanager
def in_terms_of(names: Mapping[str, str]) -> Iterator[None]:
    """A context in which InvalidRequests name fields as the client does. `names` maps the names of fields in errors to
    the client's names."""
    try:
        yield
    except InvalidRequest as error:
        if error.field not in names:
            raise
        raise type(error)(names[error.field], error.problem) from error


def response_for(scope: Scope, error: BatonError) -> JSONResponse:
    """The response for a call that ended with this error."""
    note_error(scope, name_of(error))
    return error_response(
        scope,
        status_of(error, dialect_of(scope["path"])),
        message_of(error),
        param=_param_of(error),
        code=codes_of(error).openai,
        headers=headers_of(error),
    )


async def _baton_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, BatonError)
    if codes_of(error).is_internal:
        return await _unexpected_error(request, error)
    return response_for(request.scope, error)


async def _bad_field(request: Request, error: Exception) -> JSONResponse:
    """The response for an invalid body: its first problem, with the name of the field."""
    assert isinstance(error, RequestValidationError)
    note_error(request.scope, InvalidRequest.__name__)
    field, problem = first_problem(error.errors(), error.body)
    return error_response(request.scope, HTTPStatus.BAD_REQUEST, f"{field}: {problem}", param=field)


async def _http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    note_error(request.scope, HTTP_ERRORS.get(error.status_code, InvalidRequest.__name__))
    path = request.scope["path"]  # in a path that begins with //, `request.url` would find a host
    message = f"{request.method[:20]} {path[:MAX_PATH_CHARACTERS]}: {error.detail}"
    return error_response(request.scope, error.status_code, message, headers=error.headers)


async def _unexpected_error(request: Request, error: Exception) -> JSONResponse:
    """The response for an unexpected error. This handler runs outside of every middleware, so it adds the request's id
    itself."""
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
    headers = id_headers(request.scope)
    return error_response(request.scope, codes_of(error).http, INTERNAL_MESSAGE, headers=headers)


def _param_of(error: BaseException) -> str | None:
    return error.field if isinstance(error, InvalidRequest) else None
