"""Clients that do not read: their workers finish all the same, and the data that waits for the clients is bounded."""

import asyncio
import json
import socket
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from http.client import HTTPResponse
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from baton.errors import RequestAborted, SlowReader
from baton.request import EngineRequest, FinishReason
from baton.sampling import SamplingParams
from gateway import turn_budget
from gateway.auth.callers import ANYBODY
from gateway.choices import PORTION_TOKENS
from gateway.grpc.generated import vllm_engine_pb2 as vllm_pb
from gateway.grpc.generated.vllm_engine_pb2_grpc import VllmEngineStub
from gateway.http.small_writes import WRITE_BYTES
from gateway.requests.request import Delta, GatewayRequest
from gateway.text import TextStream, Tokenizer
from tests.factories.gateway import GatewayUnderTest, answering, gateway_with, outputs_of, silent

MAX_UNREAD = 20


def generation_of(folder: Path, *stop: str) -> GatewayRequest:
    params = SamplingParams(max_tokens=100, stop=stop)
    text = TextStream(Tokenizer(folder).backend, params.stop, 0, True)
    return GatewayRequest(request_id="slow", prompt_token_ids=(5, 6, 7), sampling_params=params, text=text)


def num_sub_requests(under_test: GatewayUnderTest) -> int:
    return sum(under_test.gateway._driver.router.num_sub_requests.values())


@asynccontextmanager
async def unread_answer(
    folder: Path, *stop: str, **settings: Any
) -> AsyncIterator[tuple[GatewayUnderTest, EngineRequest, AsyncGenerator[Delta]]]:
    """A request on the worker w0, whose client has read its first token, 5, and nothing since."""
    async with gateway_with(folder, {}, {"w0": silent}, **settings) as under_test:
        deltas = under_test.gateway._driver.generate(generation_of(folder, *stop))
        first = asyncio.ensure_future(anext(deltas))
        request = await under_test.workers["w0"].next_request()
        under_test.workers["w0"].say(request, outputs_of(request, [5], finish=None))
        assert (await first).token_ids == (5,)
        yield under_test, request, deltas


async def test_a_worker_finishes_a_request_that_its_client_does_not_read(folder: Path) -> None:
    """The outputs that wait for the client come as one."""
    async with unread_answer(folder, max_unread_tokens=MAX_UNREAD) as (under_test, request, deltas):
        w0 = under_test.workers["w0"]
        w0.say(request, outputs_of(request, [6, 7], start=1, finish=None))
        w0.say(request, outputs_of(request, [8, 9], start=3, finish=FinishReason.LENGTH))
        await under_test.until(lambda: num_sub_requests(under_test) == 0)
        rest = [delta async for delta in deltas]
        assert [delta.token_ids for delta in rest] == [(6, 7, 8, 9)]
        assert rest[0].finish is not None
        assert rest[0].finish.num_completion_tokens == 5


async def test_outputs_that_arrive_while_the_gateway_is_busy_are_sent_together(folder: Path) -> None:
    """So a busy gateway has less work, although every client reads at once."""
    num_messages = 30
    async with unread_answer(folder) as (under_test, request, deltas):
        w0 = under_test.workers["w0"]
        rest = asyncio.ensure_future(_all(deltas))
        await asyncio.sleep(0)
        for position in range(1, num_messages + 1):
            finish = FinishReason.LENGTH if position == num_messages else None
            w0.say(request, outputs_of(request, [6], position, finish))
        time.sleep(0.3)  # noqa: ASYNC251 - the gateway's event loop stands still
        read = await rest
        assert sum(len(delta.token_ids) for delta in read) == num_messages
        assert len(read) < num_messages


async def test_many_tokens_that_wait_are_sent_in_portions_over_every_api(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the events of one stream do not hold up others, even with log-probabilities."""
    monkeypatch.setattr(
        turn_budget, "TURN_S", 60.0
    )  # on a slow machine, a turn ends before a portion is full
    token_ids = [6, 7] * (2 * PORTION_TOKENS)
    async with gateway_with(folder, {}, {"w0": answering(token_ids)}, max_model_len=2_000) as under_test:
        options = {"include_usage": True, "continuous_usage_stats": True}
        body = {"prompt": "Hello", "max_tokens": len(token_ids), "stream": True, "stream_options": options}
        async with under_test.http() as client:
            lines = (await client.post("/v1/completions", json={"model": "tiny", **body})).text.split("\n")
        chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
        so_far = [0, *(chunk["usage"]["completion_tokens"] for chunk in chunks)]
        over_http = [after - before for before, after in pairwise(so_far)]
        answer = await under_test.ask(sampling={"max_tokens": len(token_ids)})
        over_grpc = [len(event.token_ids) for event in answer]
        async with grpc.aio.insecure_channel(under_test.grpc_target) as channel:
            params = vllm_pb.SamplingParams(max_tokens=len(token_ids))
            request = vllm_pb.GenerateRequest(
                request_id="r", text="Hello", sampling_params=params, stream=True
            )
            responses = [each async for each in VllmEngineStub(channel).Generate(request)]
        of_vllm = [len(response.chunk.token_ids) for response in responses]
        for sizes in (over_http, over_grpc, of_vllm):
            assert sum(sizes) == len(token_ids)
            assert max(sizes) == PORTION_TOKENS


async def _all(deltas: AsyncIterator[Delta]) -> list[Delta]:
    return [delta async for delta in deltas]


async def test_a_stop_string_ends_a_request_that_its_client_does_not_read(folder: Path) -> None:
    stop = Tokenizer(folder).backend.decode([9])
    async with unread_answer(folder, stop) as (under_test, request, deltas):
        w0 = under_test.workers["w0"]
        w0.say(request, outputs_of(request, [8, 9, 8, 8], start=1, finish=None))
        assert await w0.next_abort() == request.request_id
        assert num_sub_requests(under_test) == 0
        assert [delta.finish.matched_stop async for delta in deltas if delta.finish] == [stop]


async def test_a_client_that_reads_too_slowly_is_ended_and_nothing_is_kept_for_it(folder: Path) -> None:
    async with unread_answer(folder, max_unread_tokens=MAX_UNREAD) as (under_test, request, deltas):
        w0 = under_test.workers["w0"]
        w0.say(request, outputs_of(request, [6] * (MAX_UNREAD + 1), start=1, finish=None))
        assert await w0.next_abort() == request.request_id
        assert num_sub_requests(under_test) == 0
        with pytest.raises(SlowReader, match=f"{MAX_UNREAD + 1} tokens of its answer wait"):
            await anext(deltas)
        assert under_test.dispatcher.tally.counters["aborted"] == 1


async def test_an_aborted_request_that_its_client_does_not_read_ends_at_its_worker(folder: Path) -> None:
    async with unread_answer(folder) as (under_test, request, deltas):
        w0 = under_test.workers["w0"]
        assert under_test.gateway._driver.abort("slow", ANYBODY)
        assert await w0.next_abort() == request.request_id
        with pytest.raises(RequestAborted, match="request slow was aborted"):
            await anext(deltas)


async def test_c58_a_large_body_that_is_not_read_is_held_in_part(folder: Path) -> None:
    """The file needs no key, so any number of clients may ask for it."""
    path = "/docs/swagger-ui-bundle.js"
    async with gateway_with(folder, {}, {}) as under_test:
        async with under_test.http() as client:
            whole = (await client.get(path)).content
        assert len(whole) > 4 * WRITE_BYTES
        assert under_test.gateway._http is not None
        http_server = under_test.gateway._http._server
        await under_test.until(lambda: not http_server._connections)
        with socket.socket() as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            slow.settimeout(60.0)
            slow.connect(("127.0.0.1", under_test.gateway.http_port))
            slow.sendall(f"GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())
            await under_test.until(lambda: any(each.flow.write_paused for each in http_server._connections))
            (connection,) = http_server._connections
            assert connection.transport.get_write_buffer_size() <= WRITE_BYTES
            with HTTPResponse(slow) as response:
                await asyncio.to_thread(response.begin)
                assert await asyncio.to_thread(response.read) == whole
