"""What a gateway logs about requests: one line each, with one id everywhere, and never the users' text."""

import asyncio
import logging
from pathlib import Path
from typing import Any

import grpc.aio
import httpx2
import pytest

from baton.request import ErrorKind
from baton.v1 import generation_service_pb2 as pb
from baton.v1.generation_service_pb2_grpc import GenerationServiceStub
from baton.v1.sampling_pb2 import SamplingParams
from gateway.requests.record import Outcome
from tests.factories.api_keys import ALICE, API_KEYS
from tests.factories.gateway import (
    GatewayUnderTest,
    answering,
    failing,
    gateway_with,
    outputs_of,
    silent,
)

PROMPT = "hello world"
ACCESS = "gateway.telemetry.access_log"


async def complete(under_test: GatewayUnderTest, **headers: str) -> httpx2.Response:
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 3}
    async with under_test.http() as client:
        return await client.post("/v1/completions", json=body, headers=headers)


def access_lines(caplog: pytest.LogCaptureFixture) -> list[Any]:
    return [record for record in caplog.records if record.name == ACCESS]


async def test_a_finished_request_has_one_line_with_its_figures(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "gateway"):
        answer = [5, 6, 7]
        async with gateway_with(folder, {"p0": answering(answer)}, {"d0": answering(answer)}) as under_test:
            response = await complete(under_test, **{"x-request-id": "my-request"})
            assert response.status_code == 200, response.text
            assert response.headers["x-request-id"] == "my-request"
    (line,) = access_lines(caplog)
    assert line.request_id.startswith("my-request-")
    assert (line.caller, line.api, line.outcome, line.error) == (
        "anybody",
        "completions",
        "finished",
        None,
    )
    assert (line.output_tokens, line.attempts, line.path) == (3, 1, "disaggregated")
    assert (line.prefill_worker, line.decode_worker) == ("p0", "d0")
    assert 0.0 < line.ttft_s <= line.total_s
    assert "request_id=my-request-" in line.getMessage()


async def test_a_failed_request_names_the_kind_of_error_and_both_its_ids(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, "gateway"):
        async with gateway_with(
            folder, {}, {"d0": failing(ErrorKind.INTERNAL, "secret words")}, routing_mode="local"
        ) as under_test:
            response = await complete(under_test, **{"x-request-id": "failing"})
            assert response.status_code == 503
    (line,) = access_lines(caplog)
    assert (line.outcome, line.error, line.ttft_s) == (Outcome.FAILED.value, "WorkerUnavailable", None)
    assert line.decode_worker == "d0"
    assert "secret words" not in line.getMessage()
    about = [record for record in caplog.records if hasattr(record, "engine_request_id")]
    assert {record.levelno for record in about} == {logging.DEBUG, logging.INFO, logging.WARNING}
    assert {record.request_id for record in about} == {line.request_id}  # type: ignore[attr-defined]
    assert all(record.engine_request_id.startswith(f"{line.request_id}.") for record in about)


async def test_an_id_that_could_not_stand_in_a_log_is_replaced(folder: Path) -> None:
    async with gateway_with(folder, {}, {}) as under_test, under_test.http() as client:
        for offered in ("x" * 129, "a b", "a\tb", ""):
            response = await client.get("/version", headers={"x-request-id": offered})
            named = response.headers["x-request-id"]
            assert named != offered
            assert len(named) == 32


async def test_grpc_takes_the_id_from_metadata_and_answers_it_as_a_trailer(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "gateway"):
        async with (
            gateway_with(folder, {}, {"d0": answering([5, 6])}, routing_mode="local") as under_test,
            grpc.aio.insecure_channel(under_test.grpc_target) as channel,
        ):
            stub = GenerationServiceStub(channel)
            request = pb.GenerateRequest(text=PROMPT, sampling_params=SamplingParams(max_tokens=2))
            call = stub.Generate(request, metadata=(("x-request-id", "over-grpc"),))
            (request_id,) = {response.request_id async for response in call}
            assert request_id.startswith("over-grpc-")
            assert dict(await call.trailing_metadata())["x-request-id"] == "over-grpc"
            bad = pb.GenerateRequest(text=PROMPT, sampling_params=SamplingParams(temperature=-1.0))
            call = stub.Generate(bad, metadata=(("x-request-id", "refused"),))
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                _ = [response async for response in call]
            assert dict(refused.value.trailing_metadata())["x-request-id"] == "refused"
    (line,) = access_lines(caplog)
    assert line.request_id.startswith("over-grpc-")
    assert line.api == "grpc"


@pytest.mark.parametrize("api", ["http", "grpc"])
async def test_an_id_in_a_header_may_repeat_while_the_first_request_runs(folder: Path, api: str) -> None:
    """A proxy that tries again repeats the id. Here it is the longest id that fits in a log, so nothing cuts it."""
    offered = "retried" + "x" * 121

    async def by_grpc(under_test: GatewayUnderTest) -> str:
        async with grpc.aio.insecure_channel(under_test.grpc_target) as channel:
            request = pb.GenerateRequest(text=PROMPT, sampling_params=SamplingParams(max_tokens=2))
            call = GenerationServiceStub(channel).Generate(request, metadata=(("x-request-id", offered),))
            (request_id,) = {response.request_id async for response in call}
            assert dict(await call.trailing_metadata())["x-request-id"] == offered
            return str(request_id)

    async def by_http(under_test: GatewayUnderTest) -> str:
        response = await complete(under_test, **{"x-request-id": offered})
        assert response.status_code == 200, response.text
        assert response.headers["x-request-id"] == offered
        return str(response.json()["id"])

    ask = by_http if api == "http" else by_grpc
    async with gateway_with(folder, {}, {"d0": silent}, routing_mode="local") as under_test:
        d0 = under_test.workers["d0"]
        asking = [asyncio.create_task(ask(under_test)) for _ in "ab"]
        for request in [await d0.next_request() for _ in asking]:
            d0.say(request, outputs_of(request, [5, 6]))
        ids = await asyncio.gather(*asking)
        assert len(set(ids)) == 2
        assert all("retriedxxx" in request_id for request_id in ids)


@pytest.mark.parametrize("log_prompts", [False, True])
async def test_neither_prompt_nor_answer_nor_key_is_logged_unless_asked(
    folder: Path, caplog: pytest.LogCaptureFixture, log_prompts: bool
) -> None:
    with caplog.at_level(logging.DEBUG):
        answer = [5, 6, 7]
        config: dict[str, Any] = {"api_keys": API_KEYS, "routing_mode": "local"}
        async with gateway_with(
            folder, {}, {"d0": answering(answer)}, log_prompts=log_prompts, **config
        ) as under_test:
            response = await complete(under_test, authorization=f"Bearer {ALICE}")
            assert response.status_code == 200, response.text
            refused = await complete(under_test, authorization="Bearer wrong-key")
            assert refused.status_code == 401
            text = response.json()["choices"][0]["text"]
    ours = [record for record in caplog.records if not record.name.startswith(("httpx", "httpcore"))]
    written = "\n".join(f"{record.getMessage()} {record.__dict__}" for record in ours)
    assert "request_id" in written
    assert (PROMPT in written) == log_prompts
    assert len(text.strip()) > 1
    assert text.strip() not in written
    assert ALICE not in written
    assert "wrong-key" not in written
