"""Large answers that are not streamed, as clients of both frontends see them."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio

from baton.request import EngineRequest, FinishReason, RequestOutput, TokenLogprobs
from gateway.grpc import guard
from gateway.grpc.generated import vllm_engine_pb2 as pb
from gateway.grpc.generated.vllm_engine_pb2_grpc import VllmEngineStub
from gateway.http.whole_json import WRITE_CHARACTERS
from tests.factories.gateway import GatewayUnderTest, gateway_with
from tests.factories.models import make_tokenizer
from tests.factories.openai import openai_for
from tests.factories.proxy import proxy_to

TEXT = make_tokenizer().encode(" the cache is the baton,").ids
NUM_TOKENS = 500
TOKENS_EACH = 50
N = 8
TOP = 20


def long_answer(request: EngineRequest) -> list[RequestOutput]:
    """As many tokens as the request asks for, fifty at a time."""
    num_tokens = request.sampling_params.max_tokens
    return [
        RequestOutput(
            request_id=request.request_id,
            first_position=begin,
            token_ids=tuple(token_at(position) for position in range(begin, begin + TOKENS_EACH)),
            logprobs=tuple(logprobs_at(position) for position in range(begin, begin + TOKENS_EACH)),
            finish_reason=FinishReason.LENGTH if begin + TOKENS_EACH == num_tokens else None,
        )
        for begin in range(0, num_tokens, TOKENS_EACH)
    ]


def token_at(position: int) -> int:
    return TEXT[position % len(TEXT)]


def logprobs_at(position: int) -> TokenLogprobs:
    top = tuple((100 + rank, -rank / 8) for rank in range(TOP))
    return TokenLogprobs(token_at(position), -position / 4, 1, top)


@asynccontextmanager
async def a_gateway(folder: Path, **config: Any) -> AsyncIterator[GatewayUnderTest]:
    config = {"max_model_len": 4000} | config
    async with gateway_with(folder, {}, {"d0": long_answer}, **config) as under_test:
        yield under_test


async def test_openais_client_reads_an_answer_that_comes_in_chunks(folder: Path) -> None:
    async with a_gateway(folder) as under_test, openai_for(under_test) as client:
        raw = await client.chat.completions.with_raw_response.create(
            model="tiny",
            messages=[{"role": "user", "content": "Hello"}],
            n=N,
            max_tokens=NUM_TOKENS,
            logprobs=True,
            top_logprobs=TOP,
        )
        assert len(raw.content) > 2 * WRITE_CHARACTERS
        assert raw.headers["content-type"] == "application/json"
        answer: Any = raw.parse()
        assert answer.usage.completion_tokens == N * NUM_TOKENS
        for choice in answer.choices:
            content = choice.logprobs.content
            assert [token.logprob for token in content] == [-position / 4 for position in range(NUM_TOKENS)]
            assert {len(token.top_logprobs) for token in content} == {TOP}
            assert bytes(byte for token in content for byte in token.bytes).decode() == choice.message.content


async def test_a_client_that_leaves_amid_an_answer_is_forgotten(folder: Path) -> None:
    async with a_gateway(folder) as under_test:
        body = {"model": "tiny", "prompt": [5], "n": N, "max_tokens": NUM_TOKENS, "logprobs": TOP}
        async with under_test.http() as http:
            async with http.stream("POST", "/v1/completions", json=body, timeout=30) as answer:
                assert answer.status_code == 200
                await anext(answer.aiter_raw(1000))
            assert (await http.post("/v1/completions", json=body | {"n": 1}, timeout=30)).status_code == 200


async def test_a_router_reads_one_large_message(folder: Path) -> None:
    async with (
        a_gateway(folder) as under_test,
        grpc.aio.insecure_channel(under_test.grpc_target) as channel,
    ):
        stub: Any = VllmEngineStub(channel)
        responses = stub.Generate(request_of(max_tokens=NUM_TOKENS, n=2))
        answers = [response.complete async for response in responses]
        assert sorted(answer.index for answer in answers) == [0, 1]
        for answer in answers:
            assert list(answer.output_ids) == [token_at(position) for position in range(NUM_TOKENS)]
            assert answer.completion_tokens == NUM_TOKENS
            logprobs = answer.output_logprobs
            assert list(logprobs.token_logprobs) == [-position / 4 for position in range(NUM_TOKENS)]
            assert [len(top.values) for top in logprobs.top_logprobs] == [TOP] * NUM_TOKENS


async def test_an_answer_may_be_larger_than_a_request(folder: Path) -> None:
    """An answer that was computed must arrive."""
    config = {"max_message_mib": 1, "max_model_len": 11_000, "max_unread_tokens": 11_000}
    async with (
        a_gateway(folder, **config) as under_test,
        grpc.aio.insecure_channel(under_test.grpc_target) as channel,
    ):
        stub: Any = VllmEngineStub(channel)
        (response,) = [each async for each in stub.Generate(request_of(max_tokens=10_000))]
        assert response.complete.completion_tokens == 10_000
        assert response.ByteSize() > 2**20


async def test_a_message_is_compressed_unless_that_would_take_long(folder: Path) -> None:
    """gRPC compresses in the event loop, so this must not take long."""

    async with (
        a_gateway(folder) as under_test,
        proxy_to(under_test.gateway.grpc_port) as proxy,
        grpc.aio.insecure_channel(f"127.0.0.1:{proxy.port}") as channel,
    ):
        stub: Any = VllmEngineStub(channel)
        for max_tokens, is_compressed in ((NUM_TOKENS, True), (3000, False)):
            before = proxy.bytes_to_client
            responses = stub.Generate(request_of(max_tokens=max_tokens), metadata=((guard.ENCODING, "gzip"),))
            (response,) = [each async for each in responses]
            assert response.complete.completion_tokens == max_tokens
            assert (response.ByteSize() > guard.MAX_COMPRESSED_BYTES) is not is_compressed
            assert (proxy.bytes_to_client - before < response.ByteSize()) is is_compressed


def request_of(**params: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        tokenized=pb.TokenizedInput(input_ids=[5]), sampling_params=pb.SamplingParams(logprobs=TOP, **params)
    )
