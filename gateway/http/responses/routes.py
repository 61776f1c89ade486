"""The routes of the Responses API: create, read, cancel and delete responses."""

import re
from contextlib import suppress
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from pydantic_core import to_json
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from baton.errors import InvalidRequest, UnknownResponse
from gateway.auth.callers import Caller
from gateway.http.call import HttpCall, TimeoutMs
from gateway.http.description import ERRORS, event_stream, json_text
from gateway.http.json_route import JsonRoute
from gateway.http.request_limits import HOLD
from gateway.http.responses.answers import (
    DeletedResponse,
    InputTokensAnswer,
    ItemList,
    ResponseEvent,
    ResponseObject,
)
from gateway.http.responses.create import CreateResponse
from gateway.http.responses.create_request import InputTokensRequest, ResponseRequest
from gateway.http.responses.history import input_items_of
from gateway.http.responses.store import ResponseStore, RunningResponses
from gateway.model import ServedModel
from gateway.preprocess import Preprocessor
from gateway.requests.driver import RequestDriver

API = "responses"
"""The label of this API's requests in metrics and logs."""
PATH = "/v1/responses"
MAX_LISTED = 100

_STATUS = re.compile(rb'"status": *"(\w+)"')
"""The first match in a stored response is the response's own status. To parse a response of 60 MB would hold up the
event loop for seconds."""

STREAM = event_stream(
    json_text(ResponseEvent),
    description="A stream if `stream` is true; its last event has the whole response",
)


class StoredResponses:
    """The operations that callers may apply to their own responses. One instance serves all calls."""

    def __init__(self, driver: RequestDriver, running: RunningResponses | None) -> None:
        self._driver = driver
        self._running = running

    async def get(self, caller: Caller, response_id: str) -> bytes:
        """A stored response. Raises UnknownResponse if the caller has no response with this id."""
        found = await self._store.response(caller.name, response_id)
        if found is None:
            raise _unknown(response_id)
        return found

    async def delete(self, caller: Caller, response_id: str) -> DeletedResponse:
        if not await self._store.delete(caller.name, response_id):
            raise _unknown(response_id)
        return DeletedResponse(response_id, "response", True)

    async def cancel(self, caller: Caller, response_id: str) -> bytes:
        """Ends a response that runs on this gateway, and returns its final state. Raises UnknownResponse if it was not
        stored, and StoreUnavailable if the store cannot be reached."""
        running = None if self._running is None else self._running.find(caller.name, response_id)
        if running is None:
            status = _STATUS.search(await self.get(caller, response_id))
            raise InvalidRequest(
                "response_id",
                f"the response has ended{f' ({status[1].decode()})' if status else ''}; only a running one can be "
                "cancelled",
            )
        self._driver.abort(response_id.removeprefix("resp_"), caller)
        ended = await running.wait_for_end()
        return ended if ended is not None else await self.get(caller, response_id)

    async def input_items(
        self, caller: Caller, response_id: str, after: str | None, limit: int, order: Literal["asc", "desc"]
    ) -> ItemList:
        (context,) = await self._store.contexts(caller.name, [response_id])
        if context is None:
            raise _unknown(response_id)
        items = input_items_of(context)
        if order == "desc":
            items.reverse()
        ids = [item["id"] for item in items]
        if after is not None and after not in ids:
            raise InvalidRequest("after", f"no item of this response has the id '{after[:60]}'")
        begin = 0 if after is None else ids.index(after) + 1
        listed = items[begin : begin + limit]
        return ItemList(
            "list",
            listed,
            listed[0]["id"] if listed else None,
            listed[-1]["id"] if listed else None,
            begin + limit < len(items),
        )

    @property
    def _store(self) -> ResponseStore:
        if self._running is None:
            raise UnknownResponse(
                "response_id", "this gateway keeps no responses (gateway.response_store: none)"
            )
        return self._running.store


def responses_routes(
    driver: RequestDriver,
    preprocessor: Preprocessor,
    model: ServedModel,
    store: ResponseStore | None,
    max_history_bytes: int,
) -> APIRouter:
    """`store`: None if responses are not stored. `max_history_bytes`: one request may continue stored responses of at
    most this many bytes together."""
    routes = APIRouter(route_class=JsonRoute)
    running = None if store is None else RunningResponses(store)
    creator = CreateResponse(driver, preprocessor, model, running, max_history_bytes)
    stored = StoredResponses(driver, running)
    answer: dict[str, Any] = {"response_model": ResponseObject, "responses": ERRORS}

    @routes.post(
        PATH,
        summary="Answer, and keep the response",
        response_model=ResponseObject,
        responses={200: STREAM, **ERRORS},
    )
    async def create(body: ResponseRequest, request: Request, timeout_ms: TimeoutMs = None) -> Response:
        return await creator.create(body, HttpCall.of(request, API, timeout_ms))

    @routes.post(f"{PATH}/input_tokens", summary="Count a prompt's tokens", responses=ERRORS)
    async def input_tokens(
        body: InputTokensRequest, request: Request, timeout_ms: TimeoutMs = None
    ) -> InputTokensAnswer:
        return await creator.count(body, HttpCall.of(request, API, timeout_ms))

    @routes.api_route(f"{PATH}/input_tokens", methods=["GET", "DELETE"], include_in_schema=False)
    async def no_response() -> Response:
        # Without this route, `input_tokens` would be taken for the id of a response.
        raise HTTPException(405, headers={"allow": "POST"})

    @routes.api_route(f"{PATH}/compact", methods=["POST", "GET", "DELETE"], include_in_schema=False)
    async def no_compaction() -> Response:
        # Without this route, `compact`, a path of OpenAI's API, would be taken for such an id, and a POST would get a
        # 405.
        raise HTTPException(404)

    @routes.get(PATH + "/{response_id}", summary="A stored response", **answer)
    async def get(
        response_id: str, request: Request, stream: bool = False, starting_after: int | None = None
    ) -> Response:
        if stream or starting_after is not None:
            field = "stream" if stream else "starting_after"
            raise InvalidRequest(field, "a stored response is not streamed again; remove it")
        return _json(request, await stored.get(request.state.caller, response_id))

    @routes.delete(PATH + "/{response_id}", summary="Forget a response", responses=ERRORS)
    async def delete(response_id: str, request: Request) -> DeletedResponse:
        return await stored.delete(request.state.caller, response_id)

    @routes.post(PATH + "/{response_id}/cancel", summary="End a running response", **answer)
    async def cancel(response_id: str, request: Request) -> Response:
        body = await stored.cancel(request.state.caller, response_id)
        with suppress(HTTPException):  # it is too late to refuse the call, but the bytes count
            request.scope["state"][HOLD](len(body))
        return Response(body, media_type="application/json")

    @routes.get(
        PATH + "/{response_id}/input_items",
        summary="The input items of a response",
        response_model=ItemList,
        responses=ERRORS,
    )
    async def input_items(
        response_id: str,
        request: Request,
        after: str | None = None,
        limit: Annotated[int, Query(ge=1, le=MAX_LISTED)] = 20,
        order: Literal["asc", "desc"] = "desc",
    ) -> Response:
        listed = await stored.input_items(request.state.caller, response_id, after, limit, order)
        return _json(request, to_json(listed))

    return routes


def _json(request: Request, body: bytes) -> Response:
    """The response with this body, which counts as a part of the request's body until the client has read it."""
    request.scope["state"][HOLD](len(body))
    return Response(body, media_type="application/json")


def _unknown(response_id: str) -> UnknownResponse:
    return UnknownResponse("response_id", f"you have no stored response '{response_id[:80]}'")
