"""Incomplete gRPC calls: without a message, without a reader, without an end. They block no other call for ever."""

import asyncio
import logging
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from gateway.grpc import guard, server
from gateway.grpc import health as health_service
from tests.factories.api_keys import ADMIN, API_KEYS, AS_ADMIN
from tests.factories.gateway import GatewayUnderTest, gateway_with

GENERATE = "/baton.v1.GenerationService/Generate"
AS_SOMEBODY = (("authorization", f"Bearer {ADMIN}"),)
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEALTHY = health_pb2.HealthCheckResponse.SERVING
LEAVING = health_pb2.HealthCheckResponse.NOT_SERVING


def target_of(under_test: GatewayUnderTest) -> str:
    return under_test.grpc_target


async def end_of(call: Any) -> tuple[grpc.StatusCode, str]:
    async with asyncio.timeout(20):
        return await call.code(), await call.details()


async def test_a_caller_without_the_right_is_refused_before_its_message_is_read(folder: Path) -> None:
    async with (
        gateway_with(folder, {}, {}, api_keys=API_KEYS, credentials=AS_ADMIN) as under_test,
        grpc.aio.insecure_channel(target_of(under_test)) as typed_channel,
    ):
        channel: Any = typed_channel
        for path in (GENERATE, "/baton.v1.ClusterService/DrainWorker", "/no.Service/Call", "no path"):
            code, details = await end_of(channel.stream_stream(path)())
            assert code is grpc.StatusCode.UNAUTHENTICATED, path
            assert details.startswith("this gateway needs an API key")


async def test_a_path_that_is_none_is_an_unknown_call(folder: Path) -> None:
    async with (
        gateway_with(folder, {}, {}) as under_test,
        grpc.aio.insecure_channel(target_of(under_test)) as typed_channel,
    ):
        channel: Any = typed_channel
        for path in ("", "x", "/", "//", "/baton.v1.GenerationService", "/grpc.health.v1.Health/Heal"):
            code, _ = await end_of(channel.stream_stream(path)())
            assert code is grpc.StatusCode.UNIMPLEMENTED, path


async def test_a_call_without_its_message_ends(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with (
        gateway_with(folder, {}, {}, api_keys=API_KEYS, credentials=AS_ADMIN) as under_test,
        grpc.aio.insecure_channel(target_of(under_test)) as typed_channel,
    ):
        channel: Any = typed_channel
        call = channel.stream_stream(GENERATE)(metadata=AS_SOMEBODY)
        await call.done_writing()
        code, details = await end_of(call)
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert details == "request: the call ended without a message"
        monkeypatch.setattr(guard, "REQUEST_TIMEOUT_S", 0.2)
        code, details = await end_of(channel.stream_stream(GENERATE)(metadata=AS_SOMEBODY))
        assert code is grpc.StatusCode.DEADLINE_EXCEEDED
        assert details == "the call's message did not arrive within 0.2 s"
        reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
        code, _ = await end_of(reflection.ServerReflectionInfo(metadata=AS_SOMEBODY))
        assert code is grpc.StatusCode.OK, "nothing was asked, and nothing more is waited for"


async def test_calls_that_would_last_for_ever_end_with_the_gateway(folder: Path) -> None:
    async with (
        gateway_with(folder, {}, {}) as under_test,
        grpc.aio.insecure_channel(target_of(under_test)) as channel,
    ):
        health: Any = health_pb2_grpc.HealthStub(channel)
        known = health.Watch(health_pb2.HealthCheckRequest(service="baton.v1.GenerationService"))
        unknown = health.Watch(health_pb2.HealthCheckRequest(service="who.Ever"))
        assert (await known.read()).status == HEALTHY
        assert (await unknown.read()).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await health.Check(health_pb2.HealthCheckRequest(service="who.Ever"))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        listed = await health.List(health_pb2.HealthListRequest())
        assert {status.status for status in listed.statuses.values()} == {HEALTHY}
        assert {"", "baton.v1.GenerationService"} <= set(listed.statuses)
        reflection: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
        asking = reflection.ServerReflectionInfo()
        await asking.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        assert (await asking.read()).list_services_response.service
        async with asyncio.timeout(20):
            await under_test.gateway.stop(grace_s=60.0)
        assert (await known.read()).status == LEAVING
        for watch in (known, unknown):
            code, details = await end_of(watch)
            assert code is grpc.StatusCode.UNAVAILABLE
            assert "this gateway is shutting down" in details
        assert (await end_of(asking))[0] is grpc.StatusCode.OK


async def test_a_bounded_number_may_watch_the_health_and_all_may_ask(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health_service, "MAX_WATCHES", 1)

    async with (
        gateway_with(folder, {}, {}) as under_test,
        grpc.aio.insecure_channel(target_of(under_test)) as channel,
    ):
        health: Any = health_pb2_grpc.HealthStub(channel)
        for _ in range(2):  # clients that have left do not count
            watch = health.Watch(health_pb2.HealthCheckRequest())
            assert (await watch.read()).status == HEALTHY
            code, _ = await end_of(health.Watch(health_pb2.HealthCheckRequest()))
            assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert (await health.Check(health_pb2.HealthCheckRequest())).status == HEALTHY
            watch.cancel()
            service = under_test.gateway._grpc._health
            async with asyncio.timeout(20):
                while service._watches.num_taken:
                    await asyncio.sleep(0.01)


async def test_a_watcher_that_does_not_read_delays_no_other(folder: Path) -> None:
    async with (
        gateway_with(folder, {}, {}) as under_test,
        grpc.aio.insecure_channel(target_of(under_test)) as channel,
    ):
        reader, writer = await asyncio.open_connection("127.0.0.1", under_test.gateway.grpc_port)
        writer.write(watch_without_reading())
        async with asyncio.timeout(20):
            while b"application/grpc" not in await reader.read(4096):
                pass  # the headers say that a status follows, for which the client leaves no room
            health: Any = health_pb2_grpc.HealthStub(channel)
            watch = health.Watch(health_pb2.HealthCheckRequest())
            assert (await watch.read()).status == HEALTHY
            await under_test.gateway.stop(grace_s=0.5)
        assert (await watch.read()).status == LEAVING
        writer.close()


async def test_a_connection_that_does_not_begin_is_closed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "HANDSHAKE_TIMEOUT_S", 0.3)

    async with gateway_with(folder, {}, {}) as under_test:
        reader, writer = await asyncio.open_connection("127.0.0.1", under_test.gateway.grpc_port)
        writer.write(b"PRI * HTTP")
        async with asyncio.timeout(50):  # by itself, gRPC waits for twice that and more
            while await reader.read(4096):
                pass
        writer.close()


@pytest.mark.parametrize("has_key", [False, True])
async def test_a_call_that_its_client_takes_back_at_once_is_no_error_of_the_gateway(
    folder: Path, caplog: pytest.LogCaptureFixture, has_key: bool
) -> None:
    """The name of its method does not write a line into the log, either."""
    metadata = {"authorization": f"Bearer {ADMIN}"} if has_key else {}
    call, num_calls = _call("/a/b\n2026-11-30 ERROR forged", **metadata), 20
    taken_back = b"".join(
        _frame(kind, flags, stream, body)
        for stream in range(1, 2 * num_calls, 2)
        for kind, flags, body in (*call, (3, 0, b"\0\0\0\x08"))
    )
    async with gateway_with(folder, {}, {}, api_keys=API_KEYS, credentials=AS_ADMIN) as under_test:
        _, writer = await asyncio.open_connection("127.0.0.1", under_test.gateway.grpc_port)
        writer.write(PREFACE + _frame(4, 0, 0, b"") + taken_back)
        async with asyncio.timeout(60), under_test.http(headers=dict(AS_SOMEBODY)) as http:
            metrics = ""
            while _count(metrics, "baton_grpc_calls_total", "(other)") < num_calls:
                await asyncio.sleep(0.01)
                metrics = (await http.get("/metrics")).text
        writer.close()
    assert _count(metrics, "baton_call_errors_total", "Internal") == 0
    assert "forged" not in caplog.text
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_a_header_that_is_not_utf_8_is_not_logged(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It may be a key, with a character of another encoding at its end."""
    frames = _call("/baton.v1.GenerationService/GetModelInfo", authorization=f"Bearer {ADMIN}\xff")
    async with gateway_with(folder, {}, {}, api_keys=API_KEYS, credentials=AS_ADMIN) as under_test:
        reader, writer = await asyncio.open_connection("127.0.0.1", under_test.gateway.grpc_port)
        writer.write(
            PREFACE + _frame(4, 0, 0, b"") + b"".join(_frame(*each[:2], 1, each[2]) for each in frames)
        )
        async with asyncio.timeout(20):
            while b"unknown or revoked API key" not in await reader.read(65536):
                pass
        writer.close()
    assert ADMIN not in caplog.text


def _count(metrics: str, name: str, label: str) -> float:
    """The sum of a counter's samples with this value of a label."""
    lines = (line for line in metrics.splitlines() if line.startswith(name) and f'="{label}"' in line)
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def watch_without_reading() -> bytes:
    """HTTP/2, by hand: a call of grpc.health.v1.Health/Watch over a connection whose streams may get no data."""
    no_window = b"\0\4" + bytes(4)  # SETTINGS_INITIAL_WINDOW_SIZE
    call = (_frame(kind, flags, 1, body) for kind, flags, body in _call("/grpc.health.v1.Health/Watch"))
    return PREFACE + _frame(4, 0, 0, no_window) + b"".join(call)


def _call(path: str, **metadata: str) -> list[tuple[int, int, bytes]]:
    """A call with an empty message, as kinds, flags and bodies of frames."""
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": path,
        ":authority": "gateway",
        "te": "trailers",
        "content-type": "application/grpc",
        **metadata,
    }
    # literals that enter no table: RFC 7541, 6.2.2
    block = b"".join(b"\0" + _hpack(name) + _hpack(value) for name, value in fields.items())
    empty_message = bytes(5)
    return [(1, 4, block), (0, 1, empty_message)]


def _hpack(text: str) -> bytes:
    return bytes([len(text)]) + text.encode("latin-1")


def _frame(kind: int, flags: int, stream: int, body: bytes) -> bytes:
    return len(body).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + body
