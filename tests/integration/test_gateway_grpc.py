"""The gateway over real gRPC and real ZeroMQ: a hand-over, workers that refuse or stand still, standard services."""

import asyncio
import time
from pathlib import Path

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from baton.kv import TransferRole
from baton.request import EngineRequest, ErrorKind, FinishReason, RequestOutput
from tests.factories.gateway import (
    IMPATIENT,
    answering,
    failing,
    gateway_with,
    outputs_of,
    refusal,
    silent,
)
from tests.factories.models import make_tokenizer

TOKENIZER = make_tokenizer()
ANSWER = TOKENIZER.encode("The cache is the baton").ids


async def test_a_prompt_goes_to_a_pair_and_the_answer_streams_back(folder: Path) -> None:
    async with gateway_with(folder, {"p0": answering(ANSWER)}, {"d0": answering(ANSWER)}) as under_test:
        events = await under_test.ask(text="Hello", sampling={"max_tokens": 9})
        assert [t for event in events for t in event.token_ids] == ANSWER
        assert "".join(event.text for event in events) == "The cache is the baton"
        completion = events[-1].completion
        assert completion is not None
        assert completion.finish_reason == "length"
        timing = completion.timing
        assert sum(timing["ttft_parts"].values()) == pytest.approx(timing["ttft_s"])
        assert sum(timing["handover_parts"].values()) == pytest.approx(timing["handover_s"])
        assert completion.placement == {
            "mode": "disaggregated",
            "prefill": "p0",
            "decode": "d0",
            "attempts": 1,
        }
        assert completion.usage["prompt_tokens"] == len(TOKENIZER.encode("Hello").ids)
        to_prefill = await under_test.workers["p0"].next_request()
        to_decode = await under_test.workers["d0"].next_request()
        assert to_prefill.kv_transfer is not None
        assert to_decode.kv_transfer is not None
        assert to_prefill.kv_transfer.transfer_id == to_decode.kv_transfer.transfer_id
        assert to_prefill.kv_transfer.role is TransferRole.PRODUCER
        assert to_prefill.kv_transfer.peer == under_test.workers["d0"].endpoint.ref
        assert to_decode.kv_transfer.peer == under_test.workers["p0"].endpoint.ref
        assert to_prefill.sampling_params == to_decode.sampling_params
        assert to_prefill.sampling_params.seed is not None, "the gateway draws one"
        description = await under_test.client.describe()
        assert description["gateway"]["paths"] == {"disaggregated": 1, "fallback": 0, "local": 0}


async def test_a_chat_is_rendered_with_the_models_template(folder: Path) -> None:
    async with gateway_with(folder, {}, {"d0": answering(ANSWER)}) as under_test:
        await under_test.ask(None, messages=[("user", "hi")])
        request = await under_test.workers["d0"].next_request()
        text = TOKENIZER.decode(list(request.prompt_token_ids), skip_special_tokens=False)
        assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


async def test_a_request_that_ends_with_token_0_is_answered_by_the_prefill_worker(folder: Path) -> None:
    def ends(request: EngineRequest) -> list[RequestOutput]:
        return outputs_of(request, ANSWER[:1], finish=FinishReason.STOP)

    async with gateway_with(folder, {"p0": ends}, {"d0": silent}) as under_test:
        events = await under_test.ask()
        assert [t for event in events for t in event.token_ids] == ANSWER[:1]
        request = await under_test.workers["d0"].next_request()
        assert await under_test.workers["d0"].next_abort() == request.request_id, (
            "D's reservation is released"
        )


async def test_a_call_of_the_client_has_exactly_one_prompt(folder: Path) -> None:
    async with gateway_with(folder, {}, {"d0": answering(ANSWER)}) as under_test:
        for text, token_ids in ((None, None), ("Hi", [5])):
            with pytest.raises(ValueError, match="exactly one of text, token_ids, messages and conversation"):
                await anext(under_test.client.generate(text=text, token_ids=token_ids))


async def test_a_prefill_worker_that_refuses_is_passed_over(folder: Path) -> None:
    def late_answer(request: EngineRequest) -> list[RequestOutput]:
        return [] if request.kv_transfer else outputs_of(request, ANSWER)

    prefill = {"p0": failing(ErrorKind.OVERLOADED, "full")}
    async with gateway_with(folder, prefill, {"d0": late_answer}) as under_test:
        events = await under_test.ask()
        assert events[-1].completion is not None
        placement = events[-1].completion.placement
        assert (placement["mode"], placement["attempts"]) == ("local", 2)
        description = await under_test.client.describe()
        assert description["gateway"]["paths"]["fallback"] == 1


async def test_a_gateway_that_stood_still_does_not_take_its_workers_for_dead(folder: Path) -> None:
    async with gateway_with(folder, {}, {"d0": answering(ANSWER)}, network=IMPATIENT) as under_test:
        time.sleep(1.5 * IMPATIENT.peer_timeout_s)  # noqa: ASYNC251 - as after SIGSTOP
        await asyncio.sleep(2 * IMPATIENT.heartbeat_interval_s)
        assert len(under_test.gateway.workers.statuses) == 1
        assert (await under_test.ask())[-1].completion is not None


async def test_a_worker_that_is_reachable_again_gets_requests_again_without_its_former_ones(
    folder: Path,
) -> None:
    async with gateway_with(
        folder, {}, {"d0": silent}, network=IMPATIENT, placement_timeout_s=0.5
    ) as under_test:
        worker = under_test.workers["d0"]
        call = asyncio.create_task(refusal(under_test.ask()))
        request = await worker.next_request()
        worker.goes_on.clear()
        assert (await call).code == "UNAVAILABLE"
        worker.goes_on.set()
        # The gateway sent an abort, or the worker itself missed the gateway's signs of life.
        assert (await worker.next_abort()).startswith((request.request_id, "client"))
        await under_test.until(lambda: len(under_test.gateway.workers.statuses) == 1)
        call = asyncio.create_task(refusal(under_test.ask(request_id="again")))
        while not isinstance(await asyncio.to_thread(worker.received.get, True, 10), EngineRequest):
            continue
        await under_test.client.abort("again")
        assert (await call).code == "ABORTED"


async def test_health_and_reflection_speak_the_standard_protocols(folder: Path) -> None:
    async with gateway_with(folder, {}, {"d0": silent}) as under_test:
        target = under_test.grpc_target
        async with grpc.aio.insecure_channel(target) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            for service in ("", "baton.v1.GenerationService", "baton.v1.ClusterService"):
                reply = await stub.Check(health_pb2.HealthCheckRequest(service=service))
                assert reply.status == health_pb2.HealthCheckResponse.SERVING
        services = await asyncio.to_thread(list_services, target)
        assert {
            "baton.v1.GenerationService",
            "baton.v1.ClusterService",
            "grpc.health.v1.Health",
        } <= services


def list_services(target: str) -> set[str]:
    with grpc.insecure_channel(target) as channel:
        return set(ProtoReflectionDescriptorDatabase(channel).get_services())


async def test_model_info(folder: Path) -> None:
    async with gateway_with(folder, {}, {"d0": silent}) as under_test:
        info = await under_test.client.model_info()
        assert (info["model"], info["max_model_len"], info["eos_token_ids"]) == ("tiny", 256, [2])
        assert info["has_chat_template"]
