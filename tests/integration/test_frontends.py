"""One table of requests, sent to every frontend: what each client gets, whichever API it uses."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from baton.errors import DeadlinePassed, InvalidRequest, Overloaded, RequestAborted, WorkerUnavailable
from baton.request import ErrorKind
from gateway import GatewayError
from gateway.error_codes import codes_of
from gateway.grpc.generated import vllm_engine_pb2
from gateway.grpc.generated.vllm_engine_pb2_grpc import VllmEngineStub
from gateway.http.error_shapes import SITE_OVERLOADED
from tests.factories.gateway import (
    GatewayUnderTest,
    Script,
    answering,
    beginning,
    failing,
    gateway_with,
    silent,
)
from tests.factories.models import make_tokenizer

TOKENIZER = make_tokenizer()
TEXT = "The cache is the baton"
ANSWER = TOKENIZER.encode(TEXT).ids

Send = Callable[..., Coroutine[Any, Any, str]]
"""Sends a gateway a request with these fields, and returns the answer's text; raises Refused."""


@dataclass
class Refused(Exception):
    status: str | int
    """gRPC's by name, HTTP's by number."""
    message: str

    def is_a(self, error: Exception) -> bool:
        codes = codes_of(error)
        return self.status in (codes.grpc.name, codes.http.value)


OWN_FIELDS = ("request_id", "timeout_s", "skip_reading_prefix_cache", "max_model_len")
"""Fields of a request that are no sampling parameters."""


async def over_grpc(under_test: GatewayUnderTest, **fields: Any) -> str:
    own = {name: fields.pop(name) for name in OWN_FIELDS if name in fields}
    try:
        return "".join(event.text for event in await under_test.ask(sampling=fields, **own))
    except GatewayError as error:
        raise Refused(error.code, error.message) from None


def over_vllm(stream: bool) -> Send:
    async def send(under_test: GatewayUnderTest, **fields: Any) -> str:
        request_id, timeout_s = fields.pop("request_id", ""), fields.pop("timeout_s", None)
        request = vllm_engine_pb2.GenerateRequest(
            request_id=request_id,
            tokenized=vllm_engine_pb2.TokenizedInput(input_ids=TOKENIZER.encode("Hello").ids),
            sampling_params=vllm_engine_pb2.SamplingParams(**fields),
            stream=stream,
        )
        async with grpc.aio.insecure_channel(under_test.grpc_target) as channel:
            stub: Any = VllmEngineStub(channel)
            try:
                responses = [each async for each in stub.Generate(request, timeout=timeout_s)]
            except grpc.aio.AioRpcError as error:
                raise Refused(error.code().name, error.details() or "") from None
        parts = [each.chunk.token_ids if stream else each.complete.output_ids for each in responses]
        return TOKENIZER.decode([token_id for part in parts for token_id in part])

    return send


def over_http(path: str, prompt: dict[str, Any], stream: bool) -> Send:
    async def send(under_test: GatewayUnderTest, timeout_s: float | None = None, **fields: Any) -> str:
        headers = {} if timeout_s is None else {"x-request-timeout-ms": str(round(timeout_s * 1000))}
        body = {"model": "tiny", "stream": stream, **prompt, **fields}
        async with under_test.http() as client:
            answer = await client.post(path, json=body, headers=headers)
        if answer.status_code != 200:
            raise Refused(answer.status_code, answer.json()["error"]["message"])
        events = answer.text.split("\n\n")[:-2] if stream else [answer.text]
        choices = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events]
        messages = [choice.get("delta") or choice.get("message") or choice for choice in choices]
        return "".join(message.get("content", message.get("text")) for message in messages)

    return send


def over_messages(stream: bool) -> Send:
    async def send(under_test: GatewayUnderTest, timeout_s: float | None = None, **fields: Any) -> str:
        headers = {} if timeout_s is None else {"x-request-timeout-ms": str(round(timeout_s * 1000))}
        if "stop" in fields:
            fields["stop_sequences"] = fields.pop("stop")
        turns = [{"role": "user", "content": "Hello"}]
        body = {"model": "tiny", "stream": stream, "max_tokens": 200, "messages": turns, **fields}
        async with under_test.http() as client:
            answer = await client.post("/v1/messages", json=body, headers=headers)
        if answer.status_code != 200:
            status = 429 if answer.status_code == SITE_OVERLOADED else answer.status_code
            raise Refused(status, answer.json()["error"]["message"])
        if not stream:
            return "".join(block["text"] for block in answer.json()["content"])
        events = [json.loads(event.split("data: ")[1]) for event in answer.text.split("\n\n")[:-1]]
        return "".join(event["delta"].get("text", "") for event in events if "delta" in event)

    return send


TO_CHAT = "/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}]}
TO_COMPLETIONS = "/v1/completions", {"prompt": "Hello"}
FRONTENDS: dict[str, Send] = {
    "grpc": over_grpc,
    "vllm": over_vllm(stream=False),
    "vllm-stream": over_vllm(stream=True),
    "chat": over_http(*TO_CHAT, stream=False),
    "chat-stream": over_http(*TO_CHAT, stream=True),
    "completions": over_http(*TO_COMPLETIONS, stream=False),
    "completions-stream": over_http(*TO_COMPLETIONS, stream=True),
    "messages": over_messages(stream=False),
    "messages-stream": over_messages(stream=True),
}


async def refusal(answer: Awaitable[str]) -> Refused:
    with pytest.raises(Refused) as caught:
        await answer
    return caught.value


async def test_a_prompt_goes_to_a_pair_and_the_answer_comes_back(folder: Path) -> None:
    async with gateway_with(folder, {"p0": answering(ANSWER)}, {"d0": answering(ANSWER)}) as under_test:
        for name, send in FRONTENDS.items():
            assert await send(under_test, max_tokens=9) == TEXT, name
            request = await under_test.workers["d0"].next_request()
            assert request.kv_transfer is not None
            assert request.sampling_params.max_tokens == 9


async def test_c63_an_own_context_and_an_unread_cache_reach_the_workers(folder: Path) -> None:
    async with gateway_with(folder, {}, {"d0": answering(ANSWER)}) as under_test:
        for name, send in FRONTENDS.items():
            if name.startswith("vllm"):
                continue  # its messages have neither field
            assert await send(under_test, max_tokens=200) == TEXT, name
            usual = await under_test.workers["d0"].next_request()
            assert (usual.skip_reading_prefix_cache, usual.sampling_params.max_tokens) == (False, 200)
            length = len(usual.prompt_token_ids)
            own = {"max_model_len": length + 9, "skip_reading_prefix_cache": True}
            assert await send(under_test, max_tokens=200, **own) == TEXT, name
            request = await under_test.workers["d0"].next_request()
            assert (request.skip_reading_prefix_cache, request.sampling_params.max_tokens) == (True, 9)
            too_long = await refusal(send(under_test, max_model_len=length))
            assert too_long.is_a(InvalidRequest("", "")), name
            whose = f"{length} tokens leave no room for an answer; the request's max_model_len is {length}"
            assert whose in too_long.message, name
            for wrong in (0, 257):
                refused = await refusal(send(under_test, max_model_len=wrong))
                assert refused.is_a(InvalidRequest("", "")), name
                assert refused.message.startswith("max_model_len: "), name


async def test_a_stop_string_ends_the_answer_and_the_workers_stop(folder: Path) -> None:
    async with gateway_with(folder, {}, {"d0": beginning(ANSWER)}) as under_test:
        for name, send in FRONTENDS.items():
            text = await send(under_test, stop=[" is"], max_tokens=99)
            assert text == ("The cache is" if name.startswith("vllm") else "The cache"), name
            request = await under_test.workers["d0"].next_request()
            assert await under_test.workers["d0"].next_abort() == request.request_id


async def test_a_client_that_leaves_ends_the_request_on_both_workers(folder: Path) -> None:
    async with gateway_with(folder, {"p0": silent}, {"d0": silent}) as under_test:
        for send in FRONTENDS.values():
            sending = asyncio.create_task(send(under_test))
            ids = [(await under_test.workers[worker].next_request()).request_id for worker in ("p0", "d0")]
            sending.cancel()
            assert [await under_test.workers[worker].next_abort() for worker in ("p0", "d0")] == ids


async def test_a_deadline_reaches_both_workers_and_ends_the_request(folder: Path) -> None:
    async with gateway_with(folder, {"p0": silent}, {"d0": silent}) as under_test:
        for name, send in FRONTENDS.items():
            assert (await refusal(send(under_test, timeout_s=0.3))).is_a(DeadlinePassed()), name
            for worker in ("p0", "d0"):
                request = await under_test.workers[worker].next_request()
                assert request.timeout_s is not None
                assert 0.0 < request.timeout_s <= 0.31, "gRPC rounds deadlines up by up to a millisecond"
                assert await under_test.workers[worker].next_abort() == request.request_id


async def test_a_request_is_aborted_by_its_id_which_no_other_may_have(folder: Path) -> None:
    async with gateway_with(folder, {}, {"d0": silent}) as under_test:
        for name, send in FRONTENDS.items():
            sending = asyncio.create_task(refusal(send(under_test, request_id="mine")))
            request = await under_test.workers["d0"].next_request()
            second = await refusal(send(under_test, request_id="mine"))
            assert second.is_a(InvalidRequest("request_id", "")), name
            assert second.message == "request_id: 'mine' is in use by a running request"
            assert await under_test.client.abort("mine", "unknown") == 1
            assert (await sending).is_a(RequestAborted()), name
            assert await under_test.workers["d0"].next_abort() == request.request_id


@pytest.mark.parametrize(
    ("decode", "error", "message"),
    [
        ([failing(ErrorKind.OVERLOADED, "full")], Overloaded("", 1.0), "no room within 0.3 s"),
        (
            [failing(ErrorKind.INVALID_REQUEST, "prompt: 5 tokens do not fit")],
            InvalidRequest("", ""),
            ": 5 tokens do not fit",
        ),
        (
            [failing(ErrorKind.INTERNAL, "out of luck")] * 4,
            WorkerUnavailable(),
            "gave up after 3 attempt(s): the decode request failed: out of luck",
        ),
        ([], WorkerUnavailable(), "no decode worker is available; waited 0.3 s for a worker"),
    ],
    ids=["full", "invalid", "failing", "none"],
)
async def test_what_workers_say_becomes_a_status(
    folder: Path, decode: list[Script], error: Exception, message: str
) -> None:
    workers = {f"d{number}": script for number, script in enumerate(decode)}
    async with gateway_with(folder, {}, workers, placement_timeout_s=0.3) as under_test:
        for name, send in FRONTENDS.items():
            refused = await refusal(send(under_test))
            assert refused.is_a(error), name
            assert message in refused.message, name


INVALID: list[tuple[str, dict[str, Any]]] = [
    ("temperature", {"temperature": -1.0}),
    ("top_p", {"top_p": 2.0}),
    ("min_p", {"min_p": -0.5}),
    ("presence_penalty", {"presence_penalty": 2.5}),
    ("frequency_penalty", {"frequency_penalty": -2.5}),
    ("repetition_penalty", {"repetition_penalty": -1.0}),
    ("repetition_penalty", {"repetition_penalty": 1e-40}),
    ("min_tokens", {"min_tokens": 3, "max_tokens": 2}),
    ("stop", {"stop": [""]}),
    ("stop_token_ids", {"stop_token_ids": [99_999]}),
    ("request_id", {"request_id": "no spaces"}),
]


async def test_an_invalid_field_is_refused_by_its_name(folder: Path) -> None:
    async with gateway_with(folder, {}, {"d0": answering(ANSWER)}) as under_test:
        for name, send in FRONTENDS.items():
            for field, fields in INVALID:
                refused = await refusal(send(under_test, **fields))
                assert refused.is_a(InvalidRequest("", "")), (name, field)
                assert refused.message.startswith(field), (name, field)
            assert await send(under_test, max_tokens=9) == TEXT, name
