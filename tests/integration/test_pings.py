"""Streams that wait for long: clients get pings, which their packages skip, and late errors as events."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import openai
import pytest

from baton.request import ErrorKind, FinishReason
from gateway.http import event_stream
from gateway.http.event_stream import EventSender
from tests.factories.anthropic import anthropic_for
from tests.factories.gateway import GatewayUnderTest, failing, failure_of, gateway_with, outputs_of, silent
from tests.factories.models import make_tokenizer
from tests.factories.openai import openai_for

TOKENIZER = make_tokenizer()
ANSWER = TOKENIZER.encode("The cache is the baton").ids
HELLO: Any = [{"role": "user", "content": "Hello"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO},
    "/v1/completions": {"prompt": "Hello"},
    "/v1/messages": {"messages": HELLO, "max_tokens": len(ANSWER)},
    "/v1/responses": {"input": "Hello"},
}
PING = {
    "/v1/chat/completions": "\n\n",
    "/v1/completions": "\n\n",
    "/v1/messages": 'event: ping\ndata: {"type":"ping"}\n\n',
    "/v1/responses": 'event: keepalive\ndata: {"type":"keepalive","sequence_number":2}\n\n',
}
"""The first ping; in responses, the first after the events with which a stream begins."""
LATE = {
    "/v1/chat/completions": '"message": "messages: does not fit"',
    "/v1/completions": '"message": "prompt: does not fit"',
    "/v1/messages": 'event: error\ndata: {"type": "error"',
    "/v1/responses": "event: response.failed\n",
}
"""What an error after a ping looks like."""


@pytest.fixture
def pinged(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Is set whenever a ping was sent. The first ping comes soon."""
    event, send = asyncio.Event(), EventSender.__call__

    async def noted(sender: EventSender, body: bytes) -> None:
        await send(sender, body)
        if body.decode() in PING.values():
            event.set()

    monkeypatch.setattr(event_stream, "PING_INTERVAL_S", 0.05)
    monkeypatch.setattr(EventSender, "__call__", noted)
    return event


async def answered_after_a_ping(under_test: GatewayUnderTest, pinged: asyncio.Event, *, fails: bool) -> None:
    worker = under_test.workers["d0"]
    request = await worker.next_request()
    async with asyncio.timeout(60):
        await pinged.wait()
    failure = failure_of(request, ErrorKind.INVALID_REQUEST, "prompt: does not fit")
    worker.say(request, [failure] if fails else outputs_of(request, ANSWER, finish=FinishReason.STOP))


async def text_of(under_test: GatewayUnderTest, path: str) -> str:
    async with under_test.http() as client:
        answer = await client.post(path, json={"model": "tiny", "stream": True} | BODIES[path])
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    return str(answer.text)


def check_beginning(path: str, text: str) -> None:
    """Checks that a stream begins with a ping. In /v1/responses, the first events come before it, and all events are
    numbered."""
    beginning, ping, _ = text.partition(PING[path])
    assert ping
    if path != "/v1/responses":
        assert beginning == ""
        return
    events = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line[:5] == "data:"]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:3]] == [
        "response.created",
        "response.in_progress",
        "keepalive",
    ]
    assert beginning.count("event: ") == 2


async def text_after_a_ping(folder: Path, path: str, pinged: asyncio.Event, *, fails: bool) -> str:
    async with gateway_with(folder, {}, {"d0": silent}) as under_test:
        stream = asyncio.create_task(text_of(under_test, path))
        await answered_after_a_ping(under_test, pinged, fails=fails)
        text = await stream
    check_beginning(path, text)
    return text


@pytest.mark.parametrize("path", BODIES)
async def test_a_stream_that_waits_gets_pings(folder: Path, path: str, pinged: asyncio.Event) -> None:
    text = await text_after_a_ping(folder, path, pinged, fails=False)
    events = [event for event in text.split("\n\n") if event]
    assert "baton" in text
    assert all("data: " in event for event in events), "no ping is within an event"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_a_ping_has_no_text_that_a_load_generator_could_take_for_an_event(
    folder: Path, path: str, pinged: asyncio.Event
) -> None:
    text = await text_after_a_ping(folder, path, pinged, fails=False)
    assert all(line.startswith("data: ") for line in text.splitlines() if line)


@pytest.mark.parametrize("path", BODIES)
async def test_an_error_after_a_ping_is_an_event(folder: Path, path: str, pinged: asyncio.Event) -> None:
    text = await text_after_a_ping(folder, path, pinged, fails=True)
    assert LATE[path] in text
    assert "[DONE]" not in text


@pytest.mark.parametrize("path", BODIES)
async def test_an_error_at_once_has_its_status(folder: Path, path: str) -> None:
    script = failing(ErrorKind.INVALID_REQUEST, "prompt: does not fit")
    async with gateway_with(folder, {}, {"d0": script}) as under_test, under_test.http() as client:
        answer = await client.post(path, json={"model": "tiny", "stream": True} | BODIES[path])
    assert answer.status_code == 400, answer.text


async def chat(client: openai.AsyncOpenAI) -> str:
    stream = await client.chat.completions.create(model="tiny", messages=HELLO, stream=True)
    return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])


async def completion(client: openai.AsyncOpenAI) -> str:
    stream = await client.completions.create(model="tiny", prompt="Hello", stream=True)
    return "".join([chunk.choices[0].text async for chunk in stream])


async def response(client: openai.AsyncOpenAI) -> str:
    async with client.responses.stream(model="tiny", input="Hello") as stream:
        return (await stream.get_final_response()).output_text


async def message(client: anthropic.AsyncAnthropic) -> str:
    async with client.messages.stream(model="tiny", messages=HELLO, max_tokens=len(ANSWER)) as stream:
        return await stream.get_final_text()


@pytest.mark.parametrize("call", [chat, completion, response, message])
async def test_the_packages_of_clients_read_past_pings(
    folder: Path, call: Any, pinged: asyncio.Event
) -> None:
    connect: Any = anthropic_for if call is message else openai_for
    async with gateway_with(folder, {}, {"d0": silent}) as under_test, connect(under_test) as client:
        stream = asyncio.create_task(call(client))
        await answered_after_a_ping(under_test, pinged, fails=False)
        assert (await stream).strip() == "The cache is the baton"


@pytest.mark.parametrize("call", [chat, completion, message])
async def test_the_packages_of_clients_raise_an_error_after_a_ping(
    folder: Path, call: Any, pinged: asyncio.Event
) -> None:
    connect: Any = anthropic_for if call is message else openai_for
    async with gateway_with(folder, {}, {"d0": silent}) as under_test, connect(under_test) as client:
        stream = asyncio.create_task(call(client))
        await answered_after_a_ping(under_test, pinged, fails=True)
        with pytest.raises((openai.APIError, anthropic.APIError), match="does not fit"):
            await stream


async def test_a_client_that_leaves_between_pings_ends_its_request(
    folder: Path, pinged: asyncio.Event
) -> None:
    async def first_ping(under_test: GatewayUnderTest) -> AsyncIterator[str]:
        body = {"model": "tiny", "stream": True} | BODIES["/v1/messages"]
        async with (
            httpx2.AsyncClient(base_url=under_test.http_url, timeout=60.0) as client,
            client.stream("POST", "/v1/messages", json=body) as answer,
        ):
            async for line in answer.aiter_lines():
                yield line

    async with gateway_with(folder, {}, {"d0": silent}) as under_test:
        lines = first_ping(under_test)
        assert await anext(lines) == "event: ping"
        request = await under_test.workers["d0"].next_request()
        await lines.aclose()  # type: ignore[attr-defined]
        assert await under_test.workers["d0"].next_abort() == request.request_id
