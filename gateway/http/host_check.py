"""OwnNames: a gateway on loopback without API keys answers only requests to one of its own names.

A web page may let its own host name resolve to 127.0.0.1 (DNS rebinding). To the browser, the gateway is then
the server of that page, and the page can read the gateway's answers. The header `host` reveals the attack:
the browser sets this header, and no page can change it.
"""

import re
from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from baton.errors import PermissionDenied
from baton.system.hosts import in_url
from gateway.http.errors import response_for

LOOPBACK = ("localhost", "127.0.0.1", "::1")
MAX_SHOWN_CHARACTERS = 100

_HOST = re.compile(r"(\[[^\[\]]+\]|[^:\[\]]+)(?::[0-9]*)?")


class OwnNames:
    """ASGI middleware: answers requests to another host name with 403. HTTP/1.0 allows requests without a
    host name; they are served, because no browser sends them.
    """

    def __init__(self, app: ASGIApp, names: Iterable[str]) -> None:
        """`names`: names in addition to those of loopback. IPv6 addresses have no brackets here."""
        self._app = app
        self._names = frozenset(in_url(name).lower() for name in (*LOOPBACK, *names))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        host = Headers(scope=scope).get("host")
        if host is None or _name_in(host) in self._names:
            await self._app(scope, receive, send)
            return
        error = PermissionDenied(
            "this gateway only serves its own machine, and does not know the host name "
            f"{host[:MAX_SHOWN_CHARACTERS]!r}; use localhost, or ask the operator of this gateway to add the name to "
            "gateway.allowed_hosts, or to require API keys"
        )
        await response_for(scope, error)(scope, receive, send)


def _name_in(host: str) -> str | None:
    """The host without its port; None if it is invalid."""
    found = _HOST.fullmatch(host)
    return None if found is None else found[1].lower()
