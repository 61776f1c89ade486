"""The connection between gateway and worker breaks for a moment: no request waits for what was lost on the way.

Each break is shorter than the silence after which a worker counts as lost. So the break itself must be noticed.
"""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from baton.messages.request_plane import Heartbeat
from baton.request import EngineRequest, RequestOutput
from baton.worker import WorkerRole
from gateway.workers.worker_client import WorkerClient
from gateway.workers.worker_listener import LossCause
from tests.factories.gateway import (
    NETWORK,
    GatewayUnderTest,
    ScriptedWorker,
    answering,
    beginning,
    gateway_with,
    outputs_of,
    silent,
    tokens_of,
)
from tests.factories.proxy import Proxy, proxy_to

ANSWER = [5, 6, 7, 8]
BREAK_S = 0.2


def the_rest(request: EngineRequest) -> list[RequestOutput]:
    return outputs_of(request, ANSWER[2:], start=2)


@asynccontextmanager
async def worker_behind_a_line(
    folder: Path,
) -> AsyncIterator[tuple[GatewayUnderTest, ScriptedWorker, Proxy]]:
    """A gateway with only d0, behind a connection that can break; d0 computes half of each answer."""
    d0 = ScriptedWorker("d0", WorkerRole.DECODE, beginning(ANSWER[:2]))
    try:
        async with (
            proxy_to(int(d0.endpoint.request_address.rpartition(":")[2])) as line,
            gateway_with(folder, {}, {}, routing_policy="round_robin") as under_test,
        ):
            under_test.gateway.workers.add_worker(
                replace(d0.endpoint, request_address=f"tcp://127.0.0.1:{line.port}")
            )
            await under_test.until(lambda: len(under_test.gateway.workers.statuses) == 1)
            yield under_test, d0, line
    finally:
        d0.stop()


async def answer(under_test: GatewayUnderTest) -> list[int]:
    return tokens_of(await under_test.ask(sampling={"max_tokens": len(ANSWER)}))


async def add_healthy_worker(under_test: GatewayUnderTest) -> None:
    under_test.add("d1", answering(ANSWER))
    await under_test.until(lambda: len(under_test.gateway.workers.statuses) == 2)


async def test_c42_a_worker_that_lost_its_gateway_for_a_moment_says_so(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An output finds no connection, so the worker ends the request; the gateway learns of it after reconnecting."""

    async with worker_behind_a_line(folder) as (under_test, d0, line):
        tokens = asyncio.create_task(answer(under_test))
        request = await d0.next_request()
        await add_healthy_worker(under_test)
        line.cut()
        await asyncio.sleep(BREAK_S / 2)
        d0.say(request, the_rest(request))
        assert (await d0.next_abort()).startswith("client ")
        line.mend()
        assert await tokens == ANSWER
    assert "lost the requests on worker d0: it had lost this gateway" in caplog.text
    assert "silent for" not in caplog.text


async def test_c42_outputs_that_were_lost_without_a_trace_are_missed(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The worker sent them and never learned that they did not arrive."""

    async with worker_behind_a_line(folder) as (under_test, d0, line):
        tokens = asyncio.create_task(answer(under_test))
        request = await d0.next_request()
        await add_healthy_worker(under_test)
        line.swallows = "to client"
        d0.say(request, the_rest(request))
        await under_test.until(lambda: line.num_swallowed > 0)
        line.cut()
        line.mend()
        assert await tokens == ANSWER
    assert "lost the requests on worker d0" in caplog.text
    assert "silent for" not in caplog.text


async def test_c42_an_order_that_was_lost_is_missed(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with worker_behind_a_line(folder) as (under_test, d0, line):
        line.swallows = "to server"
        tokens = asyncio.create_task(answer(under_test))
        await under_test.until(lambda: under_test.gateway._driver.router.num_sub_requests["d0"] == 1)
        await add_healthy_worker(under_test)
        line.cut()
        line.mend()
        assert await tokens == ANSWER
        received = [d0.received.get_nowait() for _ in range(d0.received.qsize())]
        assert not any(isinstance(item, EngineRequest) for item in received), (
            "the command should have been lost"
        )
        assert under_test.gateway.workers.losses == {LossCause.SESSION_LOST: 1}
    assert "lost the requests on worker d0" in caplog.text
    assert "silent for" not in caplog.text


async def test_a_break_ends_no_request_even_where_there_is_nobody_else(folder: Path) -> None:
    """The worker was out of reach for a moment. Then it gets the request again."""

    async with worker_behind_a_line(folder) as (under_test, d0, line):
        tokens = asyncio.create_task(answer(under_test))
        first = await d0.next_request()
        line.cut()
        assert (await d0.next_abort()).startswith("client ")
        line.mend()
        assert await d0.next_abort() == first.request_id
        second = await d0.next_request()
        assert second.request_id != first.request_id
        d0.say(second, the_rest(second))
        assert await tokens == ANSWER


async def test_c42_a_killed_worker_is_lost_when_its_port_refuses(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    network = NETWORK.model_copy(update={"reconnect_grace_s": 600.0})
    async with gateway_with(folder, {}, {"d0": silent}, network=network) as under_test:
        under_test.workers.pop("d0").stop()
        await under_test.until(lambda: len(under_test.gateway.workers.statuses) == 0)
    assert "its connection broke, and its port refuses a new connection" in caplog.text


async def test_c42_a_worker_that_was_never_silent_for_long_is_lost_early(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    network = NETWORK.model_copy(update={"peer_timeout_s": 10.0})
    async with gateway_with(folder, {}, {"d0": silent}, network=network) as under_test:
        [client] = under_test.gateway.workers.clients
        client._timeout._heard_since = -1e6  # the gateway has known the worker for long
        under_test.workers["d0"].goes_on.clear()
        await under_test.until(lambda: client.is_lost)
        under_test.workers["d0"].goes_on.set()
        await under_test.until(lambda: not client.is_lost)
    reported = re.search(r"silent for ([\d.]+) s", caplog.text)
    assert reported is not None
    assert 4.0 <= float(reported[1]) < 10.0


async def test_a_worker_is_not_silent_while_its_outputs_wait_for_a_turn(folder: Path) -> None:
    """The worker's heartbeats wait behind its outputs."""
    network = NETWORK.model_copy(update={"peer_timeout_s": 1.0})
    async with gateway_with(folder, {}, {"d0": answering(ANSWER)}, network=network) as under_test:
        [client] = under_test.gateway.workers.clients
        async with client._turns:
            tokens = asyncio.create_task(answer(under_test))
            await under_test.until(lambda: bool(client._turns._lock._waiters))
            await asyncio.sleep(1.5)
        assert await tokens == ANSWER
        assert not under_test.gateway.workers.losses


def is_in_session(client: WorkerClient, number: int) -> bool:
    return client._session.hello().session == number


async def test_after_a_break_the_worker_serves_again(folder: Path) -> None:
    async with worker_behind_a_line(folder) as (under_test, d0, line):
        client, router = under_test.gateway.workers.client("d0"), under_test.gateway._driver.router
        assert client is not None
        for number in (1, 2, 3):
            await under_test.until(partial(is_in_session, client, number))
            # The loss of a session made the router forget the listing.
            await under_test.until(lambda: not router.lacks_kv_listing("d0"))
            tokens = asyncio.create_task(answer(under_test))
            request = await d0.next_request()
            d0.say(request, the_rest(request))
            assert await tokens == ANSWER
            line.cut()
            assert (await d0.next_abort()).startswith("client "), "its heartbeat finds no connection"
            line.mend()


async def test_what_arrived_before_a_break_revives_no_worker(folder: Path) -> None:
    async with gateway_with(folder, {}, {"d0": silent}) as under_test:
        [client] = under_test.gateway.workers.clients
        assert client.status is not None
        heartbeat = Heartbeat(client.status, client._session.number, 0)
        for is_connected in (True, False):
            client._is_connected = is_connected
            client._on_heartbeat(heartbeat)
            assert client.is_lost is not is_connected
