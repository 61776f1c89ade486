"""Routes for load balancers, orchestrators and Prometheus: probes, the version, metrics and the workers' addresses."""

from collections.abc import Callable, Iterable
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from baton.version import baton_version
from baton.worker import WorkerEndpoint

Render = Callable[[str], tuple[bytes, str]]
"""Called with the reader's header `accept`. Returns all metrics, and their content type."""


def probe_routes(not_ready: Callable[[], str | None]) -> APIRouter:
    """The routes `/health`, `/ready` and `/version`. `not_ready` returns why the gateway can serve no request now; None
    if it can."""
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


def metrics_routes(render: Render, workers: Callable[[], Iterable[WorkerEndpoint]]) -> APIRouter:
    """The routes `/metrics` (in Prometheus' text format, or in OpenMetrics on request) and `/metrics/targets`.
    `workers` returns the current workers."""
    routes = APIRouter()

    @routes.head("/metrics", include_in_schema=False)
    @routes.get("/metrics", summary="Metrics for Prometheus", response_class=Response)
    async def metrics(request: Request) -> Response:
        body, content_type = render(request.headers.get("accept", ""))
        return Response(body, media_type=content_type)

    @routes.head("/metrics/targets", include_in_schema=False)
    @routes.get(
        "/metrics/targets", summary="Addresses of the workers' metrics, for Prometheus' http_sd_configs"
    )
    async def targets() -> list[dict[str, Any]]:
        return [
            {"targets": [worker.metrics_address], "labels": {"node": worker.node}}
            for worker in workers()
            if worker.metrics_address
        ]

    return routes
