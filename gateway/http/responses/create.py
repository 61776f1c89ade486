"""CreateResponse: turns the body of POST /v1/responses into a request, and its answer into the response."""

import time
from functools import partial

from starlette.responses import Response

from baton.errors import InvalidRequest, PromptTooLong
from gateway.choices import MAX_VALUES
from gateway.conversation import Conversation
from gateway.http.call import HttpCall
from gateway.http.errors import in_terms_of
from gateway.http.openai.logprobs import ChatTokens
from gateway.http.responses.answers import InputTokensAnswer
from gateway.http.responses.conversation import check_calls, conversation_of, shortened
from gateway.http.responses.create_request import (
    CLIENT_NAMES,
    InputTokensRequest,
    PromptFields,
    ResponseRequest,
)
from gateway.http.responses.history import History, HistoryReader, input_json, num_characters
from gateway.http.responses.items import KeptItem
from gateway.http.responses.respond import Generation, Responding
from gateway.http.responses.response_json import ResponseJson
from gateway.http.responses.store import RunningResponses
from gateway.http.responses.tools import namespaces_of
from gateway.model import ServedModel
from gateway.preprocess import Preprocessor
from gateway.requests.driver import RequestDriver
from gateway.requests.request import GatewayRequest

CHARACTERS_PER_TOKEN = 8
"""A prompt's tokens have hardly ever more characters than this on average. The characters beyond were left out of the
prompt, such as the oldest exchanges, so the prompt's limit does not bound them. They will be stored, so they stay in
memory while the response is generated."""


class CreateResponse:
    """Answers requests whose bodies are already parsed. One instance serves all calls."""

    def __init__(
        self,
        driver: RequestDriver,
        preprocessor: Preprocessor,
        model: ServedModel,
        running: RunningResponses | None,
        max_history_bytes: int,
    ) -> None:
        """`running`: None if responses are not stored. `max_history_bytes`: one request may continue stored
        responses of at most this many bytes together."""
        self._driver = driver
        self._preprocessor = preprocessor
        self._model = model
        self._running = running
        self._max_history_bytes = max_history_bytes
        self._tokens = ChatTokens(preprocessor.pool.tokenizer)

    async def create(self, body: ResponseRequest, call: HttpCall) -> Response:
        """Makes the response. If the response will be stored, but the store is unreachable, raises StoreUnavailable
        before anything is computed."""
        self._model.check_name(body.model)
        stored_by = self._running_for(body)
        if stored_by is not None:
            await stored_by.store.check()
        history, own_items = await self._read_items(body, call)
        with in_terms_of(CLIENT_NAMES):
            conversation = await self._conversation(body, call, (*history.items, *own_items))
            request = await call.preprocess(
                self._preprocessor, body, conversation, body.sampling(), affinity_key=body.prompt_cache_key
            )
        _check_size(request)
        if stored_by is not None:
            in_prompt = CHARACTERS_PER_TOKEN * len(request.prompt_token_ids)
            call.hold_to_end(max(0, sum(map(num_characters, own_items)) - in_prompt))
        response_id = f"resp_{request.request_id}"
        response = ResponseJson(
            body, request.sampling_params, response_id, int(time.time()), is_stored=stored_by is not None
        )
        own_json = input_json(own_items, request.request_id)
        # The history's items are not needed while the answer is generated.
        ancestors = History(history.ancestors)
        generation = Generation(request, response, ancestors, own_json, stored_by, namespaces_of(body.tools))
        tokens = self._tokens if body.has_logprobs else None
        return Responding(self._driver, generation, tokens, is_stream=bool(body.stream))

    async def count(self, body: InputTokensRequest, call: HttpCall) -> InputTokensAnswer:
        """The number of prompt tokens that a request with this body would have."""
        self._model.check_name(body.model)
        history, own_items = await self._read_items(body, call)
        with in_terms_of(CLIENT_NAMES):
            conversation = await self._conversation(body, call, (*history.items, *own_items))
            return InputTokensAnswer("response.input_tokens", await self._num_tokens(conversation, call))

    def _running_for(self, body: ResponseRequest) -> RunningResponses | None:
        if self._running is None and body.store:
            raise InvalidRequest(
                "store", "this gateway keeps no responses (gateway.response_store: none); send store: false"
            )
        return None if body.store is False else self._running

    async def _read_items(self, body: PromptFields, call: HttpCall) -> tuple[History, list[KeptItem]]:
        """The history that the request continues, and the request's own items."""
        store = None if self._running is None else self._running.store
        reader = HistoryReader(store, call.caller.name, self._max_history_bytes, call.hold)
        history = await reader.history_up_to(body.previous_response_id)
        check_calls(body.items)
        return history, await reader.resolve(body.items, history)

    async def _conversation(
        self, body: PromptFields, call: HttpCall, items: tuple[KeptItem, ...]
    ) -> Conversation:
        conversation = conversation_of(body, items)
        if body.truncation != "auto" or await self._fits(body, call, conversation):
            return conversation
        return await shortened(conversation, partial(self._fits, body, call))

    async def _fits(self, body: PromptFields, call: HttpCall, conversation: Conversation) -> bool:
        limit = body.max_model_len if isinstance(body, ResponseRequest) else None
        try:
            self._preprocessor.room_after(await self._num_tokens(conversation, call), limit)
        except PromptTooLong:
            return False
        return True

    async def _num_tokens(self, conversation: Conversation, call: HttpCall) -> int:
        return len(await self._preprocessor.tokenize(conversation, call.caller, call.deadline))


def _check_size(request: GatewayRequest) -> None:
    """Raises InvalidRequest if the answer could have more than MAX_VALUES values. Streams are checked, too,
    because their last event contains the whole answer."""
    params = request.sampling_params
    each = 1 + (params.logprobs or 0)
    if params.max_tokens * each > MAX_VALUES:
        raise InvalidRequest(
            "max_output_tokens",
            f"an answer may have {MAX_VALUES} values; this one may have {params.max_tokens} tokens x {each} values "
            f"(the token and its top_logprobs). Set max_output_tokens to at most {MAX_VALUES // each}, or lower "
            "top_logprobs",
        )
