"""Preprocessor: turns a client's input into a valid request, or into an error that names the field.

All APIs use the preprocessor, so a prompt has the same meaning in all APIs, and all APIs refuse the same
requests.
"""

import asyncio
import json
import logging
import secrets
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from functools import partial
from hashlib import blake2b
from typing import Any, TypeVar

from baton.errors import TOO_LONG, DeadlinePassed, InvalidRequest, PromptTooLong
from baton.sampling import MAX_SEED, SamplingParams, StructuredOutput
from gateway.auth.callers import ANYBODY, Caller
from gateway.call_ids import WELL_FORMED, TraceContext, is_well_formed
from gateway.conversation import (
    AnswerParser,
    Conversation,
    ToolUse,
    checked_response_format,
    with_limited_spaces,
)
from gateway.grammars import GrammarCheck
from gateway.model import ServedModel
from gateway.requests.request import GatewayRequest, no_parser
from gateway.routing.placement import Mode
from gateway.text import NO_TOKENS, TextStream, Tokenizer, TokenizerPool

logger = logging.getLogger(__name__)

T = TypeVar("T")

Prompt = str | tuple[int, ...] | Conversation
"""Text, token ids, or a conversation."""

UNLIMITED = sys.maxsize
"""The value of `max_tokens` if the answer may fill all the room after its prompt."""

MAX_INLINE = 4_000
"""A response format with more characters is checked on a thread. A turn's grammar that costs more is made on a thread:
with large schemas, this takes up to a second. At this limit, it takes 0.2 to 4 ms."""
MAX_SALT_CHARACTERS = 1_024

MAX_PROMPT_LOGPROBS = 2**18
"""The most log-probabilities of one prompt, including the top ones of each token. All of them travel in one message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientRequest:
    """What a client asks for, over any API; nothing is checked yet."""

    prompt: Prompt
    params: SamplingParams
    """`max_tokens` may be larger than the room after the prompt; then the answer gets only this room."""
    unset: Iterable[str] = ()
    """Settings in `params` that the client did not choose. The model's defaults replace them."""
    request_id: str | None = None
    """The request's id; None: an id is generated."""
    keep_special_tokens: bool = False
    priority: int = 0
    cache_salt: str | None = None
    skip_reading_prefix_cache: bool = False
    affinity_key: str | None = None
    max_model_len: int | None = None
    """Prompt and answer together may have at most this many tokens; None: the model's limit."""
    mode: Mode | None = None
    deadline: float | None = None
    """When the client stops waiting, on the event loop's clock; None: it waits without limit."""
    caller: Caller = ANYBODY
    api: str = "grpc"
    trace: TraceContext | None = None


class Preprocessor:
    """Preprocesses requests. One instance serves all APIs of a gateway."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        model: ServedModel,
        grammars: GrammarCheck,
        max_waiting: int,
        *,
        log_prompts: bool = False,
        isolate_prefix_cache: bool = False,
    ) -> None:
        """`max_waiting`: how many texts may wait for a thread, and how many conversations. `log_prompts`: log the
        prompts. `isolate_prefix_cache`: callers do not share cached prefixes."""
        self._log_prompts = log_prompts
        self._isolate_prefix_cache = isolate_prefix_cache
        self._grammars = grammars
        self._tokenizer = tokenizer
        self._model = model
        self.pool = TokenizerPool(tokenizer, model.max_model_len, max_waiting)
        """The gateway closes the pool when it stops."""

    @property
    def has_chat_template(self) -> bool:
        return self._tokenizer.has_chat_template

    async def preprocess(self, client_request: ClientRequest) -> GatewayRequest:
        """Tokenizes the prompt, and checks all values against the model. InvalidRequest names the field."""
        prompt, caller = client_request.prompt, client_request.caller
        if client_request.request_id is not None and not is_well_formed(client_request.request_id):
            raise InvalidRequest(
                "request_id", f"must be {WELL_FORMED}, got {client_request.request_id[:60]!r}"
            )
        request_id = client_request.request_id or secrets.token_hex(16)
        if self._log_prompts:
            _log_prompt(request_id, prompt)
        now = asyncio.get_running_loop().time
        began = now()
        params = self._checked(client_request)
        if (response_format := params.structured_output) is not None:
            response_format = await self._run(
                client_request,
                len(response_format.source),
                lambda: with_limited_spaces(checked_response_format(response_format)),
            )
            params = replace(params, structured_output=response_format)
        prompt_token_ids = await self.tokenize(prompt, caller, client_request.deadline)
        params, new_parser = await self._run(
            client_request,
            prompt.grammar_cost if isinstance(prompt, Conversation) else 0,
            partial(self._completed, params, client_request, prompt_token_ids),
        )
        await self._check_grammar(client_request, params.structured_output, response_format)
        is_chat, isolates = isinstance(prompt, Conversation), self._isolate_prefix_cache
        return GatewayRequest(
            request_id=request_id,
            prompt_token_ids=prompt_token_ids,
            sampling_params=params,
            text=TextStream(
                self._tokenizer.backend,
                params.stop,
                params.min_tokens,
                not client_request.keep_special_tokens,
                prompt_token_ids,
                self._tokenizer.kept_tokens if is_chat else NO_TOKENS,
            ),
            new_parser=new_parser,
            priority=_priority_for(caller, client_request.priority),
            cache_salt=_own_salt(caller, client_request.cache_salt)
            if isolates
            else client_request.cache_salt,
            skip_reading_prefix_cache=client_request.skip_reading_prefix_cache
            or params.prompt_logprobs is not None,
            affinity_key=None
            if client_request.affinity_key is None
            else _own_salt(caller, client_request.affinity_key),
            mode=client_request.mode,
            deadline=client_request.deadline,
            caller=caller,
            preprocess_s=now() - began,
            api=client_request.api,
            trace=client_request.trace,
            is_chat=is_chat,
        )

    async def tokenize(self, prompt: Prompt, caller: Caller, deadline: float | None) -> tuple[int, ...]:
        """The tokens of a prompt; DeadlinePassed at `deadline`, on the event loop's clock."""
        if isinstance(prompt, tuple):
            return prompt
        try:
            async with asyncio.timeout_at(deadline):
                if isinstance(prompt, Conversation):
                    return await self.pool.encode_chat(caller.name, prompt)
                return await self.pool.encode(caller.name, prompt)
        except TimeoutError:
            raise DeadlinePassed("the request's deadline passed before its prompt was tokenized") from None

    def room_after(self, num_tokens: int, max_model_len: int | None = None) -> int:
        """How many tokens an answer may have after `num_tokens` prompt tokens. Raises PromptTooLong if there is no
        room.

        `max_model_len`: the request's own limit, which is at most the model's limit.
        """
        limit = self._model.max_model_len if max_model_len is None else max_model_len
        room = limit - num_tokens
        if room < 1:
            whose = (
                "this model's maximum context length"
                if max_model_len is None
                else "the request's max_model_len"
            )
            raise PromptTooLong(
                "prompt",
                f"{TOO_LONG}: {num_tokens} tokens leave no room for an answer; {whose} is {limit} tokens",
            )
        return room

    def _checked(self, client_request: ClientRequest) -> SamplingParams:
        """Checks values for which the prompt's tokens are not needed, except the structured output. Returns the
        sampling parameters."""
        for field, text in (
            ("cache_salt", client_request.cache_salt),
            ("affinity_key", client_request.affinity_key),
        ):
            if text is not None and len(text) > MAX_SALT_CHARACTERS:
                raise InvalidRequest(
                    field, f"must have at most {MAX_SALT_CHARACTERS} characters, got {len(text)}"
                )
        model_limit, max_model_len = self._model.max_model_len, client_request.max_model_len
        if max_model_len is not None and not 1 <= max_model_len <= model_limit:
            raise InvalidRequest(
                "max_model_len", f"must be 1 to the model's {model_limit}, got {max_model_len}"
            )
        params = client_request.params
        self._model.check_token_ids("logit_bias", params.logit_bias)
        self._model.check_token_ids("stop_token_ids", params.stop_token_ids)
        return params

    async def _run(self, client_request: ClientRequest, cost: int, work: Callable[[], T]) -> T:
        """Does work whose time grows with `cost`: on the event loop if it is short, otherwise on a thread, at the
        caller's turn. DeadlinePassed at the request's deadline."""
        if cost <= MAX_INLINE:
            return work()
        try:
            async with asyncio.timeout_at(client_request.deadline):
                return await self.pool.run(client_request.caller.name, cost, work)
        except TimeoutError:
            raise DeadlinePassed("the request's deadline passed before its grammar was made") from None

    def _completed(
        self, params: SamplingParams, client_request: ClientRequest, prompt_token_ids: tuple[int, ...]
    ) -> tuple[SamplingParams, Callable[[], AnswerParser | None]]:
        """Returns the parameters with the model's defaults, a limit that fits the room after the prompt, and the
        answer's grammar; and a factory of parsers for the answer."""
        room = self._room(prompt_token_ids, client_request.max_model_len)
        _check_num_logprobs(params.prompt_logprobs, len(prompt_token_ids))
        defaults = {name: getattr(self._model.sampling_defaults, name) for name in client_request.unset}
        params = replace(params, max_tokens=min(params.max_tokens, room), **defaults)
        if isinstance(client_request.prompt, Conversation):
            return self._completed_for_turn(client_request.prompt, prompt_token_ids, params)
        return params, no_parser

    def _completed_for_turn(
        self, prompt: Conversation, prompt_token_ids: tuple[int, ...], params: SamplingParams
    ) -> tuple[SamplingParams, Callable[[], AnswerParser | None]]:
        """Returns the parameters with the grammar of the turn that continues a conversation; and a factory of parsers
        for this turn."""
        answer_format, end = self._tokenizer.answer_format, self._tokenizer.prompt_end(prompt_token_ids)
        assert answer_format is not None, "without a chat template, a conversation is not tokenized"
        response_format = params.structured_output
        if prompt.tool_choice.use is ToolUse.NONE and (params.ignore_eos or params.min_tokens):
            prompt = replace(prompt, tools=())  # without a grammar; a call that the model writes stays text
        grammar = answer_format.grammar(prompt, end, response_format)
        if grammar is not None and response_format is None:
            _check_may_end(params, "tools" if prompt.tools else "a reasoning budget")
        params = replace(params, structured_output=grammar)
        return params, partial(answer_format.new_parser, prompt, end, response_format)

    async def _check_grammar(
        self,
        client_request: ClientRequest,
        grammar: StructuredOutput | None,
        response_format: StructuredOutput | None,
    ) -> None:
        """InvalidRequest if the answer's grammar does not compile. If the request has tools, the grammar is made from
        the tools and from the response format. The error names the response format if it does not compile even without
        the tools."""
        if grammar is None:
            return
        prompt, caller, deadline = client_request.prompt, client_request.caller.name, client_request.deadline
        try:
            await self._grammars.check(grammar, caller, deadline)
        except InvalidRequest as error:
            if not isinstance(prompt, Conversation) or not prompt.tools:
                raise
            if response_format is not None:
                await self._grammars.check(response_format, caller, deadline)
            problem = f"their schemas cannot guide a model: {error.problem}"
            raise InvalidRequest("tools", problem) from error

    def _room(self, token_ids: tuple[int, ...], max_model_len: int | None) -> int:
        """Checks the prompt's tokens. Returns how many tokens an answer may have, which is at least one."""
        if not token_ids:
            raise InvalidRequest("prompt", "must not be empty")
        room = self.room_after(len(token_ids), max_model_len)
        self._model.check_token_ids("token_ids", token_ids)
        return room


def independent_requests(request: GatewayRequest, number: int) -> list[GatewayRequest]:
    """`number` requests for independent answers: `request` itself, and copies of it with derived ids and seeds.

    The same seed gives the same answers again. The first of several answers equals the answer to a single
    request.
    """
    params = request.sampling_params
    others = [
        replace(
            request,
            request_id=f"{request.request_id}-{index}",
            call_id=request.call_id or request.request_id,
            repeats_prompt=True,
            sampling_params=replace(params, seed=_derived_seed(params.seed, index)),
            text=request.text.new_stream(),
        )
        for index in range(1, number)
    ]
    return [request, *others]


def _check_num_logprobs(num_top: int | None, num_tokens: int) -> None:
    """Raises InvalidRequest if `num_tokens` prompt tokens with `num_top` top log-probabilities each are too many for
    one answer."""
    if num_top is not None and num_tokens * (1 + num_top) > MAX_PROMPT_LOGPROBS:
        raise InvalidRequest(
            "prompt_logprobs",
            f"{num_top} for each of {num_tokens} prompt tokens, and the token's own, are more than "
            f"{MAX_PROMPT_LOGPROBS:,} log-probabilities; ask for fewer, or send a shorter prompt",
        )


def _log_prompt(request_id: str, prompt: Prompt) -> None:
    """Logs the prompt as the client sent it. A conversation is logged as JSON, with its messages and tools."""
    logged: object = prompt
    text = repr(prompt)
    if isinstance(prompt, Conversation):
        logged = {
            "messages": [asdict(message, dict_factory=_without_defaults) for message in prompt.messages],
            "tools": [asdict(tool, dict_factory=_without_defaults) for tool in prompt.tools],
        }
        text = "".join(
            character if character.isprintable() else json.dumps(character)[1:-1]
            for character in json.dumps(logged, ensure_ascii=False)
        )
    logger.info("request %s: %s", request_id, text, extra={"request_id": request_id, "prompt": logged})


def _without_defaults(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    return {name: value for name, value in fields if value not in (None, False, ())}


def _check_may_end(params: SamplingParams, reason: str) -> None:
    """Raises InvalidRequest for a setting that contradicts a grammar which the client did not ask for.
    `reason`: why the request has this grammar."""
    why = f"with {reason}: the request then has a grammar, which ends the answer"
    if params.ignore_eos:
        raise InvalidRequest("ignore_eos", f"must be false {why}")
    if params.min_tokens:
        raise InvalidRequest("min_tokens", f"must be 0 {why}; got {params.min_tokens}")


def _own_salt(caller: Caller, cache_salt: str | None) -> str:
    """A salt, or an affinity key, that no other caller can have."""
    return json.dumps([caller.name, cache_salt])


def _priority_for(caller: Caller, priority: int) -> int:
    """The request's priority, limited by the caller's best priority. Lower values go first; 0 is the
    default."""
    best = caller.best_priority
    if best is None:
        return priority
    if priority < min(best, 0):
        raise InvalidRequest(
            "priority",
            f"got {priority}; the key of '{caller.name}' allows only {best} or higher (lower values go first)",
        )
    return max(priority, best)


def _derived_seed(seed: int | None, index: int) -> int | None:
    """The seed of another answer. None if the request has no seed: then each answer gets a random seed
    later."""
    if seed is None:
        return None
    digest = blake2b(f"{seed}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") & MAX_SEED
