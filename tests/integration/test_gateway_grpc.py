"""The gateway over real gRPC and real ZeroMQ: what clients see, and what workers are told."""

import asyncio
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from baton.kv import TransferRole
from baton.request import EngineRequest, ErrorKind, FinishReason, RequestOutput
from gateway import GatewayError
from gateway.client import Event
from tests.factories.gateway import (
    IMPATIENT,
    GatewayUnderTest,
    answering,
    failing,
    gateway_with,
    outputs_of,
    silent,
)
from tests.factories.models import make_tokenizer

TOKENIZER = make_tokenizer()
ANSWER = TOKENIZER.encode("The cache is the baton").ids


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 60))


async def ask(under_test: GatewayUnderTest, **options: Any) -> list[Event]:
    options = {"text": "Hello"} | options
    return [event async for event in under_test.client.generate(**options)]


async def refusal(under_test: GatewayUnderTest, **options: Any) -> GatewayError:
    with pytest.raises(GatewayError) as caught:
        await ask(under_test, **options)
    return caught.value


def test_a_prompt_goes_to_a_pair_and_the_answer_streams_back(folder: Path) -> None:
    async def test() -> None:
        async with gateway_with(folder, {"p0": answering(ANSWER)}, {"d0": answering(ANSWER)}) as under_test:
            events = await ask(under_test, text="Hello", sampling={"max_tokens": 9})
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

    run(test())


def test_a_chat_is_rendered_with_the_models_template(folder: Path) -> None:
    async def test() -> None:
        async with gateway_with(folder, {}, {"d0": answering(ANSWER)}) as under_test:
            await ask(under_test, text=None, messages=[("user", "hi")])
            request = await under_test.workers["d0"].next_request()
            text = TOKENIZER.decode(list(request.prompt_token_ids), skip_special_tokens=False)
            assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"

    run(test())


def test_local_mode_asks_the_decode_worker_alone(folder: Path) -> None:
    async def test() -> None:
        async with gateway_with(folder, {"p0": silent}, {"d0": answering(ANSWER)}) as under_test:
            events = await ask(under_test, mode="local")
            assert events[-1].completion is not None
            assert events[-1].completion.placement["mode"] == "local"
            request = await under_test.workers["d0"].next_request()
            assert request.kv_transfer is None
            assert under_test.workers["p0"].received.empty()

    run(test())


def test_a_client_that_leaves_ends_the_request_on_both_workers(folder: Path) -> None:
    async def test() -> None:
        async with gateway_with(folder, {"p0": silent}, {"d0": silent}) as under_test:
            call = asyncio.create_task(ask(under_test))
            requests = [await under_test.workers[name].next_request() for name in ("p0", "d0")]
            call.cancel()
            aborts = [await under_test.workers[name].next_abort() for name in ("p0", "d0")]
            assert aborts == [request.request_id for request in requests]

    run(test())


def test_a_deadline_reaches_both_workers_and_ends_the_request(folder: Path) -> None:
    async def test() -> None:
        async with gateway_with(folder, {"p0": silent}, {"d0": silent}) as under_test:
            error = await refusal(under_test, timeout_s=0.3)
            assert error.code == "DEADLINE_EXCEEDED"
            for name in ("p0", "d0"):
                request = await under_test.workers[name].next_request()
                assert request.timeout_s is not None
                assert 0.0 < request.timeout_s <= 0.31, "gRPC rounds deadlines up by up to a millisecond"
                assert await under_test.workers[name].next_abort() == request.request_id

    run(test())


def test_a_request_can_be_aborted_by_its_id(folder: Path) -> None:
    async def test() -> None:
        async with gateway_with(folder, {}, {"d0": silent}) as under_test:
            call = asyncio.create_task(refusal(under_test, request_id="mine"))
            request = await under_test.workers["d0"].next_request()
            assert await under_test.client.abort("mine", "nobody") == 1
            assert (await call).code == "ABORTED"
            assert await under_test.workers["d0"].next_abort() == request.request_id

    run(test())


def test_a_stop_string_ends_the_request_and_the_workers_stop(folder: Path) -> None:
    async def test() -> None:
        def endless(request: EngineRequest) -> list[RequestOutput]:
            return outputs_of(request, ANSWER, finish=None)

        async with gateway_with(folder, {}, {"d0": endless}) as under_test:
            events = await ask(under_test, sampling={"stop": [" is"]})
            assert "".join(event.text for event in events) == "The cache"
            assert events[-1].completion is not None
            assert events[-1].completion.finish_reason == "stop"
            request = await under_test.workers["d0"].next_request()
            assert await under_test.workers["d0"].next_abort() == request.request_id

    run(test())


def test_a_request_that_ends_with_token_0_is_answered_by_the_prefill_worker(folder: Path) -> None:
    async def test() -> None:
        def ends(request: EngineRequest) -> list[RequestOutput]:
            return outputs_of(request, ANSWER[:1], finish=FinishReason.STOP)

        async with gateway_with(folder, {"p0": ends}, {"d0": silent}) as under_test:
            events = await ask(under_test)
            assert [t for event in events for t in event.token_ids] == ANSWER[:1]
            request = await under_test.workers["d0"].next_request()
            assert await under_test.workers["d0"].next_abort() == request.request_id, (
                "D's reservation is released"
            )

    run(test())


def test_c52_a_lost_decode_worker_is_replaced_and_the_stream_goes_on(folder: Path) -> None:
    async def test() -> None:
        def half(request: EngineRequest) -> list[RequestOutput]:
            return outputs_of(request, ANSWER[:3], finish=None)

        prefill, decode = {"p0": answering(ANSWER)}, {"d0": half, "d1": answering(ANSWER)}
        async with gateway_with(folder, prefill, decode, routing_policy="round_robin") as under_test:
            for _ in range(2):  # one of the two goes to d0 first
                stream = under_test.client.generate(text="Hello")
                first = await anext(stream)
                tokens, completion = list(first.token_ids), first.completion
                if "d0" in {client.name for client in under_test.gateway._driver.fleet.clients}:
                    under_test.gateway.remove_worker("d0", "killed by the test")
                async for event in stream:
                    tokens += event.token_ids
                    completion = event.completion or completion
                assert tokens == ANSWER
                assert completion is not None
                assert completion.placement["decode"] == "d1"

    run(test())


def test_c51_when_nobody_can_finish_a_request_it_ends_with_an_error(folder: Path) -> None:
    async def test() -> None:
        decode = {name: failing(ErrorKind.INTERNAL, "out of luck") for name in ("d0", "d1", "d2", "d3")}
        async with gateway_with(folder, {}, decode) as under_test:
            error = await refusal(under_test)
            assert error.code == "UNAVAILABLE"
            assert "gave up after 3 attempt(s): the decode request failed: out of luck" in str(error)

    run(test())


def test_a_prefill_worker_that_refuses_is_passed_over(folder: Path) -> None:
    async def test() -> None:
        prefill = {"p0": failing(ErrorKind.OVERLOADED, "full")}
        async with gateway_with(folder, prefill, {"d0": late_answer}) as under_test:
            events = await ask(under_test)
            assert events[-1].completion is not None
            placement = events[-1].completion.placement
            assert (placement["mode"], placement["attempts"]) == ("local", 2)
            description = await under_test.client.describe()
            assert description["gateway"]["paths"]["fallback"] == 1

    def late_answer(request: EngineRequest) -> list[RequestOutput]:
        return [] if request.kv_transfer else outputs_of(request, ANSWER)

    run(test())


def test_when_every_worker_is_full_the_client_is_told_to_come_back(folder: Path) -> None:
    async def test() -> None:
        async with gateway_with(
            folder, {}, {"d0": failing(ErrorKind.OVERLOADED, "full")}, placement_timeout_s=0.5
        ) as under_test:
            error = await refusal(under_test)
            assert (error.code, "full" in str(error)) == ("RESOURCE_EXHAUSTED", True)

    run(test())


def test_what_a_worker_finds_invalid_is_the_clients_mistake(folder: Path) -> None:
    async def test() -> None:
        decode = {"d0": failing(ErrorKind.INVALID_REQUEST, "prompt: 5 tokens do not fit")}
        async with gateway_with(folder, {}, decode) as under_test:
            error = await refusal(under_test)
            assert str(error) == "INVALID_ARGUMENT: prompt: 5 tokens do not fit"

    run(test())


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"text": ""}, "prompt: must not be empty"),
        ({"text": None}, "prompt: set one of"),
        ({"text": None, "token_ids": [1, 99_999]}, "token_ids: 99999"),
        ({"text": None, "token_ids": [1] * 256}, "prompt: 256 tokens leave no room"),
        ({"sampling": {"temperature": -1.0}}, "temperature: must be from 0 to 100"),
        ({"sampling": {"temperature": float("nan")}}, "temperature: must be a finite number"),
        ({"sampling": {"top_p": 0.0}}, "top_p: must be above 0"),
        ({"sampling": {"stop": [""]}}, "stop: must be non-empty"),
    ],
)
def test_invalid_arguments_name_the_field(folder: Path, options: dict[str, Any], complaint: str) -> None:
    async def test() -> None:
        async with gateway_with(folder, {}, {"d0": silent}) as under_test:
            error = await refusal(under_test, **options)
            assert error.code == "INVALID_ARGUMENT"
            assert complaint in str(error)

    run(test())


def test_an_id_in_use_and_a_full_house_are_refused(folder: Path) -> None:
    async def test() -> None:
        async with gateway_with(folder, {}, {"d0": silent}, max_in_flight=1, max_queued=0) as under_test:
            call = asyncio.create_task(refusal(under_test, request_id="mine"))
            await under_test.workers["d0"].next_request()
            assert (await refusal(under_test, request_id="mine")).code == "INVALID_ARGUMENT"
            assert (await refusal(under_test)).code == "RESOURCE_EXHAUSTED"
            await under_test.client.abort("mine")
            assert (await call).code == "ABORTED"

    run(test())


def test_without_workers_a_request_is_unavailable_and_says_why(folder: Path) -> None:
    async def test() -> None:
        async with gateway_with(folder, {"p0": silent}, {}, placement_timeout_s=0.5) as under_test:
            complaint = str(await refusal(under_test))
            assert complaint == "UNAVAILABLE: no decode worker is available; waited 0.5 s for one"

    run(test())


def test_c53_required_disaggregation_fails_instead_of_falling_back(folder: Path) -> None:
    async def test() -> None:
        async with gateway_with(folder, {}, {"d0": answering(ANSWER)}, placement_timeout_s=0.5) as under_test:
            assert (await refusal(under_test, mode="disaggregated")).code == "UNAVAILABLE"

    run(test())


def test_c42_a_worker_that_falls_silent_is_lost(folder: Path) -> None:
    async def test() -> None:
        async with gateway_with(folder, {}, {"d0": silent}, placement_timeout_s=0.5) as under_test:
            call = asyncio.create_task(refusal(under_test))
            await under_test.workers["d0"].next_request()
            under_test.workers.pop("d0").stop()
            assert (await call).code == "UNAVAILABLE"
            assert under_test.gateway.num_ready == 0
            description = await under_test.client.describe()
            assert [worker["state"] for worker in description["workers"]] == ["dead"]

    run(test())


def test_a_gateway_that_stood_still_does_not_take_its_workers_for_dead(folder: Path) -> None:
    async def test() -> None:
        async with gateway_with(folder, {}, {"d0": answering(ANSWER)}, network=IMPATIENT) as under_test:
            time.sleep(1.5 * IMPATIENT.peer_timeout_s)  # noqa: ASYNC251 - as after SIGSTOP
            await asyncio.sleep(2 * IMPATIENT.heartbeat_interval_s)
            assert under_test.gateway.num_ready == 1
            assert (await ask(under_test))[-1].completion is not None

    run(test())


def test_a_worker_that_is_heard_again_gets_requests_again_and_forgets_what_it_had(folder: Path) -> None:
    async def test() -> None:
        async with gateway_with(
            folder, {}, {"d0": silent}, network=IMPATIENT, placement_timeout_s=0.5
        ) as under_test:
            worker = under_test.workers["d0"]
            call = asyncio.create_task(refusal(under_test))
            request = await worker.next_request()
            worker.goes_on.clear()
            assert (await call).code == "UNAVAILABLE"
            worker.goes_on.set()
            # Told to abort it by the gateway, or having missed that gateway's signs of life itself.
            assert (await worker.next_abort()).startswith((request.request_id, "client"))
            await under_test.until(lambda: under_test.gateway.num_ready == 1)
            call = asyncio.create_task(refusal(under_test, request_id="again"))
            while not isinstance(await asyncio.to_thread(worker.received.get, True, 10), EngineRequest):
                continue
            await under_test.client.abort("again")
            assert (await call).code == "ABORTED"

    run(test())


def test_health_and_reflection_speak_the_standard_protocols(folder: Path) -> None:
    async def test() -> None:
        async with gateway_with(folder, {}, {"d0": silent}) as under_test:
            target = f"127.0.0.1:{under_test.gateway.grpc_port}"
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

    run(test())


def list_services(target: str) -> set[str]:
    with grpc.insecure_channel(target) as channel:
        return set(ProtoReflectionDescriptorDatabase(channel).get_services())


def test_model_info(folder: Path) -> None:
    async def test() -> None:
        async with gateway_with(folder, {}, {"d0": silent}) as under_test:
            info = await under_test.client.model_info()
            assert (info["model"], info["max_model_len"], info["eos_token_ids"]) == ("tiny", 256, [2])
            assert info["has_chat_template"]

    run(test())
