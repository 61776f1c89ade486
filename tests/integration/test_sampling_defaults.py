"""Requests that do not set a sampling field get the model's default, at every front; what they set wins."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from baton.sampling import SamplingParams
from gateway.grpc.generated import vllm_engine_pb2 as vllm_pb
from gateway.grpc.generated.vllm_engine_pb2_grpc import VllmEngineStub
from tests.factories.gateway import GatewayUnderTest, answering, gateway_with
from tests.factories.models import make_tokenizer, make_tokenizer_dir

ANSWER = make_tokenizer().encode("The cache").ids
NAMED = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.1}
PLAIN = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
"""OpenAI's defaults."""
OWN = {"temperature": 0, "top_k": 0, "top_p": 0.5, "min_p": 0, "repetition_penalty": 1}
"""What a request sets; some are what an unset field would be over gRPC."""
TURN = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5}
HTTP: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": TURN,
    "/v1/completions": {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": TURN,
}


@pytest.fixture(scope="module")
def named(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_tokenizer_dir(tmp_path_factory.mktemp("named"))
    (folder / "generation_config.json").write_text(json.dumps(NAMED | {"do_sample": False}))
    return folder


@asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[GatewayUnderTest]:
    decode = {"d0": answering(ANSWER)}
    async with gateway_with(folder, {}, decode, routing_mode="local") as under_test:
        yield under_test


async def received(under_test: GatewayUnderTest) -> dict[str, float]:
    params: SamplingParams = (await under_test.workers["d0"].next_request()).sampling_params
    return {name: getattr(params, name) for name in NAMED}


@pytest.mark.parametrize("path", HTTP)
async def test_over_http(named: Path, path: str) -> None:
    async with serving(named) as under_test, under_test.http() as client:

        async def post(**fields: object) -> dict[str, Any]:
            answer = await client.post(path, json={"model": "tiny"} | HTTP[path] | fields)
            assert answer.status_code == 200, answer.text
            return dict(answer.json())

        unset = await post()
        assert await received(under_test) == NAMED
        await post(**dict.fromkeys(NAMED))
        assert await received(under_test) == NAMED, "null is absent"
        own = await post(**OWN)
        assert await received(under_test) == OWN
        await post(top_k=-1, temperature=0.3)
        assert await received(under_test) == NAMED | {"top_k": 0, "temperature": 0.3}
        if path == "/v1/responses":
            assert (unset["temperature"], unset["top_p"]) == (0.6, 0.95), "what was used"
            assert (own["temperature"], own["top_p"]) == (0, 0.5)


async def test_over_grpc(named: Path) -> None:
    async with serving(named) as under_test:

        async def generate(**sampling: Any) -> dict[str, float]:
            await under_test.ask(sampling=sampling)
            return await received(under_test)

        assert await generate() == NAMED
        assert await generate(**OWN) == OWN
        assert await generate(top_k=7, min_p=0.5) == NAMED | {"top_k": 7, "min_p": 0.5}


async def test_over_vllms_service_the_temperature_is_the_models(named: Path) -> None:
    async with serving(named) as under_test, grpc.aio.insecure_channel(under_test.grpc_target) as channel:
        stub: Any = VllmEngineStub(channel)

        async def generate(**sampling: Any) -> dict[str, float]:
            params = vllm_pb.SamplingParams(max_tokens=5, **sampling)
            request = vllm_pb.GenerateRequest(text="Hi", sampling_params=params)
            async for _ in stub.Generate(request):
                pass
            return await received(under_test)

        assert await generate() == PLAIN | {"temperature": 0.6}
        assert await generate(**OWN) == OWN


async def test_without_the_file_defaults_are_openais(folder: Path) -> None:
    async with serving(folder) as under_test:
        await under_test.ask()
        assert await received(under_test) == PLAIN
