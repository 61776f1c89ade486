"""HttpAuthentication: checks the caller and its rights for each HTTP request, before the body is read."""

from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from baton.errors import RequestError
from gateway.auth.authenticator import Authenticator, KeyUse
from gateway.auth.callers import NO_CALLER, Right
from gateway.http.dialects import Dialect, dialect_of
from gateway.http.errors import response_for
from gateway.http.protocol import ON_CALLER

OPEN = frozenset({"/", "/health", "/ready", "/version", "/openapi.json"})
"""Paths that need no key: probes, public information, and the page, which contains no data."""

OPEN_BELOW = ("/docs", "/page")
"""These paths and all paths below them need no key: they are files of the API's description and of the
page."""

SCHEME = "apiKey"
"""The name of the API keys in the OpenAPI description."""

RIGHTS: dict[str, Right | None] = {
    "/metrics": Right.OBSERVE,
    "/cluster/try": Right.GENERATE,
    "/cluster": Right.OBSERVE,
    "/v1/models": None,
}
"""The right that each path and all paths below it need; the first match decides. None: any key is enough. All
other paths that are not open need the right to generate."""


def right_for(path: str) -> Right | None:
    """The right that a path needs if it is not open."""
    return next((right for prefix, right in RIGHTS.items() if _is_below(path, prefix)), Right.GENERATE)


def is_open(path: str, also_open: frozenset[str]) -> bool:
    """Whether a path needs no key. `also_open`: further such paths of this gateway."""
    return path in OPEN or path in also_open or any(_is_below(path, prefix) for prefix in OPEN_BELOW)


def add_keys(description: dict[str, Any], key_use: KeyUse, also_open: frozenset[str]) -> None:
    """Adds the API keys to an OpenAPI description, so that its readers, such as Swagger UI, can send one."""
    if key_use is KeyUse.NONE:
        return
    scheme = {"type": "http", "scheme": "bearer", "description": "An API key of this gateway"}
    description.setdefault("components", {})["securitySchemes"] = {SCHEME: scheme}
    wanted: list[dict[str, list[str]]] = [{SCHEME: []}] if key_use is KeyUse.REQUIRED else [{}, {SCHEME: []}]
    for path, operations in description["paths"].items():
        for operation in operations.values():
            operation["security"] = [] if is_open(path, also_open) else wanted


class HttpAuthentication:
    """ASGI middleware: sets `request.state.caller`, or refuses the request."""

    def __init__(
        self, app: ASGIApp, authenticator: Authenticator, also_open: frozenset[str] = frozenset()
    ) -> None:
        """`also_open`: further paths that need no key on this gateway."""
        self._app = app
        self._authenticator = authenticator
        self._also_open = also_open

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._admit(scope)
        except RequestError as error:
            await response_for(scope, error)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    async def _admit(self, scope: Scope) -> None:
        path, state = scope["path"], scope.setdefault("state", {})
        if is_open(path, self._also_open):
            state["caller"] = NO_CALLER
            return
        on_caller = state.get(ON_CALLER, lambda _: None)
        on_caller(None)
        try:
            state["caller"] = caller = await self._authenticator.caller_of(_authorizations(scope))
        except RequestError:
            on_caller(NO_CALLER)
            raise
        on_caller(caller)
        self._authenticator.admit(caller, right_for(path))


def _authorizations(scope: Scope) -> list[str]:
    """The values of `Authorization`. On Anthropic's paths, `x-api-key: KEY` means `Authorization: Bearer
    KEY`.

    A client may send the same key in both headers; it counts once.
    """
    shown = [value.decode("latin-1") for name, value in scope["headers"] if name == b"authorization"]
    if dialect_of(scope["path"]) is Dialect.ANTHROPIC:
        in_both = {value.strip().partition(" ")[2].strip() for value in shown}
        keys = [value.decode("latin-1").strip() for name, value in scope["headers"] if name == b"x-api-key"]
        shown += [f"Bearer {key}" for key in keys if key not in in_both]
    return shown


def _is_below(path: str, prefix: str) -> bool:
    return path == prefix or path.startswith(f"{prefix}/")
