"""vLLM's token-level service for routers, called by a client generated from its description."""

import asyncio
import hashlib
import io
import zipfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from tokenizers import Tokenizer as RustTokenizer

from baton.request import EngineRequest, FinishReason, RequestOutput, TokenLogprobs
from baton.sampling import GrammarKind, StructuredOutput
from gateway.conversation import with_limited_spaces
from gateway.grpc.generated import common_pb2
from gateway.grpc.generated import vllm_engine_pb2 as pb
from gateway.grpc.generated.vllm_engine_pb2_grpc import VllmEngineStub
from tests.factories.gateway import GatewayUnderTest, Script, answering, gateway_with, silent
from tests.factories.models import make_tokenizer

TOKENIZER = make_tokenizer()
ANSWER = TOKENIZER.encode("The cache is the baton").ids
PROMPT = TOKENIZER.encode("Hello").ids


@asynccontextmanager
async def engine_with(
    folder: Path, decode: Script, prefill: Script | None = None, **config: object
) -> AsyncIterator[tuple[GatewayUnderTest, Any]]:
    workers = {} if prefill is None else {"p0": prefill}
    async with (
        gateway_with(folder, workers, {"d0": decode}, **config) as under_test,  # type: ignore[arg-type]
        grpc.aio.insecure_channel(under_test.grpc_target) as channel,
    ):
        yield under_test, VllmEngineStub(channel)


def request_of(stream: bool = False, **fields: Any) -> pb.GenerateRequest:
    params = pb.SamplingParams(**fields.pop("sampling", {}))
    tokenized = pb.TokenizedInput(original_text="Hello", input_ids=PROMPT)
    return pb.GenerateRequest(
        **{"request_id": "r", "tokenized": tokenized, "sampling_params": params, "stream": stream, **fields}
    )


async def responses_to(stub: Any, request: pb.GenerateRequest) -> list[pb.GenerateResponse]:
    return [response async for response in stub.Generate(request)]


async def refusal(stub: Any, request: pb.GenerateRequest) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await responses_to(stub, request)
    return caught.value


async def test_tokens_stream_through_a_pair_and_the_last_response_sums_up(folder: Path) -> None:
    async with engine_with(folder, answering(ANSWER), answering(ANSWER)) as (under_test, stub):
        *chunks, last = await responses_to(stub, request_of(True, sampling={"max_tokens": len(ANSWER)}))
        assert [token for chunk in chunks for token in chunk.chunk.token_ids] == ANSWER
        assert sum(chunk.chunk.completion_tokens for chunk in chunks) == len(ANSWER)
        assert {chunk.chunk.prompt_tokens for chunk in chunks} == {len(PROMPT)}
        assert last.WhichOneof("response") == "complete"
        assert (last.complete.finish_reason, last.complete.prompt_tokens) == ("length", len(PROMPT))
        assert last.complete.output_ids == chunks[-1].chunk.token_ids
        to_prefill = await under_test.workers["p0"].next_request()
        assert to_prefill.kv_transfer is not None
        assert to_prefill.prompt_token_ids == tuple(PROMPT)


async def test_without_streaming_there_is_one_response(folder: Path) -> None:
    async with engine_with(folder, answering(ANSWER)) as (under_test, stub):
        (only,) = await responses_to(stub, request_of())
        assert list(only.complete.output_ids) == ANSWER
        assert only.complete.completion_tokens == len(ANSWER)
        params = (await under_test.workers["d0"].next_request()).sampling_params
        assert (params.temperature, params.top_p, params.repetition_penalty) == (1.0, 1.0, 1.0)
        assert params.max_tokens == 256 - len(PROMPT), "as many as fit"


async def test_stop_strings_and_logprobs_are_vllms(folder: Path) -> None:
    def with_logprobs(request: EngineRequest) -> list[RequestOutput]:
        logprobs = tuple(TokenLogprobs(t, -0.5, 1, ((t, -0.5), (7, -2.0))) for t in ANSWER)
        output = RequestOutput(
            request_id=request.request_id,
            first_position=0,
            token_ids=tuple(ANSWER),
            logprobs=logprobs,
            finish_reason=FinishReason.LENGTH,
        )
        return [output]

    async with engine_with(folder, with_logprobs) as (_, stub):
        (only,) = await responses_to(stub, request_of(sampling={"logprobs": 2, "stop": [" is"]}))
        complete = only.complete
        assert (complete.finish_reason, complete.matched_stop_str) == ("stop", " is")
        count = len(complete.output_ids)
        assert list(complete.output_ids) == ANSWER[:count] != ANSWER
        assert list(complete.output_logprobs.token_ids) == ANSWER[:count]
        assert list(complete.output_logprobs.token_logprobs) == [-0.5] * count
        assert list(complete.output_logprobs.top_logprobs[0].token_ids) == [ANSWER[0], 7]


@pytest.mark.parametrize("stream", [False, True])
async def test_several_answers_each_have_their_index_and_seed(folder: Path, stream: bool) -> None:
    async with engine_with(folder, answering(ANSWER)) as (under_test, stub):
        responses = await responses_to(stub, request_of(stream, sampling={"n": 3, "seed": 7}))
        ends = {r.complete.index: r.complete for r in responses if r.HasField("complete")}
        assert sorted(ends) == [0, 1, 2]
        for index, end in ends.items():
            streamed = [t for r in responses if r.chunk.index == index for t in r.chunk.token_ids]
            assert (streamed if stream else list(end.output_ids)) == ANSWER
        seeds = {(await under_test.workers["d0"].next_request()).sampling_params.seed for _ in range(3)}
        assert len(seeds) == 3
        assert 7 in seeds


CONSTRAINTS: list[tuple[dict[str, Any], GrammarKind, str]] = [
    ({"json_schema": "{}"}, GrammarKind.JSON_SCHEMA, "{}"),
    ({"json_object": True}, GrammarKind.JSON_SCHEMA, '{"type": "object"}'),
    ({"regex": "a+"}, GrammarKind.REGEX, "a+"),
    ({"grammar": 'start: "a"'}, GrammarKind.LARK, 'start: "a"'),
    ({"choice": pb.ChoiceConstraint(choices=["a.b", "c d"])}, GrammarKind.REGEX, r"a\.b|c\ d"),
]


async def test_constraints_reach_the_worker(folder: Path) -> None:
    async with engine_with(folder, answering(ANSWER)) as (under_test, stub):
        for constraint, kind, source in CONSTRAINTS:
            await responses_to(stub, request_of(sampling={**constraint, "seed": -1}))
            params = (await under_test.workers["d0"].next_request()).sampling_params
            assert params.structured_output == with_limited_spaces(StructuredOutput(kind, source))
            assert params.seed == 2**32 - 1
        await responses_to(stub, request_of(sampling={"json_object": False}))
        assert (await under_test.workers["d0"].next_request()).sampling_params.structured_output is None


REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"tokenized": None}, "input: set one of"),
    ({"tokenized": pb.TokenizedInput()}, "prompt: must not be empty"),
    ({"tokenized": pb.TokenizedInput(input_ids=[99_999])}, "token_ids: 99999"),
    ({"kv_transfer_params_json": "{}"}, "kv_transfer_params_json: this gateway chooses workers"),
    (
        {"kv_transfer_params": pb.KvTransferParams(remote_host="10.0.0.1", remote_port=1)},
        "kv_transfer_params:",
    ),
    ({"data_parallel_rank": 0}, "data_parallel_rank:"),
    ({"mm_inputs": pb.MultimodalInputs()}, "mm_inputs: models here read only text"),
    ({"extra_mm_inputs": [pb.MultimodalInputs()]}, "extra_mm_inputs:"),
    ({"media_refs": pb.MediaRefs()}, "media_refs:"),
    ({"sampling": {"n": 129}}, "n: must be at most 128"),
    ({"sampling": {"prompt_logprobs": -1}}, "prompt_logprobs: must be from 0"),
    ({"sampling": {"truncate_prompt_tokens": 4}}, "truncate_prompt_tokens:"),
    ({"sampling": {"logprobs": -1}}, "logprobs: must be from 0"),
    ({"sampling": {"structural_tag": "{}"}}, "structural_tag:"),
    ({"sampling": {"choice": pb.ChoiceConstraint()}}, "choice:"),
    ({"sampling": {"logit_bias": {-1: 1.0}}}, "logit_bias:"),
    ({"sampling": {"top_p": 2.0}}, "top_p:"),
]


async def test_unsupported_fields_are_refused_by_name(folder: Path) -> None:
    async with engine_with(folder, silent) as (_, stub):
        for fields, complaint in REFUSALS:
            error = await refusal(stub, request_of(**fields))
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, complaint
            assert str(error.details()).startswith(complaint)


def test_every_field_of_a_request_is_honoured_or_refused() -> None:
    """A field of a newer version needs a decision: honour or refuse it."""
    request, params = pb.GenerateRequest.DESCRIPTOR.fields, pb.SamplingParams.DESCRIPTOR.fields
    assert {field.name for field in request} == {
        *("request_id", "tokenized", "text", "sampling_params", "stream", "kv_transfer_params", "mm_inputs"),
        *("extra_mm_inputs", "kv_transfer_params_json", "data_parallel_rank", "media_refs"),
    }
    assert len(params) == 28


async def test_a_router_learns_what_is_served_and_how_busy_it_is(folder: Path) -> None:
    async with engine_with(folder, silent) as (under_test, stub):
        health = await stub.HealthCheck(pb.HealthCheckRequest())
        assert (health.healthy, health.message) == (True, "ready")
        info = await stub.GetModelInfo(pb.GetModelInfoRequest())
        assert (info.served_model_name, info.max_context_length, list(info.eos_token_ids)) == (
            *("tiny", 256),
            [2],
        )
        assert str(folder) not in str(info)
        reading = asyncio.ensure_future(refusal(stub, request_of(request_id="mine")))
        request = await under_test.workers["d0"].next_request()
        assert (await stub.GetServerInfo(pb.GetServerInfoRequest())).active_requests == 1
        (load,) = (await stub.GetLoads(pb.GetLoadsRequest())).loads
        assert (load.num_running_reqs, load.num_waiting_reqs) == (1, 0)
        assert (load.max_total_num_tokens, load.num_used_tokens) == (999 * 16, 0)
        await stub.Abort(pb.AbortRequest(request_ids=["mine", "nobody"]))
        assert (await reading).code() is grpc.StatusCode.ABORTED
        assert await under_test.workers["d0"].next_abort() == request.request_id


async def test_an_engine_without_workers_is_not_healthy(folder: Path) -> None:
    async with (
        gateway_with(folder, {}, {}) as under_test,
        grpc.aio.insecure_channel(under_test.grpc_target) as channel,
    ):
        stub: Any = VllmEngineStub(channel)
        health = await stub.HealthCheck(pb.HealthCheckRequest())
        assert (health.healthy, health.message) == (False, "no decode worker is reachable")


async def test_the_whole_tokenizer_arrives(folder: Path, tmp_path: Path) -> None:
    async with engine_with(folder, silent) as (_, stub):
        chunks = [chunk async for chunk in stub.GetTokenizer(common_pb2.GetTokenizerRequest())]
        data = b"".join(chunk.data for chunk in chunks)
        assert [chunk.sha256 for chunk in chunks] == [""] * (len(chunks) - 1) + [
            hashlib.sha256(data).hexdigest()
        ]
        with zipfile.ZipFile(io.BytesIO(data)) as files:
            files.extractall(tmp_path)
        theirs = RustTokenizer.from_file(str(tmp_path / "tokenizer.json"))
        assert theirs.encode("The cache is the baton").ids == ANSWER
        assert "tokenizer_config.json" in files.namelist()


async def test_an_unsupported_call_says_why(folder: Path) -> None:
    async with engine_with(folder, silent) as (_, stub):
        for call in (
            stub.Embed(pb.EmbedRequest()),
            stub.FlushCache(common_pb2.FlushCacheRequest()),
            stub.StartProfile(common_pb2.StartProfileRequest()),
            stub.StopProfile(common_pb2.StopProfileRequest()),
            stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest()).read(),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
            assert ": " in str(caught.value.details())
