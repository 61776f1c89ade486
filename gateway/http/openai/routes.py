"""The routes of OpenAI's API: turn a body into valid requests, and make the responses."""

import time
from collections.abc import Sequence
from dataclasses import replace

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from gateway.auth.callers import Caller
from gateway.choices import check_whole_answer
from gateway.http.call import HttpCall, TimeoutMs
from gateway.http.description import ERRORS, Responses, event_stream, json_text
from gateway.http.errors import in_terms_of
from gateway.http.generated import GeneratedResponse
from gateway.http.json_route import JsonRoute
from gateway.http.openai.answers import (
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    CompletionChunk,
    ErrorAnswer,
    ModelCard,
    ModelList,
)
from gateway.http.openai.chat import ChatAnswer
from gateway.http.openai.chat_request import ChatCompletionRequest
from gateway.http.openai.choices import UsageCount
from gateway.http.openai.completion_request import CompletionRequest
from gateway.http.openai.completions import CompletionAnswer
from gateway.http.openai.echo import EchoedPrompt
from gateway.http.openai.logprobs import (
    ChatTokens,
    CompletionLogprobsStream,
    CompletionTokens,
    RankedTokens,
)
from gateway.http.openai.openai_answer import AnswerHead
from gateway.model import ServedModel
from gateway.preprocess import Preprocessor, Prompt, independent_requests
from gateway.requests.driver import RequestDriver
from gateway.requests.request import GatewayRequest
from gateway.token_parts import TokenParts
from gateway.turn_budget import TurnBudget


class OpenAIRoutes:
    """Answers requests whose bodies are already parsed. One instance serves all calls."""

    def __init__(self, driver: RequestDriver, preprocessor: Preprocessor, model: ServedModel) -> None:
        self._driver = driver
        self._preprocessor = preprocessor
        self._model = model
        self._chat_tokens = ChatTokens(preprocessor.pool.tokenizer)
        self._completion_tokens = CompletionTokens(preprocessor.pool.tokenizer)
        self._ranked_tokens = RankedTokens(preprocessor.pool.tokenizer)

    async def chat_completion(self, body: ChatCompletionRequest, call: HttpCall) -> GeneratedResponse:
        chat, names = body.chat, body.client_names
        gateway_requests = await self._preprocess(body, call, [chat], names)
        includes_reasoning = body.include_reasoning is not False
        texts = None
        if body.logprobs and not includes_reasoning:
            texts = [TokenParts(request) for request in gateway_requests]
        answer = ChatAnswer(
            self._head("chatcmpl", call),
            UsageCount.of(gateway_requests, body.num_samples, counts_reasoning=body.says_usage),
            body.stream_options,
            self._chat_tokens if body.logprobs else None,
            [request.new_parser() for request in gateway_requests],
            self._ranked_tokens_for(body),
            includes_reasoning=includes_reasoning,
            may_call=bool(chat.callable_tools),
            texts=texts,
        )
        return GeneratedResponse(self._driver, gateway_requests, answer, names, is_stream=bool(body.stream))

    async def completion(self, body: CompletionRequest, call: HttpCall) -> GeneratedResponse:
        prompts, names = body.prompts, body.client_names
        gateway_requests = await self._preprocess(body, call, prompts, names)
        echoes = [
            echo
            for prompt in prompts
            for echo in [await self._echo(prompt, body, call.caller)] * body.num_samples
        ]
        logprobs = None
        if body.logprobs is not None:
            is_text = isinstance(prompts[0], str)
            logprobs = [
                self._logprobs_writer(body, gateway_request.prompt_token_ids, echo, is_text)
                for gateway_request, echo in zip(gateway_requests, echoes, strict=True)
            ]
        answer = CompletionAnswer(
            self._head("cmpl", call),
            UsageCount.of(gateway_requests, body.num_samples, counts_reasoning=False),
            body.stream_options,
            echoes,
            logprobs,
            self._ranked_tokens_for(body),
            is_echo=bool(body.echo),
            is_only_echo=body.is_only_echo,
        )
        return GeneratedResponse(self._driver, gateway_requests, answer, names, is_stream=bool(body.stream))

    async def _preprocess(
        self,
        body: ChatCompletionRequest | CompletionRequest,
        call: HttpCall,
        prompts: Sequence[Prompt],
        names: dict[str, str],
    ) -> list[GatewayRequest]:
        """Makes `num_samples` requests for each prompt, in the prompts' order."""
        self._model.check_name(body.model)
        with in_terms_of(names):
            params = body.sampling()
        gateway_requests: list[GatewayRequest] = []
        budget = TurnBudget()
        for number, prompt in enumerate(prompts):
            own_names = dict.fromkeys(("prompt", "token_ids"), f"prompt.{number}") if len(prompts) > 1 else {}
            with in_terms_of(names | own_names):
                gateway_request = await call.preprocess(
                    self._preprocessor,
                    body,
                    prompt,
                    params,
                    affinity_key=body.prompt_cache_key,
                    keep_special_tokens=body.keep_special_tokens,
                )
            if number:
                own_id = f"{call.request_id}-p{number}"
                gateway_request = replace(gateway_request, request_id=own_id, call_id=call.request_id)
            gateway_requests += independent_requests(gateway_request, body.num_samples)
            await budget.pause_if_spent()
        if not body.stream:
            check_whole_answer(gateway_requests, names)
        return gateway_requests

    def _logprobs_writer(
        self, body: CompletionRequest, prompt_token_ids: Sequence[int], echo: str, is_text: bool
    ) -> CompletionLogprobsStream:
        """The writer of one choice's log-probabilities. `is_text`: the client sent the prompt as text."""
        skips = not body.keep_special_tokens
        echoed = None
        if body.echo:
            tokenizer = self._preprocessor.pool.tokenizer
            echoed = EchoedPrompt(tokenizer, echo, prompt_token_ids, is_text, skips)
        return CompletionLogprobsStream(self._completion_tokens, skips, prompt_token_ids, echoed)

    def _ranked_tokens_for(self, body: ChatCompletionRequest | CompletionRequest) -> RankedTokens | None:
        return None if body.prompt_logprobs is None else self._ranked_tokens

    def _head(self, kind: str, call: HttpCall) -> AnswerHead:
        return AnswerHead(f"{kind}-{call.request_id}", int(time.time()), self._model.name)

    async def _echo(self, prompt: str | tuple[int, ...], body: CompletionRequest, caller: Caller) -> str:
        if not body.echo:
            return ""
        if isinstance(prompt, str):
            return prompt
        return await self._preprocessor.pool.decode(caller.name, prompt, not body.keep_special_tokens)


def openai_routes(driver: RequestDriver, preprocessor: Preprocessor, model: ServedModel) -> APIRouter:
    """The routes of OpenAI's API: chat completions, completions, and the served model."""
    routes = APIRouter(route_class=JsonRoute)
    api = OpenAIRoutes(driver, preprocessor, model)
    began = int(time.time())

    def card_for(request: Request) -> ModelCard:
        caller: Caller = request.state.caller
        root = model.path if caller.may_administer else model.name
        return ModelCard(model.name, "model", began, "baton", model.max_model_len, root)

    @routes.post(
        "/v1/chat/completions",
        summary="Continue a conversation",
        response_model=ChatCompletion,
        responses=answers_of(ChatCompletionChunk),
    )
    async def chat_completions(
        body: ChatCompletionRequest, request: Request, timeout_ms: TimeoutMs = None
    ) -> Response:
        return await api.chat_completion(body, HttpCall.of(request, "chat", timeout_ms, body.request_id))

    @routes.post(
        "/v1/completions",
        summary="Continue a text",
        response_model=Completion,
        responses=answers_of(CompletionChunk),
    )
    async def completions(
        body: CompletionRequest, request: Request, timeout_ms: TimeoutMs = None
    ) -> Response:
        return await api.completion(body, HttpCall.of(request, "completions", timeout_ms, body.request_id))

    @routes.head("/v1/models", include_in_schema=False)
    @routes.get("/v1/models", summary="The models served here")
    async def models(request: Request) -> ModelList:
        return ModelList("list", [card_for(request)])

    @routes.get("/v1/models/{name:path}", summary="One model", responses=ERRORS)
    async def one_model(name: str, request: Request) -> ModelCard:
        model.check_name(name)
        return card_for(request)

    return routes


def answers_of(chunk: type) -> Responses:
    """The responses of a route whose answer may be a stream of `chunk`."""
    data = [
        {**json_text(chunk), "description": "A part of the answer"},
        {**json_text(ErrorAnswer), "description": "Nothing comes after it"},
        {"const": "[DONE]", "description": "After the last part"},
    ]
    return {200: event_stream({"anyOf": data}, is_named=False), **ERRORS}
