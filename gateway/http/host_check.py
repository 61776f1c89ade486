"""OwnNames: a gateway without API keys answers only requests to one of its own names.

A web page may let its own name resolve to 127.0.0.1 (DNS rebinding). The browser then takes the gateway for that
page's server, and the page can read its answers. The header `host` reveals this: browsers fill it in themselves, and
no page can change it.
"""

import re
from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from baton.errors import PermissionDenied
from baton.system.hosts import in_url
from gateway.http.errors import answer_of

LOOPBACK = ("localhost", "127.0.0.1", "::1")
MAX_SHOWN_CHARACTERS = 100

_HOST = re.compile(r"(\[[^\[\]]+\]|[^:\[\]]+)(?::[0-9]*)?")


class OwnNames:
    """ASGI middleware: 403 for requests to another host name. Requests without one, as HTTP/1.0 allows, come from no
    browser.
    """

    def __init__(self, app: ASGIApp, names: Iterable[str]) -> None:
        """`names`: further names beside those of loopback; IPv6 addresses without brackets."""
        self._app = app
        self._names = frozenset(in_url(name).lower() for name in (*LOOPBACK, *names))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        host = Headers(scope=scope).get("host") if scope["type"] == "http" else None
        if host is None or _name_in(host) in self._names:
            await self._app(scope, receive, send)
            return
        error = PermissionDenied(
            "this gateway only serves its own machine, and does not know the host name "
            f"{host[:MAX_SHOWN_CHARACTERS]!r}; use localhost, or ask its operator to add the name to "
            "gateway.allowed_hosts, or to require API keys"
        )
        await answer_of(scope, error)(scope, receive, send)


def _name_in(host: str) -> str | None:
    """The host without its port; None if it is invalid."""
    found = _HOST.fullmatch(host)
    return None if found is None else found[1].lower()
