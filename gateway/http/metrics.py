"""Prometheus' endpoints of a gateway: its metrics, and the addresses of its workers' metrics."""

from collections.abc import Callable, Iterable
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from baton.worker import WorkerEndpoint

Render = Callable[[str], tuple[bytes, str]]
"""All metrics for a reader that accepts this format, and their content type."""


def metrics_routes(render: Render, workers: Callable[[], Iterable[WorkerEndpoint]]) -> APIRouter:
    """The text format, or OpenMetrics on request; `workers` are the current ones."""
    routes = APIRouter()

    @routes.get("/metrics", summary="Metrics for Prometheus", response_class=Response)
    async def metrics(request: Request) -> Response:
        body, content_type = render(request.headers.get("accept", ""))
        return Response(body, media_type=content_type)

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
