"""The live page: files that a browser runs unchanged; they contact only this gateway, and load nothing else."""

from collections.abc import Awaitable, Callable
from importlib.resources import files

from fastapi import APIRouter
from starlette.responses import Response

_TYPES = {
    "css": "text/css; charset=utf-8",
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
FILES = (
    "index.html",
    "icon.svg",
    "page.css",
    "page.js",
    "cluster.js",
    "dom.js",
    "links.js",
    "numbers.js",
    "sparklines.js",
    "stages.js",
    "stream.js",
    "trial.js",
    "timeline.js",
)

HEADERS = {
    # No inline scripts, and nothing from other hosts: a model's text or a worker's name cannot run as a
    # script.
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def page_routes() -> APIRouter:
    """The page at `/`, and its files below `/page/`. They need no key."""
    routes = APIRouter(include_in_schema=False)
    for name in FILES:
        path = "/" if name == "index.html" else f"/page/{name}"
        routes.add_api_route(path, _file(name), methods=["GET", "HEAD"])
    return routes


def _file(name: str) -> Callable[[], Awaitable[Response]]:
    content = (files(__package__) / name).read_bytes()
    media_type = _TYPES[name.rpartition(".")[2]]

    async def serve() -> Response:
        return Response(content, media_type=media_type, headers=HEADERS)

    return serve
