"""Refused calls in metrics and logs: by error and caller, at both frontends."""

import asyncio
import logging
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from baton.errors import FleetEnded
from baton.v1 import cluster_service_pb2 as cluster_pb
from baton.v1 import generation_service_pb2 as pb
from baton.v1.cluster_service_pb2_grpc import ClusterServiceStub
from baton.v1.generation_service_pb2_grpc import GenerationServiceStub
from baton.v1.sampling_pb2 import SamplingParams
from tests.factories.api_keys import ALICE, API_KEYS, BOB, WATCHER, entry
from tests.factories.gateway import GatewayUnderTest, answering, gateway_with
from tests.factories.metrics import Scrape, read_url

BUSY = "baton-busy"
KEYS = (*API_KEYS, entry("busy", BUSY, requests_per_minute=1))
GOOD = {"model": "tiny", "prompt": "hello", "max_tokens": 2}


async def over_http(under_test: GatewayUnderTest) -> str:
    """Makes calls, most of which are refused. Returns the content of /metrics after them."""
    calls = [
        (None, GOOD, 401),
        ("wrong", GOOD, 401),
        (WATCHER, GOOD, 403),
        (ALICE, GOOD | {"n": -1}, 400),
        (ALICE, GOOD | {"model": "none"}, 404),
        (ALICE, GOOD | {"prompt": "x" * 2**20}, 413),
        (ALICE, GOOD, 200),
        (BUSY, GOOD, 200),
        (BUSY, GOOD, 429),
    ]
    async with under_test.http() as client:
        for key, body, status in calls:
            headers = {"authorization": f"Bearer {key}"} if key else {}
            answer = await client.post("/v1/completions", json=body, headers=headers)
            assert answer.status_code == status, answer.text
        lost = await client.get("/nothing", headers={"authorization": f"Bearer {ALICE}"})
        assert lost.status_code == 404
        assert (await client.get("/ready")).status_code == 200
        scraped = await client.get("/metrics", headers={"authorization": f"Bearer {WATCHER}"})
        return str(scraped.text)


async def over_grpc(under_test: GatewayUnderTest) -> None:
    target = under_test.grpc_target
    bad = pb.GenerateRequest(
        text="hello", request_id="forged\nline", sampling_params=SamplingParams(temperature=-1.0)
    )
    async with grpc.aio.insecure_channel(target) as channel:
        generate, cluster = GenerationServiceStub(channel).Generate, ClusterServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError):
            _ = [answer async for answer in generate(bad)]
        bob = (("authorization", f"Bearer {BOB}"), ("x-request-id", "bobs"))
        with pytest.raises(grpc.aio.AioRpcError):
            _ = [answer async for answer in generate(bad, metadata=bob)]
        with pytest.raises(grpc.aio.AioRpcError):
            await cluster.DescribeCluster(cluster_pb.DescribeClusterRequest(), metadata=bob)


def test_calls_that_were_refused_are_counted_by_reason_and_caller(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> Scrape:
        config: dict[str, Any] = {"api_keys": KEYS, "routing_mode": "local", "max_message_mib": 1}
        async with gateway_with(folder, {}, {"d0": answering([5, 6])}, **config) as under_test:
            await over_grpc(under_test)
            return Scrape(await over_http(under_test))

    with caplog.at_level(logging.INFO, "gateway"):
        now = asyncio.run(asyncio.wait_for(test(), 60))
    for labels, number in {
        ("http", "Unauthenticated", ""): 2,
        ("http", "PermissionDenied", "watcher"): 1,
        ("http", "InvalidRequest", "alice"): 1,
        ("http", "UnknownModel", "alice"): 1,
        ("http", "TooLarge", "alice"): 1,
        ("http", "NotFound", "alice"): 1,
        ("http", "RateLimited", "busy"): 1,
        ("grpc", "Unauthenticated", ""): 1,
        ("grpc", "InvalidRequest", "bob"): 1,
        ("grpc", "PermissionDenied", "bob"): 1,
    }.items():
        api, error, caller = labels
        assert now("call_errors_total", api=api, error=error, caller=caller) == number, labels
    assert now("call_errors_total") == 11, "and no others"
    assert now("http_responses_total", route="/v1/completions", status="401") == 2

    lines: list[Any] = [record for record in caplog.records if record.name == "gateway.telemetry.call_log"]
    assert len(lines) == 11
    (bobs,) = (line for line in lines if (line.api, line.error) == ("grpc", "InvalidRequest"))
    assert bobs.caller == "bob"
    assert bobs.call == "/baton.v1.GenerationService/Generate"
    assert "bobs" in bobs.getMessage()
    assert not [line for line in lines if "forged" in line.getMessage()], "an ill-formed id is not logged"
    assert not [line for line in lines if "wrong" in line.getMessage() or ALICE in line.getMessage()]


async def test_errors_of_the_controller_have_one_name(folder: Path) -> None:
    """Clients do not see the classes of these errors."""

    class Away:
        async def call(self, _: object) -> Any:
            raise FleetEnded("the fleet has ended")

    async with (
        gateway_with(folder, {}, {}, control=Away()) as under_test,
        grpc.aio.insecure_channel(under_test.grpc_target) as channel,
    ):
        with pytest.raises(grpc.aio.AioRpcError, match="the fleet has ended"):
            await ClusterServiceStub(channel).DrainWorker(cluster_pb.DrainWorkerRequest(worker="d0"))
        url = f"http://127.0.0.1:{under_test.gateway.http_port}/metrics"
        now = Scrape(await asyncio.to_thread(read_url, url))
    assert now("call_errors_total", api="grpc", error="ClusterError") == 1
    assert now("call_errors_total") == 1


async def test_the_name_of_an_unknown_method_is_not_logged(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """gRPC passes on line ends in names. With them, a stranger could write lines of the log."""
    async with (
        gateway_with(folder, {}, {}, api_keys=KEYS) as under_test,
        grpc.aio.insecure_channel(under_test.grpc_target) as typed_channel,
    ):
        channel: Any = typed_channel
        for service in ("baton.v1.ClusterService", "some.Other"):
            with caplog.at_level(logging.INFO, "gateway"), pytest.raises(grpc.aio.AioRpcError):
                await channel.unary_unary(f"/{service}/x\n2026-01-01 INFO forged")(b"")
    lines: list[Any] = [record for record in caplog.records if record.name == "gateway.telemetry.call_log"]
    assert [line.call for line in lines] == ["(other)", "(other)"]


async def test_connections_that_become_no_call_are_counted(folder: Path) -> None:
    async with gateway_with(folder, {}, {}, max_connections=1) as under_test:
        port = under_test.gateway.http_port
        displaced, its_writer = await asyncio.open_connection("127.0.0.1", port)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        assert await displaced.read() == b""
        writer.write(b"\0\r\n\r\n")
        assert b" 400 " in await reader.readline()
        await reader.read()  # until it is closed
        for each in (writer, its_writer):
            each.close()
        http = under_test.gateway._http
        assert http is not None
        await under_test.until(lambda: len(http._places) == 0)
        url = f"http://127.0.0.1:{port}/metrics"
        now = Scrape(await asyncio.to_thread(read_url, url))
    assert now("call_errors_total", error="NotHttp") == 1
    assert now("call_errors_total", error="TooManyConnections") == 1
