"""The page at `/docs`: Swagger UI shows /openapi.json to people, and loads nothing from other hosts."""

from collections.abc import Callable
from importlib.resources import files

from fastapi import APIRouter
from starlette.responses import Response

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Baton's HTTP API</title>
<link rel="icon" href="/page/icon.svg">
<link rel="stylesheet" href="/docs/swagger-ui.css">
</head>
<body>
<div id="api"></div>
<script src="/docs/swagger-ui-bundle.js"></script>
<script src="/docs/start.js"></script>
</body>
</html>
"""
START = 'SwaggerUIBundle({url: "/openapi.json", dom_id: "#api", deepLinking: true, validatorUrl: null});\n'

HEADERS = {
    # Swagger UI adds inline styles and `data:` images. Scripts are loaded from files only.
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}


def docs_routes() -> APIRouter:
    """Routes of the page. It needs no key, but the calls that a user makes on it need their usual rights."""
    routes = APIRouter(include_in_schema=False)
    swagger = files("fastapi_swagger") / "resources"

    for path, media_type, content in (
        ("/docs", "text/html", lambda: PAGE),
        ("/docs/start.js", "text/javascript", lambda: START),
        ("/docs/swagger-ui-bundle.js", "text/javascript", (swagger / "swagger-ui-bundle.js").read_bytes),
        ("/docs/swagger-ui.css", "text/css", (swagger / "swagger-ui.css").read_bytes),
    ):
        routes.add_api_route(path, _serving(content, f"{media_type}; charset=utf-8"), methods=["GET"])
    return routes


def _serving(content: Callable[[], str | bytes], media_type: str) -> Callable[[], Response]:
    """A route that serves `content`. It is not `async`, so FastAPI runs it on a thread: reading a file
    blocks."""

    def serve() -> Response:
        return Response(content(), media_type=media_type, headers=HEADERS)

    return serve
