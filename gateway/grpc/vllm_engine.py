"""VllmEngine: vLLM's token-level service.

Routers such as smg use a whole Baton cluster through it as one engine.
"""

import asyncio
import hashlib
import io
import time
import zipfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NoReturn

from baton.clock import Clock
from baton.errors import Unsupported
from baton.version import baton_version
from baton.worker import WorkerRole
from gateway.auth.callers import current_caller
from gateway.choices import ChoiceDelta, batches_of, check_whole_answer, in_turns
from gateway.grpc import vllm_convert as convert
from gateway.grpc.convert import ids_to_abort, unset_in
from gateway.grpc.generated import common_pb2, vllm_engine_pb2_grpc
from gateway.grpc.generated import vllm_engine_pb2 as pb
from gateway.grpc.guard import deadline_of, trace_of
from gateway.grpc.status import Context
from gateway.grpc.vllm_whole import WholeResponse
from gateway.model import ServedModel
from gateway.preprocess import ClientRequest, Preprocessor, independent_requests
from gateway.requests.driver import RequestDriver
from gateway.requests.request import GatewayRequest

CHUNK_BYTES = 64 * 1024

Batches = AsyncIterator[Sequence[ChoiceDelta]]


class VllmEngine(vllm_engine_pb2_grpc.VllmEngineServicer):
    """One instance serves all calls.

    A router sees the fleet as one engine. Prefill, hand-over and decode are hidden from it.
    """

    def __init__(
        self,
        driver: RequestDriver,
        preprocessor: Preprocessor,
        model: ServedModel,
        not_ready: Callable[[], str | None],
        clock: Clock,
    ) -> None:
        """`not_ready` returns why no request can be served now, or None if requests can be served."""
        self._driver = driver
        self._preprocessor = preprocessor
        self._model = model
        self._not_ready = not_ready
        self._clock = clock
        self._began_at = clock.now()
        self._packing = asyncio.Lock()
        self._archive: _Archive | None = None

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> AsyncIterator[Any]:
        """Yields GenerateResponses if the answer is streamed; otherwise serialized bytes."""
        gateway_requests = await self._preprocess(request, context)
        async with aclosing(batches_of(self._driver, gateway_requests)) as batches:
            answer = (
                _streamed(gateway_requests, batches) if request.stream else _whole(gateway_requests, batches)
            )
            async for response in answer:
                yield response

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        for request_id in ids_to_abort(request.request_ids):
            self._driver.abort(request_id, current_caller.get())
        return pb.AbortResponse()

    async def HealthCheck(self, request: pb.HealthCheckRequest, context: Context) -> pb.HealthCheckResponse:
        reason = self._not_ready()
        return pb.HealthCheckResponse(healthy=reason is None, message=reason or "ready")

    async def GetModelInfo(
        self, request: pb.GetModelInfoRequest, context: Context
    ) -> pb.GetModelInfoResponse:
        """Describes the model without any folder name.

        A router gets the tokenizer with GetTokenizer instead.
        """
        model = self._model
        return pb.GetModelInfoResponse(
            model_path=model.name,
            served_model_name=model.name,
            is_generation=True,
            max_context_length=model.max_model_len,
            max_req_input_len=model.max_model_len - 1,
            vocab_size=model.vocab_size,
            eos_token_ids=model.eos_token_ids,
        )

    async def GetServerInfo(
        self, request: pb.GetServerInfoRequest, context: Context
    ) -> pb.GetServerInfoResponse:
        now = self._clock.now()
        return pb.GetServerInfoResponse(
            active_requests=self._driver.dispatcher.num_in_flight + self._driver.dispatcher.num_queued,
            last_receive_timestamp=time.time(),
            uptime_seconds=now - self._began_at,
            server_type="baton",
            data_parallel_size=1,
            block_size=max((status.ref.block_size for status in self._driver.workers.statuses), default=0),
        )

    async def GetLoads(self, request: pb.GetLoadsRequest, context: Context) -> pb.GetLoadsResponse:
        """Reports the fleet as one rank: this gateway's requests, and the KV blocks of the decode workers."""
        decode = [status for status in self._driver.workers.statuses if status.role is WorkerRole.DECODE]
        decode_blocks = [
            (status.kv_blocks, status.ref.block_size / status.kv_groups.num_groups) for status in decode
        ]
        total = int(sum(blocks.total * num_tokens for blocks, num_tokens in decode_blocks))
        free = int(sum(blocks.free * num_tokens for blocks, num_tokens in decode_blocks))
        running, waiting = self._driver.dispatcher.num_in_flight, self._driver.dispatcher.num_queued
        load = pb.SchedulerLoad(
            num_running_reqs=running,
            num_waiting_reqs=waiting,
            num_total_reqs=running + waiting,
            num_used_tokens=total - free,
            max_total_num_tokens=total,
            token_usage=(total - free) / total if total else 0.0,
        )
        now = datetime.now(UTC).isoformat()
        return pb.GetLoadsResponse(timestamp=now, version=baton_version(), dp_rank_count=1, loads=[load])

    async def GetTokenizer(
        self, request: common_pb2.GetTokenizerRequest, context: Context
    ) -> AsyncIterator[common_pb2.GetTokenizerChunk]:
        """Sends the tokenizer's files as a ZIP archive. The last chunk contains the archive's SHA-256."""
        archive = await self._packed_tokenizer()
        for begin in range(0, len(archive.data), CHUNK_BYTES):
            is_last = begin + CHUNK_BYTES >= len(archive.data)
            yield common_pb2.GetTokenizerChunk(
                data=archive.data[begin : begin + CHUNK_BYTES], sha256=archive.sha256 if is_last else ""
            )

    async def Embed(self, request: pb.EmbedRequest, context: Context) -> NoReturn:
        raise Unsupported("Embed: not supported; the models here only generate")

    async def FlushCache(self, request: common_pb2.FlushCacheRequest, context: Context) -> NoReturn:
        raise Unsupported("FlushCache: not supported; use baton.v1.ClusterService/FlushCache")

    async def StartProfile(self, request: common_pb2.StartProfileRequest, context: Context) -> NoReturn:
        raise Unsupported(
            "StartProfile: not supported; start the fleet with --trace-dir to record every "
            "step of its workers"
        )

    async def StopProfile(self, request: common_pb2.StopProfileRequest, context: Context) -> NoReturn:
        raise Unsupported("StopProfile: not supported; see StartProfile")

    def SubscribeKvEvents(self, request: common_pb2.SubscribeKvEventsRequest, context: Context) -> NoReturn:
        raise Unsupported(
            "SubscribeKvEvents: not supported; this gateway routes by its workers' prefix caches itself"
        )

    async def _packed_tokenizer(self) -> "_Archive":
        """Makes the archive once, in a thread: with a large vocabulary this takes most of a second."""
        async with self._packing:
            if self._archive is None:
                tokenizer = self._preprocessor.pool.tokenizer
                self._archive = await asyncio.to_thread(lambda: _pack(tokenizer.files()))
            return self._archive

    async def _preprocess(self, request: pb.GenerateRequest, context: Context) -> list[GatewayRequest]:
        # This comes before millions of ids become a tuple.
        self._preprocessor.room_after(len(request.tokenized.input_ids))
        params = request.sampling_params
        client_request = ClientRequest(
            prompt=convert.prompt_from(request),
            params=convert.sampling_params_from(params),
            unset=unset_in(params),
            request_id=request.request_id,
            keep_special_tokens=not params.skip_special_tokens,
            deadline=deadline_of(context),
            caller=current_caller.get(),
            trace=trace_of(context),
            api="vllm",
        )
        gateway_requests = independent_requests(
            await self._preprocessor.preprocess(client_request), max(1, params.n)
        )
        if not request.stream:
            check_whole_answer(gateway_requests)
        return gateway_requests


async def _streamed(
    gateway_requests: Sequence[GatewayRequest], batches: Batches
) -> AsyncIterator[pb.GenerateResponse]:
    prompt_token_ids = gateway_requests[0].prompt_token_ids
    first_token_ids = dict.fromkeys(range(len(gateway_requests)), prompt_token_ids[0])
    async for index, delta in in_turns(batches):
        input_logprobs = None
        if delta.prompt_logprobs is not None:
            input_logprobs = convert.input_logprobs_to_message(
                tuple(delta.prompt_logprobs), first_token_ids.pop(index, None)
            )
        yield convert.delta_to_chunk(index, delta, len(prompt_token_ids), input_logprobs)
        if delta.finish is not None:
            yield convert.to_complete(index, delta, delta.finish)


async def _whole(gateway_requests: Sequence[GatewayRequest], batches: Batches) -> AsyncIterator[bytes]:
    answers = [
        WholeResponse(index, request.prompt_token_ids[0]) for index, request in enumerate(gateway_requests)
    ]
    async for index, delta in in_turns(batches):
        answers[index].on_delta(delta)
        if delta.finish is not None:
            yield answers[index].serialized(delta.finish)


@dataclass(frozen=True, slots=True)
class _Archive:
    """The content of a ZIP file, and its SHA-256."""

    data: bytes
    sha256: str


def _pack(contents: Mapping[str, bytes]) -> _Archive:
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as files:
        for name, content in contents.items():
            files.writestr(name, content)
    data = archive.getvalue()
    return _Archive(data, hashlib.sha256(data).hexdigest())
