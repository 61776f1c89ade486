"""Both frontends bound client input alike, and name the field that exceeds its bound."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from baton.sampling import (
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_STOP_CHARACTERS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
)
from baton.v1 import generation_service_pb2 as pb
from baton.v1 import generation_service_pb2_grpc as pb_grpc
from baton.v1 import sampling_pb2 as sampling_pb
from gateway import choices
from gateway.conversation.checks import MAX_MESSAGES
from gateway.grpc.generated import vllm_engine_pb2 as engine_pb
from gateway.grpc.generated.vllm_engine_pb2_grpc import VllmEngineStub
from gateway.preprocess import MAX_SALT_CHARACTERS
from tests.factories.gateway import answering, gateway_with

# The field that an error names: a function that makes the fields for a number of things, and the largest such number.
BOUNDS: dict[str, tuple[Callable[[int], dict[str, Any]], int]] = {
    "stop": (lambda n: {"stop": [f"<{i}>" for i in range(n)]}, MAX_STOP_STRINGS),
    "stop (length)": (lambda n: {"stop": ["x" * n]}, MAX_STOP_CHARACTERS),
    "stop_token_ids": (lambda n: {"stop_token_ids": [i % 5 for i in range(n)]}, MAX_STOP_TOKEN_IDS),
    "logprobs": (lambda n: {"logprobs": n}, MAX_LOGPROBS),
    "min_tokens": (lambda n: {"min_tokens": n, "max_tokens": 2}, 2),
}
OF_THE_REQUEST: dict[str, tuple[Callable[[int], dict[str, Any]], int]] = {
    "request_id": (lambda n: {"request_id": "x" * n}, 128),
    "cache_salt": (lambda n: {"cache_salt": "x" * n}, MAX_SALT_CHARACTERS),
}


async def test_both_frontends_take_exactly_as_much_as_is_allowed(folder: Path) -> None:
    async with (
        gateway_with(folder, {}, {"w0": answering([7, 8])}) as under_test,
        grpc.aio.insecure_channel(under_test.grpc_target) as channel,
        under_test.http() as http,
    ):
        stub: Any = pb_grpc.GenerationServiceStub(channel)

        async def by_grpc(sampling: dict[str, Any], **request: Any) -> str:
            message = pb.GenerateRequest(
                token_ids=pb.TokenIds(ids=[5, 6]),
                sampling_params=sampling_pb.SamplingParams(**{"max_tokens": 2, **sampling}),
                **request,
            )
            return await why_not(stub, message)

        async def by_http(**body: Any) -> str:
            asked = {"model": "tiny", "prompt": [5, 6], "max_tokens": 2, **body}
            answer = await http.post("/v1/completions", json=asked)
            assert answer.status_code in (200, 400), answer.text
            return "" if answer.status_code == 200 else str(answer.json()["error"]["param"])

        for name, (fields, bound) in BOUNDS.items():
            field = name.partition(" ")[0]
            assert await by_grpc(fields(bound)) == "", name
            assert (await by_grpc(fields(bound + 1))).startswith(f"{field}: "), name
            assert await by_http(**fields(bound)) == "", name
            assert (await by_http(**fields(bound + 1))).startswith(field), name
        for name, (fields, bound) in OF_THE_REQUEST.items():
            assert await by_grpc({}, **fields(bound)) == "", name
            assert (await by_grpc({}, **fields(bound + 1))).startswith(f"{name}: "), name
            assert await by_http(**fields(bound)) == "", name
            assert await by_http(**fields(bound + 1)) == name
        many = range(MAX_LOGIT_BIAS + 1)
        assert (await by_grpc({"logit_bias": dict.fromkeys(many, 1.0)})).startswith("logit_bias: ")
        assert await by_http(logit_bias=dict.fromkeys(map(str, many), 1.0)) == "logit_bias"
        assert await by_http(n=129) == "n"
        assert await by_http(prompt=[[5]] * 129) == "prompt"
        assert await by_http(prompt=[[5]] * 65, n=2) == "n"


async def test_an_answer_that_is_not_streamed_is_bounded_at_every_frontend(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """128 answers of 391 tokens with 20 log-probabilities each are too much; 390 are not. Streams are not bounded."""
    monkeypatch.setattr(choices, "MAX_VALUES", 2**20)

    async with (
        gateway_with(folder, {}, {"w0": answering([7, 8])}, max_model_len=1000) as under_test,
        grpc.aio.insecure_channel(under_test.grpc_target) as channel,
        under_test.http() as http,
    ):
        engine = VllmEngineStub(channel)

        async def by_http(path: str, **body: Any) -> tuple[int, str, str]:
            answer = await http.post(path, json={"model": "tiny", **body}, timeout=30)
            if answer.status_code == 200:
                return 200, "", ""
            error = answer.json()["error"]
            return answer.status_code, error["param"], error["message"]

        chat = {"messages": [{"role": "user", "content": "Hi"}], "logprobs": True, "top_logprobs": 20}
        text = {"prompt": [[5, 6]] * 64, "n": 2, "logprobs": 20}
        complaint = (
            "an answer that is not streamed may hold 1048576 values; this one may have 1051008: "
            "128 answers x 391 tokens x"
        )
        for path, body, name, logprobs in (
            ("/v1/chat/completions", chat | {"n": 128}, "max_completion_tokens", "top_logprobs"),
            ("/v1/chat/completions", chat | {"n": 128}, "max_tokens", "top_logprobs"),
            ("/v1/completions", text, "max_tokens", "logprobs"),
        ):
            status, param, message = await by_http(path, **body, **{name: 391})
            assert (status, param) == (400, name)
            assert message == (
                f"{name}: {complaint} 21 values (the token and 20 {logprobs}). Set {name} "
                f"to at most 390, lower {logprobs} or n, or set stream: true"
            )
            assert await by_http(path, **body, **{name: 390}) == (200, "", "")
            assert await by_http(path, **body, **{name: 391}, stream=True) == (200, "", "")
        room = await by_http("/v1/chat/completions", **chat | {"n": 128})
        assert room[:2] == (400, "max_completion_tokens"), "without a bound of its own the room counts"
        assert await by_http("/v1/chat/completions", messages=chat["messages"], n=128) == (200, "", "")

        def by_grpc(max_tokens: int, stream: bool) -> engine_pb.GenerateRequest:
            params = engine_pb.SamplingParams(max_tokens=max_tokens, logprobs=20, n=128)
            tokenized = engine_pb.TokenizedInput(input_ids=[5, 6])
            return engine_pb.GenerateRequest(tokenized=tokenized, sampling_params=params, stream=stream)

        refused = await why_not(engine, by_grpc(391, stream=False))
        assert refused.startswith(
            f"max_tokens: {complaint} 21 values (the token and 20 logprobs). Set max_tokens"
        )
        assert await why_not(engine, by_grpc(390, stream=False)) == ""
        assert await why_not(engine, by_grpc(391, stream=True)) == ""


async def why_not(stub: Any, message: pb.GenerateRequest | engine_pb.GenerateRequest) -> str:
    """The error of the request; empty if the request was answered."""
    try:
        async for _ in stub.Generate(message):
            pass
    except grpc.aio.AioRpcError as error:
        is_clients_mistake = error.code() is grpc.StatusCode.INVALID_ARGUMENT
        return str(error.details() if is_clients_mistake else error.code())
    return ""


async def test_prompts_are_bounded_before_work_is_put_into_them(folder: Path) -> None:
    async with (
        gateway_with(folder, {}, {"w0": answering([7, 8])}) as under_test,
        grpc.aio.insecure_channel(under_test.grpc_target) as channel,
    ):
        stub: Any = pb_grpc.GenerationServiceStub(channel)
        ids = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1] * 3_000_000))
        assert "3000000 tokens leave no room for an answer" in await why_not(stub, ids)
        empty = pb.Chat.Message(role="user")
        chat = pb.GenerateRequest(chat=pb.Chat(messages=[empty] * (MAX_MESSAGES + 1)))
        assert f"a conversation must have 1 to {MAX_MESSAGES} messages" in await why_not(stub, chat)
        text = pb.GenerateRequest(text="x" * 1_000_000)
        assert (await why_not(stub, text)).startswith("prompt: ")
