"""OwnNames: a gateway that asks nobody for a key answers only who calls it by a name of its own.

Any page in a browser may let its own name lead to 127.0.0.1 (DNS rebinding). To the browser the gateway is then that
page's server, and the page reads what it answers. The header `host` tells: browsers write there what they were asked
for, and no page can change it.
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
    """ASGI middleware: 403 for whoever means another host. Who names none, as HTTP/1.0 allows, is no browser."""

    def __init__(self, app: ASGIApp, names: Iterable[str]) -> None:
        """`names`: beside those of loopback; IPv6 addresses without brackets."""
        self._app = app
        self._names = frozenset(in_url(name).lower() for name in (*LOOPBACK, *names))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        host = Headers(scope=scope).get("host") if scope["type"] == "http" else None
        if host is None or _name_in(host) in self._names:
            await self._app(scope, receive, send)
            return
        error = PermissionDenied(
            f"this gateway is for its own machine, and not known as {host[:MAX_SHOWN_CHARACTERS]!r}; call it by "
            "localhost, let its operator add the name to gateway.allowed_hosts, or ask for API keys"
        )
        await answer_of(scope, error)(scope, receive, send)


def _name_in(host: str) -> str | None:
    """Without the port; None if it is no name at all."""
    found = _HOST.fullmatch(host)
    return None if found is None else found[1].lower()
