"""GenerationService: gRPC's calls for text and tokens.

The preprocessor and the request driver carry them out.
"""

from collections.abc import AsyncIterator
from contextlib import aclosing

from baton.errors import InvalidRequest
from baton.v1 import generation_service_pb2 as pb
from baton.v1 import generation_service_pb2_grpc as pb_grpc
from gateway.auth.callers import current_caller
from gateway.call_ids import CallIds
from gateway.choices import answer_parts, prompt_parts
from gateway.grpc import convert
from gateway.grpc.chat_convert import CLIENT_NAMES, event_to_message, wants_events
from gateway.grpc.guard import deadline_of, trace_of
from gateway.grpc.status import Context
from gateway.model import ServedModel
from gateway.preprocess import ClientRequest, Preprocessor
from gateway.requests.driver import RequestDriver
from gateway.requests.request import GatewayRequest
from gateway.token_parts import ReasoningCount


class GenerationService(pb_grpc.GenerationServiceServicer):
    """One instance serves all calls."""

    def __init__(self, driver: RequestDriver, preprocessor: Preprocessor, model: ServedModel) -> None:
        self._driver = driver
        self._preprocessor = preprocessor
        self._model = model

    async def Generate(
        self, request: pb.GenerateRequest, context: Context
    ) -> AsyncIterator[pb.GenerateResponse]:
        gateway_request = await self._preprocess(request, context)
        request_id = gateway_request.request_id
        has_events, parser = wants_events(request), gateway_request.new_parser()
        call_ids = CallIds()
        reasoning = ReasoningCount(gateway_request)
        async with aclosing(self._driver.generate(gateway_request)) as deltas:
            async for delta in deltas:
                # The delta of a slow reader may have thousands of tokens. The guard writes a part before the next.
                for part in (part for each in prompt_parts(delta) for part in answer_parts(each)):
                    events = part.events(parser) if has_events else ()
                    messages = [event_to_message(call_ids, event) for event in events]
                    reasoning.on_tokens(part.token_ids)
                    yield convert.delta_to_response(request_id, part, messages, reasoning.num_tokens)

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        caller = current_caller.get()
        request_ids = convert.ids_to_abort(request.request_ids)
        aborted = [self._driver.abort(request_id, caller) for request_id in request_ids]
        return pb.AbortResponse(num_aborted=sum(aborted))

    async def GetModelInfo(
        self, request: pb.GetModelInfoRequest, context: Context
    ) -> pb.GetModelInfoResponse:
        return pb.GetModelInfoResponse(
            model=self._model.name,
            model_path=self._model.path if current_caller.get().may_administer else "",
            max_model_len=self._model.max_model_len,
            vocab_size=self._model.vocab_size,
            eos_token_ids=self._model.eos_token_ids,
            has_chat_template=self._preprocessor.has_chat_template,
        )

    async def _preprocess(self, request: pb.GenerateRequest, context: Context) -> GatewayRequest:
        self._preprocessor.room_after(len(request.token_ids.ids))  # before millions of ids become a tuple
        try:
            client_request = ClientRequest(
                prompt=convert.prompt_from(request),
                params=convert.sampling_params_from(request.sampling_params),
                unset=convert.unset_in(request.sampling_params),
                request_id=request.request_id,
                keep_special_tokens=request.keep_special_tokens,
                priority=request.priority,
                cache_salt=request.cache_salt if request.HasField("cache_salt") else None,
                skip_reading_prefix_cache=request.skip_reading_prefix_cache,
                affinity_key=request.affinity_key if request.HasField("affinity_key") else None,
                max_model_len=request.max_model_len if request.HasField("max_model_len") else None,
                mode=convert.mode_from(request),
                deadline=deadline_of(context),
                caller=current_caller.get(),
                trace=trace_of(context),
            )
            return await self._preprocessor.preprocess(client_request)
        except InvalidRequest as error:
            raise type(error)(CLIENT_NAMES.get(error.field, error.field), error.problem) from error
