"""gRPC connections: how large, how many, how old and how quiet they may be, and clients that stop reading."""

import asyncio
import socket
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from baton.request import EngineRequest, RequestOutput, TokenLogprobs
from baton.v1 import cluster_service_pb2 as cluster_pb
from baton.v1 import cluster_service_pb2_grpc as cluster_grpc
from baton.v1 import generation_service_pb2 as pb
from baton.v1 import generation_service_pb2_grpc as pb_grpc
from baton.v1 import sampling_pb2
from gateway import client
from gateway.client import CallBroken, GatewayClient, GatewayError
from gateway.grpc import guard, server
from tests.factories.fleet_control import FakeFleetControl, fleet_of, replica
from tests.factories.gateway import answering, gateway_with, outputs_of, silent
from tests.factories.models import make_tokenizer
from tests.factories.proxy import proxy_to

ANSWER = make_tokenizer().encode("The cache is the baton").ids


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 60))


async def test_answers_are_compressed_on_request(folder: Path) -> None:
    control = FakeFleetControl(fleet_of(*(replica(f"w{n}", node="node") for n in range(500))))
    async with (
        gateway_with(folder, {}, {"d0": answering(ANSWER * 20)}, control=control) as under_test,
        proxy_to(under_test.gateway.grpc_port) as proxy,
        grpc.aio.insecure_channel(f"127.0.0.1:{proxy.port}") as channel,
    ):
        cluster, generation = (
            cluster_grpc.ClusterServiceStub(channel),
            pb_grpc.GenerationServiceStub(channel),
        )
        params = sampling_pb2.SamplingParams(max_tokens=len(ANSWER) * 20)
        sizes: dict[str, tuple[int, int]] = {}
        for encoding in ("identity", "gzip"):
            metadata = ((guard.ENCODING, encoding),)
            before = proxy.bytes_to_client
            answer = await cluster.DescribeCluster(cluster_pb.DescribeClusterRequest(), metadata=metadata)
            assert len(answer.workers) == 501
            between = proxy.bytes_to_client
            call = generation.Generate(
                pb.GenerateRequest(text="Hi", sampling_params=params), metadata=metadata
            )
            assert [token for r in [r async for r in call] for token in r.token_ids] == ANSWER * 20
            sizes[encoding] = (between - before, proxy.bytes_to_client - between)
        assert sizes["gzip"][0] < sizes["identity"][0] / 4
        assert sizes["gzip"][1] != sizes["identity"][1]
        with pytest.raises(grpc.aio.AioRpcError, match="unsupported compression 'zip'; use gzip or identity"):
            await generation.GetModelInfo(pb.GetModelInfoRequest(), metadata=((guard.ENCODING, "zip"),))


async def test_compressed_requests_are_understood(folder: Path) -> None:
    async with gateway_with(folder, {}, {"d0": answering(ANSWER)}) as under_test:
        async with grpc.aio.insecure_channel(under_test.grpc_target) as channel:
            call = pb_grpc.GenerationServiceStub(channel).Generate(
                pb.GenerateRequest(text="Hello " * 10), compression=grpc.Compression.Gzip
            )
            tokens = [token for response in [r async for r in call] for token in response.token_ids]
        assert tokens == ANSWER


async def test_tokens_that_came_together_go_out_in_one_message(folder: Path) -> None:
    async with gateway_with(folder, {}, {"d0": answering(ANSWER)}) as under_test:
        events = await under_test.ask()
        assert [event.token_ids for event in events] == [tuple(ANSWER)]


async def test_an_old_connection_ends_and_its_running_call_does_not(folder: Path) -> None:
    async with (
        gateway_with(folder, {}, {"d0": silent}, grpc_max_connection_age_s=1.0) as under_test,
        proxy_to(under_test.gateway.grpc_port) as proxy,
        grpc.aio.insecure_channel(f"127.0.0.1:{proxy.port}") as channel,
    ):
        stub = pb_grpc.GenerationServiceStub(channel)
        call = stub.Generate(pb.GenerateRequest(text="Hi"))
        reading = asyncio.ensure_future(call.read())
        request = await under_test.workers["d0"].next_request()
        assert proxy.num_connections == 1
        async with asyncio.timeout(60):
            while proxy.num_connections == 1:
                await asyncio.sleep(0.2)
                await stub.GetModelInfo(pb.GetModelInfoRequest())
        under_test.workers["d0"].say(request, outputs_of(request, ANSWER))
        answer: Any = await reading
        assert answer.token_ids


async def test_a_connection_whose_grace_is_over_loses_its_calls(folder: Path) -> None:
    async with gateway_with(
        folder, {}, {"d0": silent}, grpc_max_connection_age_s=2.0, grpc_connection_grace_s=2.0
    ) as under_test:
        with pytest.raises(Exception, match="UNAVAILABLE"):
            await anext(under_test.client.generate(text="Hi"))
        request = await under_test.workers["d0"].next_request()
        assert await under_test.workers["d0"].next_abort() == request.request_id


async def test_one_connection_has_a_bounded_number_of_calls(folder: Path) -> None:
    async with gateway_with(folder, {}, {"d0": silent}, grpc_max_streams=2) as under_test:

        async def ask() -> list[int]:
            return [t async for event in under_test.client.generate(text="Hi") for t in event.token_ids]

        calls = [asyncio.create_task(ask()) for _ in range(3)]
        requests = [await under_test.workers["d0"].next_request() for _ in range(2)]
        await asyncio.sleep(0.3)
        assert under_test.workers["d0"].received.empty(), "the third waits at its client"
        under_test.workers["d0"].say(requests[0], outputs_of(requests[0], ANSWER))
        third = await under_test.workers["d0"].next_request()
        for request in (requests[1], third):
            under_test.workers["d0"].say(request, outputs_of(request, ANSWER))
        assert await asyncio.gather(*calls) == [ANSWER] * 3


async def test_a_client_that_is_gone_without_a_word_is_noticed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "KEEPALIVE_TIMEOUT_S", 3.0)

    async with (
        gateway_with(folder, {}, {"d0": silent}, grpc_keepalive_s=1.0) as under_test,
        proxy_to(under_test.gateway.grpc_port) as proxy,
        grpc.aio.insecure_channel(f"127.0.0.1:{proxy.port}") as channel,
    ):
        call = pb_grpc.GenerationServiceStub(channel).Generate(pb.GenerateRequest(text="Hi"))
        reading = asyncio.ensure_future(call.read())
        request = await under_test.workers["d0"].next_request()
        await asyncio.sleep(2.5)
        assert under_test.workers["d0"].received.empty(), "a quiet client that answers pings stays"
        proxy.passes.clear()
        assert await under_test.workers["d0"].next_abort() == request.request_id
        reading.cancel()
        proxy.passes.set()


@pytest.mark.parametrize(("allowed_s", "is_disconnected"), [(0.0, False), (10.0, True)])
async def test_clients_may_ping_so_often_and_not_more(
    folder: Path, allowed_s: float, is_disconnected: bool
) -> None:
    """The test writes HTTP/2 itself, since gRPC's own clients refuse to ping that often."""
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4)

    def flood(port: int) -> bool:
        timeout_s = 60.0 if is_disconnected else 1.0
        with socket.create_connection(("127.0.0.1", port), timeout_s) as client:
            client.sendall(preface)
            received = b""
            try:
                for _ in range(8):
                    client.sendall(frame(6, b"12345678"))
                    time.sleep(0.05)
                while data := client.recv(65536):
                    received += data
            except TimeoutError:
                return False
            except ConnectionError:
                return True
        return b"too_many_pings" in received

    async with gateway_with(folder, {}, {}, grpc_min_client_ping_s=allowed_s) as under_test:
        assert await asyncio.to_thread(flood, under_test.gateway.grpc_port) is is_disconnected


def frame(kind: int, body: bytes = b"") -> bytes:
    """A frame of HTTP/2 that concerns the whole connection."""
    return len(body).to_bytes(3, "big") + bytes([kind, 0, 0, 0, 0, 0]) + body


async def test_batons_own_client_does_not_wait_for_a_gateway_that_no_longer_answers(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gateway may be stopped, or its host gone: nothing breaks the connection. A gateway that is only
    quiet answers pings."""
    monkeypatch.setattr(client, "KEEPALIVE_TIME_S", 0.2)
    monkeypatch.setattr(client, "KEEPALIVE_TIMEOUT_S", 0.5)
    async with (
        gateway_with(folder, {}, {"d0": silent}, grpc_min_client_ping_s=0.0) as under_test,
        proxy_to(under_test.gateway.grpc_port) as line,
        client.GatewayClient(target := f"127.0.0.1:{line.port}") as caller,
        asyncio.timeout(60),
    ):
        answer = asyncio.ensure_future(anext(caller.generate(text="Hello")))
        await under_test.workers["d0"].next_request()
        done, _ = await asyncio.wait([answer], timeout=1.5)
        assert not done, "it answers several pings"
        line.swallows = "to server"
        with pytest.raises(
            CallBroken, match=f"^UNAVAILABLE: the gateway at {target} does not answer any more$"
        ):
            await answer
        line.cut()
        await under_test.until(lambda: under_test.dispatcher.num_in_flight == 0)


class SilentGateway(grpc.GenericRpcHandler):
    """Answers no call."""

    def __init__(self) -> None:
        self.has_call = asyncio.Event()

    def service(self, _: grpc.HandlerCallDetails) -> Any:
        return grpc.unary_unary_rpc_method_handler(self._hold)

    async def _hold(self, *_: Any) -> None:
        self.has_call.set()
        await asyncio.Event().wait()


async def test_a_call_is_broken_only_if_it_was_sent() -> None:
    gateway = SilentGateway()
    stopped = grpc.aio.server()
    stopped.add_generic_rpc_handlers((gateway,))
    port = stopped.add_insecure_port("127.0.0.1:0")
    await stopped.start()
    async with GatewayClient(f"127.0.0.1:{port}") as caller, asyncio.timeout(20):
        drain = asyncio.create_task(caller.drain("w0"))
        await gateway.has_call.wait()
        await stopped.stop(0)
        with pytest.raises(CallBroken):
            await drain
    target = "dns:///a_b:x:5"  # not the form of a name, so no network is asked
    async with GatewayClient(target) as caller, asyncio.timeout(20):
        with pytest.raises(GatewayError, match=f"the host of {target} cannot be found: ") as caught:
            await caller.drain("w0")
    assert not isinstance(caught.value, CallBroken)


async def test_a_target_that_is_no_grpc_port_is_named(folder: Path) -> None:
    async def error_of(target: str) -> str:
        async with GatewayClient(target) as caller, asyncio.timeout(60):
            with pytest.raises(GatewayError) as caught:
                await caller.model_info()
        return caught.value.message

    async with gateway_with(folder, {}, {}) as under_test:
        address = f"127.0.0.1:{under_test.gateway.http_port}"
        assert await error_of(address) == (
            f"{address} serves HTTP, not gRPC; use the gateway's gRPC port (gateway.grpc_port)"
        )
        assert (await error_of(f"http://{address}")).endswith(" (use HOST:PORT)")


async def test_a_client_that_stops_reading_loses_its_call(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "ABORT_TIMEOUT_S", 0.1)

    def fat_output(request: EngineRequest, position: int, count: int) -> RequestOutput:
        """Half a megabyte in all: more than the gateway sends to a client that does not read."""
        logprobs = TokenLogprobs(1, -1.0, 1, tuple((token_id, -1.0) for token_id in range(20)))
        return RequestOutput(
            request_id=request.request_id,
            first_position=position,
            token_ids=(1,) * count,
            logprobs=(logprobs,) * count,
        )

    async def read_all(call: Any) -> None:
        while await call.read() is not grpc.aio.EOF:
            pass

    async with gateway_with(folder, {}, {"d0": silent}, write_timeout_s=0.3) as under_test:
        worker = under_test.workers["d0"]
        target = under_test.grpc_target
        async with grpc.aio.insecure_channel(target, [("grpc.http2.bdp_probe", 0)]) as channel:
            asked = pb.GenerateRequest(
                text="Hi", sampling_params=sampling_pb2.SamplingParams(max_tokens=2000, logprobs=20)
            )
            call = pb_grpc.GenerationServiceStub(channel).Generate(asked)
            first = asyncio.ensure_future(call.read())
            request = await worker.next_request()
            for position in range(0, 2000, 50):
                worker.say(request, [fat_output(request, position, 50)])
            answer: Any = await first
            assert answer.token_ids
            assert await worker.next_abort() == request.request_id
            await under_test.until(lambda: under_test.dispatcher.num_in_flight == 0)
            with pytest.raises(grpc.aio.AioRpcError, match=r"(?s)ABORTED.*has not read anything for 0.3 s"):
                await read_all(call)


async def test_a_call_that_fails_while_its_first_message_is_sent_ends_with_its_status(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    responses = guard._Responses
    monkeypatch.setattr(guard, "_Responses", lambda context, _timeout_s: responses(context, 0.0))
    async with gateway_with(folder, {}, {}) as under_test, GatewayClient(under_test.grpc_target) as caller:
        with pytest.raises(GatewayError, match=r"(?s)ABORTED.*has not read anything for 0 s"):
            await caller.describe()


def test_clients_that_leave_in_the_middle_are_no_errors(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        async with gateway_with(folder, {}, {"d0": silent}) as under_test:
            worker = under_test.workers["d0"]
            for _ in range(20):
                async with grpc.aio.insecure_channel(under_test.grpc_target) as channel:
                    call = pb_grpc.GenerationServiceStub(channel).Generate(pb.GenerateRequest(text="Hi"))
                    first = asyncio.ensure_future(call.read())
                    request = await worker.next_request()
                    worker.say(request, outputs_of(request, ANSWER[:1], 0, None))
                    await first
                    for position in range(1, 20):
                        worker.say(request, outputs_of(request, ANSWER[:1], position, None))
                assert await worker.next_abort() == request.request_id
            await under_test.until(lambda: under_test.dispatcher.num_in_flight == 0)

    run(test())
    ours = [record for record in caplog.records if record.name.startswith(("gateway.grpc", "grpc"))]
    assert [record.getMessage() for record in ours] == []
