"""Makes the application of the HTTP API from the routes of its parts."""

import asyncio
import json
import re
from collections.abc import Sequence
from functools import cache
from urllib.parse import unquote

from fastapi import APIRouter, FastAPI
from fastapi.routing import APIRoute
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from baton.version import baton_version
from gateway.auth.authenticator import Authenticator
from gateway.http.authentication import HttpAuthentication, add_keys
from gateway.http.description import ERRORS
from gateway.http.errors import add_handlers
from gateway.http.host_check import OwnNames
from gateway.http.json_route import JsonRoute
from gateway.http.request_ids import RequestIds
from gateway.http.request_limits import OneLength, RequestLimits
from gateway.http.small_writes import SmallWrites

_ABSOLUTE = re.compile(rb"https?://(?P<host>[^/]*)(?P<path>/.*)?", re.DOTALL | re.IGNORECASE)


def make_app(
    routes: Sequence[APIRouter],
    authenticator: Authenticator,
    max_body_bytes: int,
    also_open: frozenset[str] = frozenset(),
    own_names: Sequence[str] | None = None,
) -> FastAPI:
    """Returns the application, which describes itself and its keys at /openapi.json.

    Every error has the shape of the API that was called. Only open paths bypass the authenticator (see
    `HttpAuthentication`; `also_open` are further such paths). `own_names`: see `OwnNames`. None: clients may use any
    host name.
    """
    app = FastAPI(
        title="Baton", version=baton_version(), openapi_url=None, responses=ERRORS, redirect_slashes=False
    )
    for router in routes:
        app.include_router(router)

    @cache
    def description_json() -> bytes:
        described = app.openapi()
        add_keys(described, authenticator.key_use, also_open)
        return json.dumps(described, separators=(",", ":")).encode()

    @app.get("/openapi.json", include_in_schema=False)
    async def description() -> Response:
        """The first request makes the description on a thread: this takes a quarter of a second, and should
        delay no other caller."""
        return Response(await asyncio.to_thread(description_json), media_type="application/json")

    for route in (route for router in routes for route in router.routes):
        assert not isinstance(route, APIRoute) or route.body_field is None or isinstance(route, JsonRoute)
    add_handlers(app)
    app.add_middleware(RequestLimits, max_body_bytes)
    app.add_middleware(HttpAuthentication, authenticator, also_open)
    if own_names is not None:
        app.add_middleware(OwnNames, own_names)
    app.add_middleware(OneLength)
    app.add_middleware(RequestIds)
    app.add_middleware(SmallWrites)
    app.add_middleware(AbsoluteTargets)  # the last one added is the outermost
    return app


class AbsoluteTargets:
    """ASGI middleware: turns a URL as target into its path, as RFC 9112 (3.2.2) demands of every server. The URL's host
    replaces the header `host`.

    All clients send such targets to proxies; some clients send them to every server.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (url := _ABSOLUTE.fullmatch(scope["raw_path"])) is not None:
            path = url["path"] or b"/"
            others = [(name, value) for name, value in scope["headers"] if name != b"host"]
            # In place, because the layers around this one look at the path when the answer is sent.
            scope["raw_path"], scope["path"] = path, unquote(path.decode("ascii"))
            scope["headers"] = [(b"host", url["host"]), *others]
        await self._app(scope, receive, send)
