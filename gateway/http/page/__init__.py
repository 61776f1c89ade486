"""Pages for browsers: the live page, and the API's description in Swagger UI.

A browser runs their files unchanged. They contact only this gateway, and load nothing else.
"""

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
DOCS_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Baton's HTTP API</title>
<link rel="icon" href="page/icon.svg">
<link rel="stylesheet" href="docs/swagger-ui.css">
</head>
<body>
<div id="api"></div>
<script src="docs/swagger-ui-bundle.js"></script>
<script src="docs/start.js"></script>
</body>
</html>
"""
DOCS_START = """\
const servers = [{ url: new URL(".", location).href }]; // a reverse proxy may put a prefix before all paths
const ofThisGateway = { updateJsonSpec: (update) => (spec) => update({ ...spec, servers }) };
SwaggerUIBundle({
  url: "openapi.json",
  dom_id: "#api",
  deepLinking: true,
  validatorUrl: null,
  plugins: [{ statePlugins: { spec: { wrapActions: ofThisGateway } } }],
});
"""

HEADERS = {
    # No inline scripts, and nothing from other hosts: a model's text or a worker's name cannot run as a
    # script.
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
DOCS_HEADERS = HEADERS | {
    # Swagger UI adds inline styles and `data:` images. Scripts are loaded from files only.
    "content-security-policy": HEADERS["content-security-policy"]
    .replace("style-src 'self'", "style-src 'self' 'unsafe-inline'")
    .replace("img-src 'self'", "img-src 'self' data:"),
}


def page_routes() -> APIRouter:
    """The live page at `/`, its files below `/page/`, and the API's description at `/docs`. They need no key,
    but the calls that a user makes on them need their usual rights."""
    page = {
        f"/page/{file.name}": file.read_bytes()
        for file in files(__package__).iterdir()
        if _type_of(file.name)
    }
    page["/"] = page.pop("/page/index.html")
    swagger = files("fastapi_swagger") / "resources"
    docs = {
        "/docs": DOCS_PAGE.encode(),
        "/docs/start.js": DOCS_START.encode(),
        "/docs/swagger-ui-bundle.js": (swagger / "swagger-ui-bundle.js").read_bytes(),
        "/docs/swagger-ui.css": (swagger / "swagger-ui.css").read_bytes(),
    }
    routes = APIRouter(include_in_schema=False)
    for contents, headers in ((page, HEADERS), (docs, DOCS_HEADERS)):
        for path, content in contents.items():
            routes.add_api_route(path, _serving(path, content, headers), methods=["GET", "HEAD"])
    return routes


def _serving(path: str, content: bytes, headers: dict[str, str]) -> Callable[[], Awaitable[Response]]:
    media_type = _type_of(path) or _TYPES["html"]

    async def serve() -> Response:
        return Response(content, media_type=media_type, headers=headers)

    return serve


def _type_of(name: str) -> str | None:
    return _TYPES.get(name.rpartition(".")[2])
