"""AbsoluteTargets: serves a request whose target is a whole URL, as RFC 9112 (3.2.2) demands of every server.

All clients send such targets to proxies; some clients send them to every server.
"""

import re
from urllib.parse import unquote

from starlette.types import ASGIApp, Receive, Scope, Send

_ABSOLUTE = re.compile(rb"https?://(?P<host>[^/]*)(?P<path>/.*)?", re.DOTALL | re.IGNORECASE)


class AbsoluteTargets:
    """ASGI middleware: turns a URL as target into its path. The URL's host replaces the header `host`."""

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
