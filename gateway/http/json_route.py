"""JsonRoute: a route of the web framework whose body must be strict JSON, with JSON's content type."""

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException

from gateway.strict_json import NotStrict, parse

LONG_BYTES = 2**16
"""Parsing a larger body takes milliseconds."""


class JsonRoute(APIRoute):
    """A route that parses its body as strict JSON. Every route with a body must be a JsonRoute."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_strictly(request: Request) -> Response:
            return await handle(_JsonRequest(request.scope, request.receive))

        return handle_strictly


class _JsonRequest(Request):
    async def body(self) -> bytes:
        """Checks the headers before FastAPI reads the body. Without this check, FastAPI would not parse a body of
        another content type."""
        if _has_body(self.headers):
            _check_kind(self.headers)
        return await super().body()

    async def json(self) -> Any:
        """The parsed body. Raises JSONDecodeError, which FastAPI reports as an error of the client."""
        if not hasattr(self, "_json"):
            body = await self.body()
            try:
                self._json = parse(body)
            except NotStrict as error:
                raise json.JSONDecodeError(str(error), "", 0) from error
            if len(body) > LONG_BYTES:
                await asyncio.sleep(0)  # other tasks run before pydantic validates the values
        return self._json


def _has_body(headers: Headers) -> bool:
    return headers.get("content-length", "0") != "0" or "transfer-encoding" in headers


def _check_kind(headers: Headers) -> None:
    """Raises HTTPException if the headers announce anything but plain JSON."""
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise HTTPException(415, f"send JSON as content-type application/json, got {kind[:60] or 'none'!r}")
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        raise HTTPException(415, f"send JSON without content-encoding, got {encoding[:60]!r}")
