"""The routes of Anthropic's Messages API: turn a body into a valid request, and make the response."""

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from gateway.choices import check_whole_answer
from gateway.http.anthropic.answers import Message, MessageErrorAnswer, StreamEvent, TokenCount
from gateway.http.anthropic.message import MessageAnswer
from gateway.http.anthropic.message_request import CountTokensRequest, MessagesRequest
from gateway.http.anthropic.output import shows_thinking
from gateway.http.anthropic.whole import MessageHead
from gateway.http.call import HttpCall, TimeoutMs
from gateway.http.description import errors_of, event_stream, json_text
from gateway.http.dialects import MESSAGES_PATH
from gateway.http.errors import in_terms_of
from gateway.http.generated import GeneratedResponse
from gateway.http.json_route import JsonRoute
from gateway.model import ServedModel
from gateway.preprocess import Preprocessor
from gateway.requests.driver import RequestDriver

ERRORS = errors_of(
    MessageErrorAnswer, "No worker could serve the request, or none in time; 529: no room at present"
)

MESSAGE_ANSWERS = {200: event_stream(json_text(StreamEvent)), **ERRORS}

HEADERS: dict[str, Any] = {
    "parameters": [
        {
            "name": name,
            "in": "header",
            "required": False,
            "schema": {"type": "string"},
            "description": description,
        }
        for name, description in (
            ("anthropic-version", "Accepted and ignored: answers have the shape of 2023-06-01."),
            ("anthropic-beta", "Accepted and ignored: fields decide, and unknown ones are refused."),
            ("x-api-key", "The key, in place of `Authorization: Bearer`."),
        )
    ]
}


def anthropic_routes(driver: RequestDriver, preprocessor: Preprocessor, model: ServedModel) -> APIRouter:
    """The routes for messages, and for counting a prompt's tokens."""
    routes = APIRouter(route_class=JsonRoute)

    @routes.post(
        MESSAGES_PATH,
        summary="Continue a conversation, in Anthropic's terms",
        response_model=Message,
        responses=MESSAGE_ANSWERS,
        openapi_extra=HEADERS,
    )
    async def messages(body: MessagesRequest, request: Request, timeout_ms: TimeoutMs = None) -> Response:
        call = HttpCall.of(request, "messages", timeout_ms, body.request_id)
        model.check_name(body.model)
        names = body.client_names
        with in_terms_of(names):
            generation = await call.preprocess(preprocessor, body, body.conversation, body.sampling())
        if not body.stream:
            check_whole_answer([generation], names)
        answer = MessageAnswer(
            generation,
            MessageHead(call.request_id, model.name),
            call.shown_id,
            shows_thinking=shows_thinking(body.thinking),
            max_tokens=body.max_tokens,
        )
        return GeneratedResponse(driver, [generation], answer, names, is_stream=bool(body.stream))

    @routes.post(
        f"{MESSAGES_PATH}/count_tokens",
        summary="Count a conversation's tokens",
        responses=ERRORS,
        openapi_extra=HEADERS,
    )
    async def count_tokens(
        body: CountTokensRequest, request: Request, timeout_ms: TimeoutMs = None
    ) -> TokenCount:
        call = HttpCall.of(request, "messages", timeout_ms)
        model.check_name(body.model)
        with in_terms_of(body.client_names):
            token_ids = await preprocessor.tokenize(body.conversation, call.caller, call.deadline)
        return TokenCount(len(token_ids))

    return routes
