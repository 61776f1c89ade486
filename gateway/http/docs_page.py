"""The page at `/docs`: /openapi.json for people, drawn by Swagger UI, which loads nothing from other hosts."""

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
    # Swagger UI sets styles and images as it draws; scripts come from files only.
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}


def docs_routes() -> APIRouter:
    """The page is open to everyone; the calls it makes need their usual rights."""
    routes = APIRouter(include_in_schema=False)
    swagger = files("fastapi_swagger") / "resources"

    @routes.get("/docs")
    async def page() -> Response:
        return Response(PAGE, media_type="text/html; charset=utf-8", headers=HEADERS)

    @routes.get("/docs/start.js")
    async def start() -> Response:
        return Response(START, media_type="text/javascript; charset=utf-8", headers=HEADERS)

    @routes.get("/docs/swagger-ui-bundle.js")
    def bundle() -> Response:
        content = (swagger / "swagger-ui-bundle.js").read_bytes()
        return Response(content, media_type="text/javascript; charset=utf-8", headers=HEADERS)

    @routes.get("/docs/swagger-ui.css")
    def styles() -> Response:
        content = (swagger / "swagger-ui.css").read_bytes()
        return Response(content, media_type="text/css; charset=utf-8", headers=HEADERS)

    return routes
