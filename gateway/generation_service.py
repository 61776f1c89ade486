"""GenerationService: the public calls; validates, tokenises and streams, and leaves the rest to the dispatcher."""

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import grpc.aio

from baton.errors import RequestError
from baton.v1 import generation_service_pb2 as pb
from baton.v1 import generation_service_pb2_grpc as pb_grpc
from gateway import convert
from gateway.dispatcher import Dispatcher
from gateway.run import Generation
from gateway.status import abort_call
from gateway.text import TextStream, Tokenizer

MAX_INLINE_CHARACTERS = 2_000
"""Longer texts are tokenised off the event loop, which would stand still meanwhile."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What clients may know of the model, and what their requests are held against."""

    name: str
    path: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]


Context = grpc.aio.ServicerContext[Any, Any]


class GenerationService(pb_grpc.GenerationServiceServicer):
    """One instance serves all calls."""

    def __init__(self, dispatcher: Dispatcher, tokenizer: Tokenizer, model: ServedModel) -> None:
        self._dispatcher = dispatcher
        self._tokenizer = tokenizer
        self._model = model
        self._limits = convert.ModelLimits(model.max_model_len, model.vocab_size)

    async def Generate(  # noqa: N802 - gRPC's name; an async generator is an async iterator
        self, request: pb.GenerateRequest, context: Context
    ) -> AsyncIterator[pb.GenerateResponse]:
        try:
            generation = await self._generation(request, context)
            async with aclosing(self._dispatcher.generate(generation)) as deltas:
                async for delta in deltas:
                    yield convert.delta_to_response(generation.request_id, delta)
        except RequestError as error:
            await abort_call(context, error)

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:  # noqa: ARG002, N802
        aborted = [self._dispatcher.abort(request_id) for request_id in request.request_ids]
        return pb.AbortResponse(num_aborted=sum(aborted))

    async def GetModelInfo(  # noqa: N802
        self,
        request: pb.GetModelInfoRequest,  # noqa: ARG002
        context: Context,  # noqa: ARG002
    ) -> pb.GetModelInfoResponse:
        return pb.GetModelInfoResponse(
            model=self._model.name,
            model_path=self._model.path,
            max_model_len=self._model.max_model_len,
            vocab_size=self._model.vocab_size,
            eos_token_ids=self._model.eos_token_ids,
            has_chat_template=self._tokenizer.has_chat_template,
        )

    async def _generation(self, request: pb.GenerateRequest, context: Context) -> Generation:
        prompt_token_ids = await self._tokenise(convert.prompt_from(request))
        convert.check_prompt(prompt_token_ids, self._limits)
        params = convert.sampling_params_from(request.sampling_params, len(prompt_token_ids), self._limits)
        return Generation(
            request_id=request.request_id or secrets.token_hex(16),
            prompt_token_ids=prompt_token_ids,
            sampling_params=params,
            text=TextStream(
                self._tokenizer.backend, params.stop, params.min_tokens, not request.keep_special_tokens
            ),
            priority=request.priority,
            cache_salt=request.cache_salt if request.HasField("cache_salt") else None,
            mode=convert.mode_from(request),
            timeout_s=context.time_remaining(),
        )

    async def _tokenise(self, prompt: convert.Prompt) -> tuple[int, ...]:
        if isinstance(prompt, tuple):
            return prompt
        if isinstance(prompt, list):
            return await asyncio.to_thread(self._tokenizer.encode_chat, prompt)
        if len(prompt) <= MAX_INLINE_CHARACTERS:
            return self._tokenizer.encode(prompt)
        return await asyncio.to_thread(self._tokenizer.encode, prompt)
