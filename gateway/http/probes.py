"""Probes of load balancers and orchestrators: whether the gateway runs, and whether it can serve."""

from collections.abc import Callable

from fastapi import APIRouter
from starlette.responses import JSONResponse

from baton.version import baton_version


def probe_routes(not_ready: Callable[[], str | None]) -> APIRouter:
    """`not_ready` says why no request could be served now; None if it could."""
    routes = APIRouter()

    @routes.head("/health", include_in_schema=False)
    @routes.get("/health", summary="The gateway runs, regardless of its workers")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @routes.head("/ready", include_in_schema=False)
    @routes.get("/ready", summary="Whether a request would find workers", responses={503: {}})
    async def ready() -> JSONResponse:
        reason = not_ready()
        body = {"status": "ready"} if reason is None else {"status": "not ready", "reason": reason}
        return JSONResponse(body, 200 if reason is None else 503)

    @routes.head("/version", include_in_schema=False)
    @routes.get("/version", summary="Baton's version")
    async def get_version() -> dict[str, str]:
        return {"version": baton_version()}

    return routes
