"""The live page's routes: a snapshot of the cluster, a stream of snapshots, and one request's stages (PageTrial)."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import asdict, replace
from typing import Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from baton.clock import Clock
from baton.errors import BatonError
from baton.sampling import SamplingParams
from gateway.auth import callers
from gateway.auth.callers import Caller
from gateway.conversation import ChatMessage, Conversation
from gateway.http.call import HttpCall
from gateway.http.description import ERRORS, event_stream
from gateway.http.errors import body_of
from gateway.http.event_stream import EventStream, event, stream_of
from gateway.http.json_route import JsonRoute
from gateway.preprocess import ClientRequest, Preprocessor, Prompt
from gateway.requests.driver import RequestDriver
from gateway.requests.request import Delta, Finish, GatewayRequest
from gateway.routing.placement import Mode, Placement
from gateway.telemetry.live_feed import LiveFeed
from gateway.telemetry.snapshot import ClusterSnapshot
from gateway.timing.request_times import SeenTransfer

_STREAM = event_stream({}, description="A stream")


class TrialRequest(BaseModel):
    """The body that the page's prompt box sends."""

    model_config = ConfigDict(extra="forbid", strict=True)

    prompt: str = Field(min_length=1, max_length=20_000)
    """A user's turn if the model's tokenizer has a chat template; otherwise text to continue."""
    max_tokens: int = Field(128, ge=1, le=1024)
    """The answer has at most this many tokens; the model's context may leave room for fewer."""
    temperature: float = Field(0.0, ge=0.0, le=2.0)
    mode: Literal["disaggregated", "local"] | None = None
    """The request's routing mode; None: the gateway's default."""


def cluster_routes(feed: LiveFeed, trial: "PageTrial") -> APIRouter:
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
        summary="Sends one request, and reports its progress as server-sent events",
        description="`received`, `placed` (again after a worker was lost), `tokens` as they arrive, then "
        "`end` with the time spent in each stage, or `error`.",
        status_code=200,
        response_class=Response,
        responses={**ERRORS, 200: _STREAM},
    )
    async def try_one(body: TrialRequest, request: Request) -> EventStream:
        return stream_of(await trial.begin(body, HttpCall.of(request, "page", timeout_ms=None)))

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


class PageTrial:
    """Runs requests for the live page, and reports their progress. One instance serves all viewers of the
    page. Their requests count like other requests of the gateway."""

    def __init__(self, driver: RequestDriver, preprocessor: Preprocessor, clock: Clock) -> None:
        self._driver = driver
        self._preprocessor = preprocessor
        self._clock = clock

    async def begin(self, request: TrialRequest, call: HttpCall) -> AsyncGenerator[bytes, None]:
        """Server-sent events about the request. Raises InvalidRequest before the first event if the prompt
        cannot be served."""
        prompt: Prompt = request.prompt
        if self._preprocessor.has_chat_template:
            prompt = Conversation((ChatMessage("user", request.prompt),))
        client_request = ClientRequest(
            prompt=prompt,
            params=SamplingParams(max_tokens=request.max_tokens, temperature=request.temperature),
            request_id=call.request_id,
            mode=Mode(request.mode) if request.mode else None,
            caller=call.caller,
            api=call.api,
            trace=call.trace,
        )
        return self._events(await self._preprocessor.preprocess(client_request))

    async def _events(self, gateway_request: GatewayRequest) -> AsyncGenerator[bytes, None]:
        arrived_at = self._clock.now() - gateway_request.preprocess_s
        num_prompt_tokens = len(gateway_request.prompt_token_ids)
        yield event(
            "received", {"request_id": gateway_request.request_id, "num_prompt_tokens": num_prompt_tokens}
        )
        try:
            async with aclosing(self._placements_and_deltas(gateway_request)) as items:
                async for item in items:
                    at_s = self._clock.now() - arrived_at
                    if isinstance(item, Placement):
                        yield event("placed", _placement(item) | {"at_s": at_s})
                        continue
                    if item.token_ids or item.shown_text:
                        num_tokens = len(item.token_ids)
                        yield event(
                            "tokens", {"text": item.shown_text, "num_tokens": num_tokens, "at_s": at_s}
                        )
                    if item.finish is not None:
                        yield event("end", _end(item.finish))
        except BatonError as error:
            yield event("error", body_of(error))

    async def _placements_and_deltas(
        self, gateway_request: GatewayRequest
    ) -> AsyncGenerator[Placement | Delta, None]:
        """The request's deltas and placements. Each placement comes before the deltas of its workers."""
        placements: asyncio.Queue[Placement] = asyncio.Queue()  # one per attempt, and attempts are bounded
        watched = replace(gateway_request, on_placed=placements.put_nowait)
        async with aclosing(self._driver.generate(watched)) as deltas:
            delta = asyncio.create_task(_next(deltas))
            placed = asyncio.create_task(placements.get())
            try:
                while True:
                    await asyncio.wait([delta, placed], return_when=asyncio.FIRST_COMPLETED)
                    if placed.done():
                        yield placed.result()
                        placed = asyncio.create_task(placements.get())
                    elif (ready := delta.result()) is None:
                        return
                    else:
                        yield ready
                        delta = asyncio.create_task(_next(deltas))
            finally:
                for task in (placed, delta):
                    task.cancel()
                await asyncio.wait([placed, delta])


async def _next(deltas: AsyncGenerator[Delta, None]) -> Delta | None:
    return await anext(deltas, None)


def _placement(placement: Placement) -> dict[str, object]:
    return {
        "mode": placement.mode.value,
        "prefill": placement.prefill,
        "decode": placement.decode,
        "is_fallback": placement.is_fallback,
        "reason": placement.reason,
    }


def _end(finish: Finish) -> dict[str, object]:
    """The data of the event `end`. Times are in seconds; times of transfers count from the request's
    arrival."""
    timing = finish.timing
    return {
        "finish_reason": finish.reason.value,
        "num_prompt_tokens": finish.num_prompt_tokens,
        "num_completion_tokens": finish.num_completion_tokens,
        "num_cached_tokens": finish.num_cached_tokens,
        "num_attempts": finish.num_attempts,
        "placement": _placement(finish.placement),
        "timing": {
            "ttft_s": timing.ttft_s,
            "itl_s": timing.itl_s,
            "queue_s": timing.queue_s,
            "prefill_s": timing.prefill_s,
            "transfer_s": timing.transfer_s,
            "transfer_bytes": timing.transfer_bytes,
            "transport": timing.transport,
            "handover_s": timing.handover_s,
            "decode_s": timing.decode_s,
            "total_s": timing.total_s,
            "attempt_began_s": timing.attempt_began_s,
            "num_tokens_before": timing.num_tokens_before,
            "ttft_parts": asdict(timing.ttft_parts) if timing.ttft_parts else None,
            "handover_parts": asdict(timing.handover_parts) if timing.handover_parts else None,
        },
        "transfers": [_transfer(seen) for seen in timing.transfers],
    }


def _transfer(seen: SeenTransfer) -> dict[str, object]:
    record = seen.record
    return {
        "worker": seen.worker,
        "role": record.role.value,
        "attempt": record.attempt + 1,
        "peer": record.peer,
        "transport": record.transport,
        "num_bytes": record.num_bytes,
        "events": [{"name": moment.kind.value, "at_s": moment.at_s} for moment in record.events],
        "reason": record.reason,
    }
