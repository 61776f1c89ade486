"""Routes for the live page: a snapshot of the cluster, a stream of snapshots, and one request's stages."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from fastapi import APIRouter, Request
from starlette.responses import Response

from gateway.auth import callers
from gateway.auth.callers import Caller
from gateway.http.description import ERRORS, event_stream
from gateway.http.event_stream import EventStream, event, stream_of
from gateway.http.json_route import JsonRoute
from gateway.http.request_ids import trace_of
from gateway.http.trial import PageTrial, TrialRequest
from gateway.telemetry.live_feed import LiveFeed
from gateway.telemetry.snapshot import ClusterSnapshot

_STREAM = event_stream({}, description="A stream")


def cluster_routes(feed: LiveFeed, trial: PageTrial) -> APIRouter:
    routes = APIRouter(route_class=JsonRoute)

    @routes.get(
        "/cluster", summary="A snapshot of the cluster", responses={**ERRORS, 200: {"model": ClusterSnapshot}}
    )
    async def cluster(request: Request) -> Response:
        edition = await feed.latest()
        body = edition.json(for_administrators=_caller(request).may_administer)
        return Response(body, media_type="application/json", headers={"cache-control": "no-store"})

    @routes.get(
        "/cluster/events",
        summary="A snapshot of the cluster every second, as server-sent events called `snapshot`",
        status_code=200,
        response_class=Response,
        responses={**ERRORS, 200: _STREAM},
    )
    async def events(request: Request) -> EventStream:
        return stream_of(_snapshots(feed, _caller(request)))

    @routes.post(
        "/cluster/try",
        summary="Sends one request, and reports its way as server-sent events",
        description="`received`, `placed` (again after a worker was lost), `tokens` as they arrive, then "
        "`end` with the time spent in each stage, or `error`.",
        status_code=200,
        response_class=Response,
        responses={**ERRORS, 200: _STREAM},
    )
    async def try_one(body: TrialRequest, request: Request) -> EventStream:
        trace = trace_of(request.headers)
        return stream_of(await trial.begin(body, _caller(request), request.state.request_id, trace))

    return routes


def _caller(request: Request) -> Caller:
    caller: Caller = request.state.caller
    return caller


async def _snapshots(feed: LiveFeed, caller: Caller) -> AsyncGenerator[bytes, None]:
    now = asyncio.get_running_loop().time
    ends_at = now() + callers.MAX_WATCH_S
    async with aclosing(feed.watch()) as editions:
        async for edition in editions:
            yield event("snapshot", edition.json(for_administrators=caller.may_administer))
            if now() >= ends_at:
                return
