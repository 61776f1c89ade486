"""Errors as gRPC clients see them: codes, details for programs, and nothing internal."""

import asyncio
import json
import logging
import re
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2 as details_pb
from grpc_status import rpc_status

from baton.v1 import cluster_service_pb2 as cluster_pb
from baton.v1 import generation_service_pb2 as pb
from baton.v1 import generation_service_pb2_grpc as pb_grpc
from baton.v1 import sampling_pb2
from gateway import GatewayError
from gateway.error_codes import INTERNAL_MESSAGE
from gateway.grpc.field_count import MAX_FIELDS
from gateway.grpc.status import MAX_MESSAGE_BYTES
from tests.factories.fleet_control import FakeFleetControl, fleet_of, replica
from tests.factories.gateway import GatewayUnderTest, answering, gateway_with, outputs_of, refusal, silent
from tests.factories.models import make_tokenizer

ANSWER = make_tokenizer().encode("The cache is the baton").ids


API_DOCUMENT = Path(__file__).resolve().parents[2].joinpath("docs/api.md").read_text()


async def error_of(under_test: GatewayUnderTest, request: pb.GenerateRequest) -> grpc.aio.AioRpcError:
    async with grpc.aio.insecure_channel(under_test.grpc_target) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in pb_grpc.GenerationServiceStub(channel).Generate(request):
                pass
    return caught.value


def detail(error: grpc.aio.AioRpcError, kind: Any) -> Any:
    """The detail of this kind among google.rpc's details; raises unless there is exactly one."""
    status = rpc_status.from_call(error)
    assert status is not None
    assert status.message == error.details()
    (packed,) = [packed for packed in status.details if packed.Is(kind.DESCRIPTOR)]
    message = kind()
    packed.Unpack(message)
    return message


def trailers_of(error: grpc.aio.AioRpcError) -> dict[str, str | bytes]:
    return dict(error.trailing_metadata())


async def test_a_bad_field_is_named_for_programs_too(folder: Path) -> None:
    async with gateway_with(folder, {}, {"d0": silent}) as under_test:
        request = pb.GenerateRequest(
            request_id="mine", text="Hi", sampling_params=sampling_pb2.SamplingParams(top_p=2.0)
        )
        error = await error_of(under_test, request)
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        (violation,) = detail(error, details_pb.BadRequest).field_violations
        assert (violation.field, violation.description) == ("top_p", error.details())
        info = detail(error, details_pb.ErrorInfo)
        assert (info.reason, info.domain) == ("INVALID_REQUEST", "baton")
        assert detail(error, details_pb.RequestInfo).request_id == "mine"


async def test_a_full_gateway_says_when_to_retry(folder: Path) -> None:
    async with gateway_with(folder, {}, {"d0": silent}, max_in_flight=1, max_queued=0) as under_test:
        call = asyncio.ensure_future(anext(under_test.client.generate(text="Hi", request_id="mine")))
        await under_test.workers["d0"].next_request()
        error = await error_of(under_test, pb.GenerateRequest(text="Hi"))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        hint_ms = detail(error, details_pb.RetryInfo).retry_delay.ToMilliseconds()
        assert hint_ms > 0
        assert trailers_of(error)["retry-after-ms"] == str(hint_ms)
        assert detail(error, details_pb.ErrorInfo).reason == "OVERLOADED"
        assert len(detail(error, details_pb.RequestInfo).request_id) == 32, "one was drawn"
        refused = await refusal(under_test.ask())
        assert refused.details.retry_after_s == hint_ms / 1000
        assert "try again in" in refused.advice
        await under_test.client.abort("mine")
        with pytest.raises(GatewayError, match="ABORTED"):
            await call


async def test_grpcs_own_retries_honour_the_hint(folder: Path) -> None:
    """The documented service config is all that a client needs."""
    config = re.findall(r"### Retries.*?```json\n(.*?)```", API_DOCUMENT, re.DOTALL)[0]
    assert json.loads(config)

    async def tokens_of(under_test: GatewayUnderTest, options: list[tuple[str, str]]) -> list[int]:
        target = under_test.grpc_target
        async with grpc.aio.insecure_channel(target, options) as channel:
            call = pb_grpc.GenerationServiceStub(channel).Generate(pb.GenerateRequest(text="Hi"))
            return [token for response in [r async for r in call] for token in response.token_ids]

    async with gateway_with(folder, {}, {"d0": silent}, max_in_flight=1, max_queued=0) as under_test:
        worker = under_test.workers["d0"]
        first = asyncio.create_task(tokens_of(under_test, []))
        request = await worker.next_request()
        second = asyncio.create_task(tokens_of(under_test, [("grpc.service_config", config)]))
        tally = under_test.dispatcher.tally
        await under_test.until(lambda: tally.counters["rejected"] == 1)
        worker.say(request, outputs_of(request, ANSWER))
        request = await worker.next_request()
        worker.say(request, outputs_of(request, ANSWER))
        assert await first == await second == ANSWER


async def test_a_bug_of_ours_tells_the_client_nothing_and_the_log_everything(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("cannot open /secret/place on tcp://10.0.0.1:99")

    with caplog.at_level(logging.ERROR):
        control = FakeFleetControl(fleet_of())
        async with gateway_with(folder, {}, {"d0": silent}, control=control) as under_test:
            monkeypatch.setattr("gateway.grpc.convert.prompt_from", broken)
            error = await error_of(under_test, pb.GenerateRequest(text="Hi", request_id="unlucky"))
            assert (error.code(), error.details()) == (grpc.StatusCode.INTERNAL, INTERNAL_MESSAGE)
            assert b"secret" not in b"".join(
                value if isinstance(value, bytes) else value.encode() for value in trailers_of(error).values()
            )
            assert detail(error, details_pb.RequestInfo).request_id == "unlucky"
            control.refuses = broken  # type: ignore[assignment]
            refused = await refusal(under_test.client.drain("w0"))
            assert refused.message == "there is no worker 'w0'; the fleet has none"
            monkeypatch.setattr(control, "call", broken)
            refused = await refusal(under_test.client.drain("w0"))
            assert refused.message == INTERNAL_MESSAGE
            assert "log has details under request" in refused.advice
    records = [record for record in caplog.records if record.name == "gateway.grpc.guard"]
    assert [record.exc_info is not None for record in records] == [True, True]
    assert "unlucky" in records[0].getMessage()


async def test_an_unknown_worker_has_a_reason_of_its_own(folder: Path) -> None:
    control = FakeFleetControl(fleet_of(replica("w0")))
    async with gateway_with(folder, {}, {}, control=control) as under_test:
        refused = await refusal(under_test.client.drain("w7"))
        assert (refused.code, refused.details.reason) == ("NOT_FOUND", "UNKNOWN_WORKER")


async def test_client_text_in_errors_is_bounded(folder: Path) -> None:
    """Otherwise, the status would not fit into the headers that clients accept, and clients would see another
    error."""

    control = FakeFleetControl(fleet_of())
    async with gateway_with(folder, {}, {}, control=control) as under_test:
        refused = await refusal(under_test.client.drain("ä" * 100_000))
        assert refused.code == "NOT_FOUND"
        assert len(refused.message.encode()) <= MAX_MESSAGE_BYTES


async def test_a_message_that_is_too_large_is_refused_with_its_size(folder: Path) -> None:
    async with gateway_with(folder, {}, {"d0": answering(ANSWER)}, max_message_mib=1) as under_test:
        error = await error_of(under_test, pb.GenerateRequest(text="x" * (2**20 + 1)))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "larger than max" in str(error.details())
        assert "1048576" in str(error.details())
        assert await anext(under_test.client.generate(text="Hi"))


async def test_a_message_with_too_many_fields_is_refused_before_it_is_parsed(folder: Path) -> None:
    async with gateway_with(folder, {}, {"d0": answering(ANSWER)}) as under_test:
        chat = pb.Chat(messages=[pb.Chat.Message()] * (MAX_FIELDS + 1))
        error = await error_of(under_test, pb.GenerateRequest(chat=chat))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert f"more than {MAX_FIELDS} fields" in str(error.details())
        assert await anext(under_test.client.generate(text="Hi"))


async def test_headers_that_are_too_large_are_refused(folder: Path) -> None:
    async with gateway_with(folder, {}, {"d0": silent}) as under_test:
        target = under_test.grpc_target
        async with grpc.aio.insecure_channel(target) as channel:
            info = pb_grpc.GenerationServiceStub(channel).GetModelInfo
            await info(pb.GetModelInfoRequest(), metadata=(("x-fits", "x" * 20_000),))
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await info(pb.GetModelInfoRequest(), metadata=(("x-large", "x" * 40_000),))
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert (await info(pb.GetModelInfoRequest())).model == "tiny"


async def test_an_unknown_call_and_bytes_that_are_no_message_have_proper_statuses(folder: Path) -> None:
    async with (
        gateway_with(folder, {}, {"d0": silent}) as under_test,
        grpc.aio.insecure_channel(under_test.grpc_target) as typed_channel,
    ):
        channel: Any = typed_channel
        for call, body, code in (
            ("/baton.v1.GenerationService/Sing", b"", grpc.StatusCode.UNIMPLEMENTED),
            ("/baton.v1.GenerationService/Generate", b"\xff\xff", grpc.StatusCode.INVALID_ARGUMENT),
            ("/baton.v1.ClusterService/DrainWorker", b"\x0a\x7f", grpc.StatusCode.INVALID_ARGUMENT),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary(call)(body)
            assert caught.value.code() is code, call
            assert "Traceback" not in str(caught.value.details())
        answer = await channel.unary_unary("/baton.v1.ClusterService/DescribeCluster")(b"")
        assert cluster_pb.DescribeClusterResponse.FromString(answer).model == "tiny"
