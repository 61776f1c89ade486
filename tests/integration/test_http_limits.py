"""Limits of the HTTP frontend over real sockets: sizes, times, malformed HTTP and JSON, each with its status."""

import asyncio
import json
import re
import socket
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import h11
import pytest

from gateway.http.request_limits import MAX_BODIES
from tests.factories.api_keys import ALICE, API_KEYS, BOB
from tests.factories.gateway import GatewayUnderTest, gateway_with, silent

MIB = 2**20
HEAD = b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"


@asynccontextmanager
async def connection(
    under_test: GatewayUnderTest,
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    port = under_test.gateway.http_port
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        async with asyncio.timeout(60):
            yield reader, writer
    finally:
        writer.close()


async def ask(under_test: GatewayUnderTest, data: bytes) -> tuple[int, dict[str, Any]]:
    """Status and error of the answer to these bytes.

    The gateway may close the connection before it has read all of them. A StreamReader would then raise an
    error instead of returning the answer that has arrived.
    """
    loop, received = asyncio.get_running_loop(), b""
    with socket.create_connection(("127.0.0.1", under_test.gateway.http_port), timeout=60) as client:
        client.setblocking(False)
        async with asyncio.timeout(60):
            await loop.sock_sendall(client, data)
            while not is_whole(received):
                received += (news := await loop.sock_recv(client, 65536))
                assert news, received
    reader = asyncio.StreamReader()
    reader.feed_data(received)
    return await answer_of(reader)


def is_whole(answer: bytes) -> bool:
    head, _, body = answer.partition(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", head.lower())
    return length is not None and len(body) == int(length[1])


async def answer_of(reader: asyncio.StreamReader) -> tuple[int, dict[str, Any]]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    length = next(line.split(":")[1] for line in head.split("\r\n") if line.startswith("content-length"))
    return int(head.split()[1]), json.loads(await reader.readexactly(int(length)))["error"]


def with_body(body: bytes, *headers: bytes) -> bytes:
    return (
        HEAD
        + b"".join(b"%s\r\n" % header for header in headers)
        + b"content-length: %d\r\n\r\n" % len(body)
        + body
    )


CASES: list[tuple[str, bytes, int, str]] = [
    ("announced too large", HEAD + b"content-length: 999999999\r\n\r\n", 413, "1048576 bytes"),
    ("announced in digits beyond any number", HEAD + b"content-length: %s\r\n\r\n" % (b"9" * 5000), 400, ""),
    (
        "too large in chunks",
        HEAD + b"transfer-encoding: chunked\r\n\r\n" + (b"10000\r\n" + b" " * 2**16 + b"\r\n") * 17,
        413,
        "1048576 bytes",
    ),
    ("headers too large", HEAD + b"x: " + b"y" * 40_000 + b"\r\n\r\n", 431, "32768 bytes"),
    (
        "a long address",
        b"GET /" + b"x" * 40_000 + b" HTTP/1.1\r\nhost: localhost\r\n\r\n",
        431,
        "32768 bytes",
    ),
    ("headers without an end", HEAD + b"x: y\r\n" * 500_000, 431, "HTTP/1.1"),
    ("no HTTP", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400, "HTTP/1.1"),
    ("a header without a colon", b"GET /health HTTP/1.1\r\nhost\r\n\r\n", 400, "HTTP/1.1"),
    ("both ways to say a length", with_body(b"{}", b"transfer-encoding: chunked"), 400, "not both"),
    (
        "no content type",
        HEAD.replace(b"content-type", b"x-other") + b"content-length: 2\r\n\r\n{}",
        415,
        "JSON",
    ),
    ("a form", with_body(b"prompt=hi").replace(b"application/json", b"multipart/form-data"), 415, "JSON"),
    ("no body", with_body(b""), 400, "missing"),
    ("not JSON", with_body(b"prompt: hi"), 400, "invalid JSON"),
    ("NaN", with_body(b'{"prompt": NaN}'), 400, "expected value at line 1 column 12"),
    ("a key twice", with_body(b'{"prompt": "a", "prompt": "b"}'), 400, "'prompt' appears twice"),
    ("half a surrogate pair", with_body(b'{"prompt": "\\ud83d"}'), 400, "surrogate"),
    ("not UTF-8", with_body(b'{"prompt": "\xff"}'), 400, "must be UTF-8"),
    ("a bomb", with_body(b"[" * 100_000), 400, "more than 64 levels deep"),
    ("compressed", with_body(b"{}", b"content-encoding: gzip"), 415, "content-encoding, got 'gzip'"),
    (
        "not JSON, and the client asks first whether to send it",
        b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-type: text/plain\r\n"
        b"expect: 100-continue\r\ncontent-length: 9\r\n\r\n",
        415,
        "text/plain",
    ),
    ("no object", with_body(b'"prompt"'), 400, "must be a JSON object"),
    ("an unknown field", with_body(b'{"prompt": "a", "promt": "b"}'), 400, "promt: unknown field"),
]


async def test_each_limit_and_each_mistake_has_its_status_and_its_reason(folder: Path) -> None:
    async with gateway_with(folder, {}, {}, max_message_mib=1) as under_test:
        for name, data, status, reason in CASES:
            found, error = await ask(under_test, data)
            assert (name, found) == (name, status), error
            assert reason in error["message"], name
            assert set(error) == {"message", "type", "param", "code"}, name
        async with under_test.http() as client:
            large = await client.post("/tokenize", json={"prompt": "x" * (MIB - 100)})
            assert "characters exceed the model's limit" in large.json()["error"]["message"]
            for body in ({"x" * (MIB - 100): 1}, {"prompt": "a", "model": "x" * (MIB - 100)}):
                refused = await client.post("/tokenize", json=body)
                assert refused.status_code in (400, 404)
                assert len(refused.content) < 6000
            too_large = await client.post("/tokenize", json={"prompt": "x" * (4 * MIB)})
            assert too_large.status_code == 413
            assert (await client.post("/tokenize", json={"prompt": "hi"})).status_code == 200


@pytest.mark.parametrize("path", [b"/tokenize", b"/health", b"/v1/messages"])
async def test_nothing_is_served_after_a_body_with_two_lengths(folder: Path, path: bytes) -> None:
    """To a proxy that uses the other length, the next request would be a part of this body."""
    two_lengths = (
        HEAD.replace(b"/tokenize", path) + b"transfer-encoding: chunked\r\ncontent-length: 5\r\n\r\n"
    )
    hidden = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
    async with gateway_with(folder, {}, {}, api_keys=API_KEYS) as under_test:
        async with connection(under_test) as (reader, writer):
            writer.write(two_lengths + b"2\r\n{}\r\n0\r\n\r\n" + hidden)
            answered = await reader.read()
        assert answered.startswith(b"HTTP/1.1 400 ")
        assert answered.count(b"HTTP/1.1 ") == 1
        assert b"\r\nconnection: close\r\n" in answered
        assert b"set either content-length or transfer-encoding, not both" in answered


async def test_a_body_that_is_malformed_at_once_has_one_answer(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The refusal of its type is under way when its first chunk turns out to have no size."""
    head = HEAD.replace(b"application/json", b"text/plain") + b"transfer-encoding: chunked\r\n\r\n"
    async with gateway_with(folder, {}, {"w0": silent}) as under_test:
        async with connection(under_test) as (reader, writer):
            writer.write(head + b"no size\r\n")
            answered = (await reader.read()).decode()
        assert answered.count("HTTP/1.1 4") == 1
        assert answered.startswith("HTTP/1.1 400 ")
        await asyncio.sleep(0)
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


async def test_a_body_that_does_not_arrive_ends_its_request(folder: Path) -> None:
    with patch("gateway.http.request_limits.BODY_TIMEOUT_S", 0.2):
        async with gateway_with(folder, {}, {}) as under_test:
            status, error = await ask(under_test, HEAD + b"content-length: 10\r\n\r\n{")
            assert (status, error["type"]) == (408, "invalid_request_error")
            assert "within 0.2 s" in error["message"]


async def test_the_bodies_of_one_caller_are_bounded_together(folder: Path) -> None:
    """Each body is within its limit, and none of them ends. Another caller's requests are served meanwhile."""
    authorization = [b"authorization: Bearer " + key.encode() for key in (ALICE, BOB)]
    part = HEAD + authorization[0] + b"\r\ncontent-length: %d\r\n\r\n" % MIB + b" " * (MIB - 1)
    config: dict[str, Any] = {"api_keys": API_KEYS, "max_message_mib": 1}
    async with gateway_with(folder, {}, {}, **config) as under_test, AsyncExitStack() as stack:
        held = [await stack.enter_async_context(connection(under_test)) for _ in range(MAX_BODIES + 1)]
        for _, writer in held:
            writer.write(part)
        answers = {asyncio.create_task(answer_of(reader)): writer for reader, writer in held}
        (refused,), _ = await asyncio.wait(answers, return_when=asyncio.FIRST_COMPLETED)
        status, error = await refused
        assert (status, error["code"]) == (429, "rate_limit_exceeded")
        assert "at most 33554432 bytes together (32 x gateway.max_message_mib)" in error["message"]
        assert (await ask(under_test, with_body(b"{}", authorization[1])))[0] == 400
        for answer, writer in answers.items():
            if answer is not refused:
                writer.write(b" ")
                assert (await answer)[0] == 400, "the body is blank"
        assert (await ask(under_test, part + b" "))[0] == 400, "there is room again"


async def test_connections_that_owe_a_request_are_cut_off_and_those_that_wait_for_an_answer_are_not(
    folder: Path,
) -> None:
    async def ends(under_test: GatewayUnderTest, data: bytes) -> bool:
        async with connection(under_test) as (reader, writer):
            writer.write(data)
            async with asyncio.timeout(60):
                while await reader.read(1000):
                    pass
            return True

    with patch("gateway.http.protocol.REQUEST_TIMEOUT_S", 1.0):
        async with gateway_with(folder, {}, {"w0": silent}) as under_test:
            assert await ends(under_test, b"")
            assert await ends(under_test, b"GET /health HTTP/1.1\r\nhost: ")
            assert await ends(under_test, b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\nGET /hea")
            # The request is answered before its body has arrived. The body never arrives.
            assert await ends(under_test, HEAD + b"content-length: 999999999\r\n\r\n{")
            body = json.dumps({"model": "tiny", "prompt": "hi", "max_tokens": 2}).encode()
            waits = with_body(body).replace(b"/tokenize", b"/v1/completions")
            async with connection(under_test) as (reader, writer):
                writer.write(waits)
                await under_test.workers["w0"].next_request()
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(1.5):
                        await reader.read(1)
            await under_test.workers["w0"].next_abort()
            async with connection(under_test) as (reader, writer):
                for _ in "ab":
                    writer.write(with_body(b'{"prompt": "hi"}')[:-1])
                    writer.write(b"}")
                    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
                    await reader.readuntil(b"}")
                    await asyncio.sleep(1.2)  # longer than a request may take to come


@pytest.mark.parametrize(
    ("key", "status", "num_connections"),
    [(ALICE, 200, 1), ("baton-nobody", 401, 1), ("baton-nobody", 401, 8)],
)
async def test_c58_tiny_chunks_are_read_in_many_turns_of_the_loop(
    folder: Path, monkeypatch: pytest.MonkeyPatch, key: str, status: int, num_connections: int
) -> None:
    """Other calls are served between the turns, also while the rest of a refused body is read."""
    loop, next_event, turn, chunks = asyncio.get_running_loop(), h11.Connection.next_event, 0, Counter[int]()
    is_over = False

    def begin_turn() -> None:
        nonlocal turn
        turn += 1
        if not is_over:
            loop.call_soon(begin_turn)

    def counted(parser: h11.Connection) -> Any:
        event = next_event(parser)
        chunks[turn] += isinstance(event, h11.Data)
        return event

    body = b" " * (20_000 // num_connections) + b'{"prompt": "hi"}'
    head = HEAD + b"authorization: Bearer %s\r\ntransfer-encoding: chunked\r\n\r\n" % key.encode()
    in_chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
    next_request = b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"

    async def ask() -> bytes:
        async with connection(under_test) as (reader, writer):
            writer.write(head + in_chunks + next_request)
            return await reader.read()

    async with gateway_with(folder, {}, {}, api_keys=API_KEYS) as under_test:
        monkeypatch.setattr(h11.Connection, "next_event", counted)
        begin_turn()
        answers = await asyncio.gather(*(ask() for _ in range(num_connections)))
        is_over = True
    for answered in answers:
        assert answered.startswith(b"HTTP/1.1 %d " % status)
        assert b'{"status":"ok"}' in answered, "the next request of the connection"
    assert chunks.total() == num_connections * len(body)
    per_turn = sorted(number for number in chunks.values() if number)
    assert per_turn[len(per_turn) // 2] <= 128
    assert per_turn[-1] <= 256 * num_connections
