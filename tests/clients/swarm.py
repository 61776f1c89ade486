"""A swarm of clients that stop reading, vanish or cancel, over HTTP and gRPC; and what a gateway holds.

Half of each kind speak HTTP, over raw sockets that read nothing ahead; the other half speak gRPC.
"""

import asyncio
import gc
import json
import os
import socket
import struct
from collections.abc import Callable, Coroutine
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from baton.request import EngineRequest, FinishReason, RequestOutput, TokenLogprobs
from gateway import GatewayClient, GatewayError
from gateway.requests.request_state import RequestState
from tests.factories.gateway import GatewayUnderTest

LONG = 200
"""Tokens of an unread answer: with logprobs, more than sockets and streams hold."""
SHORT = 50
MAX_CONCURRENT_CALLS = 100
"""Of those that wait for an answer to begin, so that none is refused because too many prompts come at once."""
STREAMS_EACH = 10
"""Of those that vanish by gRPC, so many have one connection."""
TOP = tuple((token_id, -1.0 - token_id) for token_id in range(20))


def script(request: EngineRequest) -> list[RequestOutput]:
    """Sends long answers whole and at once. Of short answers, it sends only the beginning."""
    is_long = request.sampling_params.max_tokens > SHORT
    token_ids = (5,) * (LONG if is_long else 3)
    output = RequestOutput(
        request_id=request.request_id,
        first_position=0,
        token_ids=token_ids,
        logprobs=tuple(TokenLogprobs(5, -0.5, 1, TOP) for _ in token_ids),
        finish_reason=FinishReason.LENGTH if is_long else None,
    )
    return [output]


@dataclass(frozen=True, slots=True)
class Held:
    """What the process holds."""

    rss_mib: float
    num_files: int
    num_tasks: int
    num_runs: int
    num_sub_requests: int


async def held_by(under_test: GatewayUnderTest) -> Held:
    num_runs = await asyncio.to_thread(_num_runs)  # heartbeats must go on meanwhile
    return Held(
        rss_mib=_rss_mib(),
        num_files=len(os.listdir("/proc/self/fd")),
        num_tasks=len(asyncio.all_tasks()),
        num_runs=num_runs,
        num_sub_requests=sum(under_test.gateway._driver.router.num_sub_requests.values()),
    )


def _rss_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def _num_runs() -> int:
    gc.collect()
    return sum(type(thing) is RequestState for thing in gc.get_objects())


async def swarm(under_test: GatewayUnderTest, num_each: int) -> None:
    """Runs `num_each` clients of each kind, all at once. Returns when the gateway has forgotten them."""
    num_grpc = num_each // 2
    over, free_calls = asyncio.Event(), asyncio.Semaphore(MAX_CONCURRENT_CALLS)
    with ExitStack() as sockets:
        async with asyncio.TaskGroup() as group:
            slow = group.create_task(_slow_by_grpc(under_test, num_grpc, over))
            others = [group.create_task(_cancel_by_grpc(under_test)) for _ in range(num_grpc)]
            for start in range(0, num_grpc, STREAMS_EACH):
                num_streams = min(STREAMS_EACH, num_grpc - start)
                others.append(group.create_task(_vanish_by_grpc(under_test, num_streams)))
            for max_tokens, then in ((LONG, _stop_reading), (SHORT, _reset), (SHORT, _close)):
                for _ in range(num_each - num_grpc):
                    connection = sockets.enter_context(socket.socket())
                    asking = _ask_by_http(under_test, connection, max_tokens, then)
                    others.append(group.create_task(_in_turn(free_calls, asking)))
            await asyncio.wait(others)
            async with asyncio.timeout(120):
                await _until_rid_of_them(under_test)
            over.set()
            await slow


async def _until_rid_of_them(under_test: GatewayUnderTest) -> None:
    """Waits until the gateway has forgotten all of them, although the clients' sockets are still open."""
    assert under_test.gateway._http is not None
    connections = under_test.gateway._http._server.server_state.connections
    dispatcher = under_test.dispatcher
    while dispatcher.num_in_flight or dispatcher.num_queued or connections:
        await asyncio.sleep(0.05)


async def _in_turn(free_calls: asyncio.Semaphore, asking: Coroutine[None, None, None]) -> None:
    async with free_calls:
        await asking


async def _ask_by_http(
    under_test: GatewayUnderTest,
    connection: socket.socket,
    max_tokens: int,
    then: Callable[[socket.socket], None],
) -> None:
    """Reads the beginning of the answer."""
    body = json.dumps(
        {
            "model": "tiny",
            "messages": [{"role": "user", "content": "Hello"}],
            "stream": True,
            "max_tokens": max_tokens,
            "logprobs": True,
            "top_logprobs": 20,
        }
    )
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(connection, ("127.0.0.1", under_test.gateway.http_port))
    await loop.sock_sendall(connection, f"{head}content-length: {len(body)}\r\n\r\n{body}".encode())
    answer = await loop.sock_recv(connection, 512)
    assert answer.startswith(b"HTTP/1.1 200"), answer
    then(connection)


def _stop_reading(connection: socket.socket) -> None:
    """The socket stays open."""


def _reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def _close(connection: socket.socket) -> None:
    connection.close()


def _sampling(max_tokens: int) -> dict[str, int]:
    return {"max_tokens": max_tokens, "logprobs": 20}


async def _slow_by_grpc(under_test: GatewayUnderTest, num_streams: int, over: asyncio.Event) -> None:
    """These streams have their own connection: their unread data fills the window that all streams of a connection
    share."""
    async with GatewayClient(f"127.0.0.1:{under_test.gateway.grpc_port}") as client:
        await asyncio.gather(*[_read_late(client, over) for _ in range(num_streams)])


async def _read_late(client: GatewayClient, over: asyncio.Event) -> None:
    """Reads the first event, if it comes. Reads the rest only long after the call has ended."""
    stream = client.generate(text="Hello", sampling=_sampling(LONG))
    with suppress(GatewayError):
        await anext(stream)
        await over.wait()
        async for _ in stream:
            pass


async def _cancel_by_grpc(under_test: GatewayUnderTest) -> None:
    stream = under_test.client.generate(text="Hello", sampling=_sampling(SHORT))
    await anext(stream)
    await stream.aclose()  # type: ignore[attr-defined]


async def _vanish_by_grpc(under_test: GatewayUnderTest, num_streams: int) -> None:
    """The client vanishes with its connection, and so with all calls on this connection."""
    async with GatewayClient(f"127.0.0.1:{under_test.gateway.grpc_port}") as client:
        streams = [client.generate(text="Hello", sampling=_sampling(SHORT)) for _ in range(num_streams)]
        for stream in streams:
            await anext(stream)
