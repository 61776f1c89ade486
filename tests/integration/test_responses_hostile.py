"""Bodies that are meant to hurt: bounded work, one clear error, and the gateway serves others meanwhile."""

import asyncio
import json
import socket
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx2
import pytest

from baton.request import FinishReason
from baton.system.tasks import end_tasks
from gateway.http.request_limits import MAX_BODIES
from gateway.text import TokenizerPool
from tests.factories.api_keys import ALICE, API_KEYS, AS_ADMIN, BOB
from tests.factories.gateway import GatewayUnderTest, Script, gateway_with, outputs_of, silent
from tests.factories.models import make_tokenizer

ANSWER = make_tokenizer().encode("The cache is the baton").ids
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": False}
SAYS: Script = lambda request: outputs_of(request, ANSWER, finish=FinishReason.STOP)  # noqa: E731
LONGEST_PAUSE_S = 10.0
"""Generous, since tests run beside others. What would block the loop takes minutes."""


def nested(depth: int) -> Any:
    value: Any = "x"
    for _ in range(depth):
        value = {"a": value}
    return value


BODIES: dict[str, dict[str, Any]] = {
    "too many items": {"input": [{"role": "user", "content": "x"}] * 5000},
    "too many parts": {"input": [{"role": "user", "content": [{"type": "input_text", "text": "x"}] * 2000}]},
    "too many tools": {"input": "x", "tools": [TOOL | {"name": f"f{n}"} for n in range(2000)]},
    "a deep schema": {"input": "x", "tools": [TOOL | {"parameters": nested(100)}]},
    "unknown items": {"input": [{"type": f"t{n}"} for n in range(4000)]},
    "references to many responses": {"input": [{"id": f"msg_{n}_0"} for n in range(4000)]},
    "calls without results, results without calls": {
        "input": [
            {"type": "function_call", "call_id": f"{n}", "name": "f", "arguments": "{"} for n in range(2000)
        ]
        + [{"type": "function_call_output", "call_id": "no", "output": "x"}]
    },
    "an id that is long": {"input": "x", "previous_response_id": "resp_" + "x" * 10_000},
    "an id with everything": {"input": "x", "previous_response_id": "resp_\u0000/../{}*\n\r:'\""},
    "a text that fits nowhere": {"input": "x" * 4_000_000},
    "many texts that fit nowhere": {
        "input": [{"role": "user", "content": "x" * 1000}] * 4000,
        "truncation": "auto",
    },
}


async def longest_pause(under_test: GatewayUnderTest, call: Any) -> tuple[Any, float]:
    """The answer of `call`, and how long another caller's probe waited at most."""
    longest = 0.0

    async def probe() -> None:
        nonlocal longest
        async with under_test.http() as client:
            while True:
                began = time.monotonic()
                await client.get("/health")
                longest = max(longest, time.monotonic() - began)
                await asyncio.sleep(0.01)

    probing = asyncio.create_task(probe())
    try:
        return await call, longest
    finally:
        probing.cancel()


async def post(under_test: GatewayUnderTest, body: dict[str, Any], path: str = "") -> httpx2.Response:
    async with under_test.http() as client:
        return await client.post(f"/v1/responses{path}", json={"model": "tiny"} | body)


@pytest.mark.parametrize("name", BODIES)
async def test_a_hostile_body_is_one_error_and_no_pause(folder: Path, name: str) -> None:
    async with gateway_with(folder, {}, {"d0": SAYS}) as under_test:
        for path in ("", "/input_tokens"):
            answer, longest = await longest_pause(under_test, post(under_test, BODIES[name], path))
            assert answer.status_code in (400, 404), answer.text[:300]
            assert len(answer.content) < 2000
            assert answer.json()["error"]["param"]
            assert longest < LONGEST_PAUSE_S
        assert (await post(under_test, {"input": "Hello"})).status_code == 200


async def test_as_many_tools_as_are_allowed(folder: Path) -> None:
    """Their prompt is too long for this model. The answer says so, as for any prompt."""
    tools = [TOOL | {"name": f"f{n}"} for n in range(1024)]
    async with gateway_with(folder, {}, {"d0": SAYS}) as under_test:
        answer, longest = await longest_pause(under_test, post(under_test, {"input": "x", "tools": tools}))
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "context_length_exceeded"
        assert longest < LONGEST_PAUSE_S


async def test_a_chain_that_grows_ends_with_an_error_and_no_more_memory(folder: Path) -> None:
    async with gateway_with(folder, {}, {"d0": SAYS}, max_message_mib=1, max_model_len=8192) as under_test:
        previous, status = None, 200
        for _ in range(40):
            answer = await post(under_test, {"input": "x" * 900, "previous_response_id": previous})
            status = answer.status_code
            if status != 200:
                break
            previous = answer.json()["id"]
        assert status == 400
        assert answer.json()["error"]["param"] == "input"
        assert answer.json()["error"]["code"] == "context_length_exceeded"


async def test_small_requests_that_continue_a_long_response_are_bounded_together(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None of these requests is answered yet. Another caller is served meanwhile."""
    goes_on = asyncio.Event()
    tokenized = TokenizerPool.encode_chat

    async def encode_chat(*arguments: Any, **options: Any) -> tuple[int, ...]:
        await goes_on.wait()
        return await tokenized(*arguments, **options)

    config: dict[str, Any] = {"api_keys": API_KEYS, "credentials": AS_ADMIN, "max_message_mib": 1}
    alice, bob = ({"authorization": f"Bearer {key}"} for key in (ALICE, BOB))
    turns = [{"role": "user", "content": "x" * 900_000}, {"role": "user", "content": "x"}]
    async with (
        gateway_with(folder, {}, {"d0": SAYS}, **config) as under_test,
        under_test.http(headers=alice) as client,
    ):
        first = await client.post(
            "/v1/responses", json={"model": "tiny", "truncation": "auto", "input": turns}
        )
        more = {"model": "tiny", "input": "x", "previous_response_id": first.json()["id"]}
        monkeypatch.setattr(TokenizerPool, "encode_chat", encode_chat)
        paths = ("/v1/responses", "/v1/responses/input_tokens")
        calls = [asyncio.create_task(client.post(paths[n % 2], json=more)) for n in range(MAX_BODIES + 8)]
        (refused, *_), _ = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
        assert (refused.result().status_code, refused.result().headers["retry-after"]) == (429, "1")
        assert "Stored responses that they continue or read count, too" in refused.result().text
        async with under_test.http(headers=bob) as other:
            assert (await other.post("/tokenize", json={"prompt": "hi"})).status_code == 200
        goes_on.set()
        statuses = [(await call).status_code for call in calls]
        assert 30 < statuses.count(400) < MAX_BODIES + 8, "too long for the model"
        assert statuses.count(400) + statuses.count(429) == len(calls)
        again = await client.post("/v1/responses", json=more | {"truncation": "auto"})
        assert again.status_code == 200, "there is room again"


async def test_items_that_are_not_in_the_prompt_are_bounded_together_while_their_responses_run(
    folder: Path,
) -> None:
    """A response keeps all items of its request in memory until its end, since they will be stored."""
    turns = [{"role": "user", "content": "x" * 900_000}, {"role": "user", "content": "x"}]
    body = {"model": "tiny", "truncation": "auto", "input": turns}
    async with gateway_with(folder, {}, {"d0": silent}, max_message_mib=1) as under_test:

        async def begin(**fields: Any) -> "asyncio.Task[httpx2.Response]":
            num_running = under_test.dispatcher.num_in_flight
            call = asyncio.create_task(post(under_test, body | fields))
            await under_test.until(lambda: call.done() or under_test.dispatcher.num_in_flight > num_running)
            return call

        calls = [await begin()]
        while not calls[-1].done():
            assert len(calls) < MAX_BODIES + 8, "all of them run"
            calls.append(await begin())
        refused = calls.pop().result()
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert "may have bodies of at most 33554432 bytes together" in refused.text
        assert len(calls) > MAX_BODIES - 4
        calls.append(await begin(store=False))
        calls.append(await begin(input="x"))
        assert not any(call.done() for call in calls)
        await end_tasks(*calls)
        await under_test.until(lambda: not under_test.dispatcher.num_in_flight)
        again = await begin()
        assert not again.done(), "there is room again"
        await end_tasks(again)
        await under_test.until(lambda: not under_test.dispatcher.num_in_flight)


async def test_a_response_that_was_cancelled_is_not_refused_for_lack_of_room(folder: Path) -> None:
    part = b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    part += b"content-length: %d\r\n\r\n" % 2**20 + b" " * (2**20 - 1)
    async with (
        gateway_with(folder, {}, {"d0": silent}, max_message_mib=1) as under_test,
        under_test.http() as client,
    ):
        call = asyncio.create_task(client.post("/v1/responses", json={"model": "tiny", "input": "x"}))
        request = await under_test.workers["d0"].next_request()
        path = f"/v1/responses/resp_{request.request_id.partition('.')[0]}/cancel"
        with ExitStack() as stack:
            for _ in range(MAX_BODIES):
                slow = stack.enter_context(
                    socket.create_connection(("127.0.0.1", under_test.gateway.http_port), timeout=60.0)
                )
                await asyncio.to_thread(slow.sendall, part)
            while (await client.post("/tokenize", json={"prompt": "x" * 100})).status_code != 429:
                await asyncio.sleep(0.01)
            cancelled = await client.post(path)
        assert (cancelled.status_code, cancelled.json()["status"]) == (200, "cancelled")
        assert (await call).status_code == 410


async def test_long_answers_about_stored_responses_that_are_not_read_are_bounded_together(
    folder: Path,
) -> None:
    turns = [{"role": "user", "content": "x" * 900_000}, {"role": "user", "content": "x"}]
    async with gateway_with(folder, {}, {"d0": SAYS}, max_message_mib=1) as under_test:
        made = await post(under_test, {"input": turns, "truncation": "auto"})
        path = f"/v1/responses/{made.json()['id']}/input_items"
        statuses = []
        with ExitStack() as stack:
            for _ in range(MAX_BODIES + 8):
                slow = stack.enter_context(socket.socket())
                slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                slow.settimeout(60.0)
                slow.connect(("127.0.0.1", under_test.gateway.http_port))
                slow.sendall(f"GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())
                statuses.append((await asyncio.to_thread(slow.recv, 12))[-3:])
        assert 30 < statuses.count(b"200") < MAX_BODIES + 8
        assert statuses.count(b"200") + statuses.count(b"429") == len(statuses)
        async with under_test.http() as client, asyncio.timeout(60):
            while (again := await client.get(path, params={"order": "asc"})).status_code == 429:
                await asyncio.sleep(0.01)  # until the gateway has noticed that the slow clients are gone
        assert [item["content"][0]["text"] for item in again.json()["data"]] == [
            turn["content"] for turn in turns
        ]


async def test_paths_with_anything_in_them_are_unknown(folder: Path) -> None:
    async with (
        gateway_with(folder, {}, {"d0": SAYS}) as under_test,
        httpx2.AsyncClient(timeout=60.0) as client,
    ):
        for name in ("resp_", "resp_%00", "%2e%2e", "resp_*", "resp_%0a%0d", "x" * 4000, "%F0%9F%98%80"):
            for method, end in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")):
                answer = await client.request(method, f"{under_test.http_url}/v1/responses/{name}{end}")
                assert answer.status_code == 404, (method, name, end, answer.text)
                assert json.loads(answer.content)["error"]["type"] == "not_found_error"
