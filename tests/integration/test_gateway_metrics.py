"""GET /metrics on a gateway: what a scrape says of requests that came, went, wait and failed."""

import asyncio
from asyncio import ALL_COMPLETED, FIRST_COMPLETED
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics

from baton.config import GatewayConfig
from baton.kv import TransferRole
from baton.request import EngineRequest, ErrorKind, FinishReason, RequestOutput, StageTimes
from baton.transfer import TransferEvent, TransferEventKind, TransferRecord
from baton.worker import RequestCounts
from gateway import GatewayError
from tests.factories.gateway import (
    GatewayUnderTest,
    answering,
    failing,
    failure_of,
    gateway_with,
    outputs_of,
    silent,
)
from tests.factories.metrics import Scrape, read_url


async def scrape(under_test: GatewayUnderTest) -> Scrape:
    return Scrape(await asyncio.to_thread(read_url, url_of(under_test)))


def url_of(under_test: GatewayUnderTest) -> str:
    return f"{under_test.http_url}/metrics"


async def ask(under_test: GatewayUnderTest, num_tokens: int = 3, **sampling: object) -> None:
    await under_test.ask(sampling={"max_tokens": num_tokens, **sampling})


async def test_a_finished_request_is_in_every_histogram(folder: Path) -> None:
    workers = {"p0": answering([5, 6, 7])}, {"d0": answering([5, 6, 7])}
    async with gateway_with(folder, *workers) as under_test:
        before = await scrape(under_test)
        assert before("request_success_total", finished_reason="length") == 0
        await ask(under_test)
        # A call is counted once gRPC has closed it, a moment after its client has read the status.
        now = await _until(under_test, lambda now: now("grpc_calls_total") == 1)
        for name in (
            *("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds"),
            *("request_prefill_time_seconds", "request_decode_time_seconds", "request_prompt_tokens"),
            *(
                "request_generation_tokens",
                "request_time_per_output_token_seconds",
                "handover_gap_seconds",
            ),
        ):
            assert now(f"{name}_count") == 1, name
        assert now("inter_token_latency_seconds_count", model_name="tiny") == 2
        assert now("request_generation_tokens_sum") == now("generation_tokens_total") == 3
        assert now("prompt_tokens_total") == now("request_prompt_tokens_sum") > 0
        assert now("request_success_total", finished_reason="length") == 1
        assert now("requests_total", api="grpc", outcome="finished", caller="anybody") == 1
        assert now("request_paths_total", path="disaggregated") == now("request_attempts_total") == 1
        assert now("grpc_calls_total", method="/baton.v1.GenerationService/Generate", code="OK") == 1
        assert now("http_responses_total", method="GET", route="/metrics", status="200") == 1
        assert now("fleet_workers", role="prefill", state="ready") == now("fleet_workers", state="ready") / 2
        assert now("fleet_kv_blocks", worker="d0") == 999
        assert now("build_info", model_name="tiny") == 1


async def test_c53_by_default_a_prompt_goes_where_it_costs_less_and_clients_and_operators_see_where(
    folder: Path,
) -> None:
    """It goes to an idle decode worker. Then, while this worker has six requests of another gateway, it goes
    to both workers."""
    workers = {"p0": answering([5, 6, 7])}, {"d0": answering([5, 6, 7])}
    async with gateway_with(folder, *workers, routing_mode=GatewayConfig().routing_mode) as under_test:
        prompt, sampling = [*range(5, 55)], {"max_tokens": 3}

        async def mode() -> str:
            events = await under_test.ask(None, token_ids=prompt, sampling=sampling)
            assert events[-1].completion is not None
            return str(events[-1].completion.placement["mode"])

        assert await mode() == "local"
        under_test.workers["d0"].requests = RequestCounts(6, 0, 0)
        router = under_test.gateway._driver.router
        await under_test.until(lambda: router.estimate("d0").num_requests == 6)
        assert await mode() == "disaggregated"
        now = await scrape(under_test)
        assert now("request_paths_total", path="local", reason="idle decode worker") == 1
        assert now("request_paths_total", path="disaggregated", reason="") == 1
        assert now("request_paths_total", path="fallback") == 0
        description = await under_test.client.describe()
        assert description["gateway"]["paths"] == {"disaggregated": 1, "fallback": 0, "local": 1}


async def test_tokens_are_counted_while_the_answer_goes_on(folder: Path) -> None:
    async with gateway_with(folder, {}, {"d0": silent}, max_in_flight=1) as under_test:
        asking = [asyncio.create_task(ask(under_test)) for _ in range(2)]
        request = await under_test.workers["d0"].next_request()
        first, second, third = outputs_of(request, [5, 6, 7])
        under_test.workers["d0"].say(request, [first, first, second])
        await _until(under_test, lambda now: now("generation_tokens_total") == 2)
        now = await scrape(under_test)
        assert now("time_to_first_token_seconds_count") == 1
        assert now("gateway_requests_in_flight") == now("gateway_requests_queued") == 1
        assert now("gateway_oldest_queued_seconds") > 0
        under_test.workers["d0"].say(request, [third])
        request = await under_test.workers["d0"].next_request()
        under_test.workers["d0"].say(request, outputs_of(request, [5, 6, 7]))
        await asyncio.gather(*asking)


async def test_failures_are_counted_by_what_was_wrong(folder: Path) -> None:
    decode = {"d0": failing(ErrorKind.INTERNAL, "out of order")}
    async with gateway_with(folder, {}, decode, placement_timeout_s=5.0) as under_test:
        with pytest.raises(GatewayError):
            await ask(under_test)
        with pytest.raises(GatewayError):
            await ask(under_test, top_p=2.0)
        now = await _until(under_test, lambda now: now("grpc_calls_total") == 2)
        assert now("requests_total", outcome="failed") == 1
        assert now("request_errors_total", error="WorkerUnavailable") == 1
        assert now("request_migrations_total", cause="failed") == now("request_attempts_total") - 1 > 0
        assert now("grpc_calls_total", code="UNAVAILABLE") == 1
        assert now("grpc_calls_total", code="INVALID_ARGUMENT") == 1
        assert now("request_success_total") == 0


async def test_c42_a_pair_without_a_link_is_shown_and_the_next_request_does_not_try_it(folder: Path) -> None:
    def hand_over(request: EngineRequest) -> list[RequestOutput]:
        return outputs_of(request, [5], finish=FinishReason.HANDED_OVER)

    def hear_nothing(request: EngineRequest) -> list[RequestOutput]:
        if request.kv_transfer is None:
            return outputs_of(request, [5, 6, 7])
        record = TransferRecord(
            role=TransferRole.CONSUMER,
            peer="p0",
            attempt=request.kv_transfer.attempt,
            events=(TransferEvent(TransferEventKind.FAILED, 5.0),),
            is_link_failure=True,
        )
        failure = failure_of(request, ErrorKind.KV_LOAD_FAILED, "the prefill worker was silent")
        failure.stage_times = StageTimes(transfers=(record,))
        return [failure]

    async with gateway_with(folder, {"p0": hand_over}, {"d0": hear_nothing}) as under_test:
        assert (await scrape(under_test))("pairs_avoided") == 0
        for num_attempts in (2, 3):
            await ask(under_test)
            now = await scrape(under_test)
            assert (now("pairs_avoided"), now("request_attempts_total")) == (1, num_attempts)
        assert now("request_paths_total", path="fallback", reason="no link to a prefill worker") == 1


async def test_calls_that_there_are_not_are_counted_together(folder: Path) -> None:
    async with gateway_with(folder, {}, {"d0": silent}) as under_test:
        async with grpc.aio.insecure_channel(under_test.grpc_target) as typed_channel:
            channel: Any = typed_channel
            for name in ("/baton.v1.GenerationService/Sing", "/some.Other/Call"):
                with pytest.raises(grpc.aio.AioRpcError, match="Method not found!") as raised:
                    await channel.unary_unary(name)(b"", metadata=(("x-request-id", "mine"),))
                assert dict(raised.value.trailing_metadata())["x-request-id"] == "mine"
        now = await _until(under_test, lambda now: now("grpc_calls_total") == 2)
        assert now("grpc_calls_total", method="(other)", code="UNIMPLEMENTED") == 2


async def test_a_client_that_leaves_has_aborted(folder: Path) -> None:
    async with gateway_with(folder, {}, {"d0": silent}) as under_test:
        asking = asyncio.create_task(ask(under_test))
        await under_test.workers["d0"].next_request()
        asking.cancel()
        await _until(under_test, lambda now: now("requests_total", outcome="aborted") == 1)
        now = await _until(under_test, lambda now: now("grpc_calls_total") == 1)
        assert now("request_success_total", finished_reason="abort") == 1
        assert now("request_errors_total") == 0
        assert now("grpc_calls_total", code="CANCELLED") == 1


async def test_a_deadline_that_passed_is_an_error_though_the_request_was_aborted(folder: Path) -> None:
    async with gateway_with(folder, {}, {"d0": silent}, routing_mode="local") as under_test:
        body = {"model": "tiny", "prompt": "hello", "max_tokens": 3}
        async with under_test.http() as client:
            late = await client.post("/v1/completions", json=body, headers={"x-request-timeout-ms": "500"})
        assert late.status_code == 504
        now = await scrape(under_test)
        assert now("request_errors_total", error="DeadlinePassed") == 1
        assert now("requests_total", outcome="aborted") == 1


async def test_paths_and_methods_that_there_are_not_make_no_series(folder: Path) -> None:
    async with gateway_with(folder, {}, {}) as under_test:
        async with under_test.http() as client:
            for number in range(5):
                await client.request(f"M{number}", f"/nothing/{number}")
        now = await scrape(under_test)
        assert now("http_responses_total", method="(other)", route="(other)", status="404") == 5


async def test_readers_of_openmetrics_get_it(folder: Path) -> None:
    async with gateway_with(folder, {}, {"d0": answering([5])}) as under_test:
        await ask(under_test, 1)
        accept = "application/openmetrics-text; version=1.0.0"
        now = Scrape(await asyncio.to_thread(read_url, url_of(under_test), accept), parse_openmetrics)
        assert now("request_success_total", finished_reason="length") == 1


async def test_the_parts_of_the_time_to_first_token_are_those_of_queue_and_worker(folder: Path) -> None:
    """The second request waits in the queue for the first one; its worker then reports its stages."""

    async with gateway_with(folder, {}, {"d0": silent}, max_in_flight=1) as under_test:
        worker = under_test.workers["d0"]
        asking = [asyncio.create_task(ask(under_test, 2)) for _ in range(2)]
        for number in (1, 2):
            request = await worker.next_request()
            await asyncio.sleep(0.3)
            first, second = outputs_of(request, [5, 6])
            first.stage_times = StageTimes(queue_s=0.1, prefill_s=0.15)
            worker.say(request, [first, second])
            await asyncio.wait(asking, return_when=FIRST_COMPLETED if number == 1 else ALL_COMPLETED)
        await asyncio.gather(*asking)
        now = await scrape(under_test)
        parts = {
            part: now("ttft_part_seconds_sum", part=part)
            for part in (
                "gateway",
                "queue",
                "failed_attempts",
                "worker_queue",
                "transfer_exposed",
                "prefill",
            )
        }
        assert sum(parts.values()) == pytest.approx(now("time_to_first_token_seconds_sum"), abs=2e-3)
        assert parts["worker_queue"] == pytest.approx(0.2)
        assert parts["prefill"] == pytest.approx(0.3)
        assert parts["queue"] > 0.29
        assert parts["gateway"] >= 0.1
        assert parts["failed_attempts"] == parts["transfer_exposed"] == 0.0


async def test_the_time_of_a_failed_attempt_is_a_part_of_its_own(folder: Path) -> None:
    async with gateway_with(folder, {}, {"d0": silent, "d1": silent}) as under_test:
        workers = under_test.workers.values()
        asking = asyncio.create_task(ask(under_test, 1))
        await under_test.until(lambda: any(not worker.received.empty() for worker in workers))
        first = next(worker for worker in workers if not worker.received.empty())
        (second,) = (worker for worker in workers if worker is not first)
        request = await first.next_request()
        await asyncio.sleep(0.2)
        first.say(request, [failure_of(request, ErrorKind.INTERNAL, "out of order")])
        request = await second.next_request()
        (output,) = outputs_of(request, [5])
        output.stage_times = StageTimes(prefill_s=0.001)
        second.say(request, [output])
        await asking
        now = await scrape(under_test)
        assert now("ttft_part_seconds_sum", part="failed_attempts") >= 0.2
        assert now("ttft_part_seconds_sum", part="prefill") == pytest.approx(0.001)
        assert now("ttft_part_seconds_sum") == pytest.approx(now("time_to_first_token_seconds_sum"), abs=2e-3)
        assert now("request_attempts_total") == 2


async def _until(under_test: GatewayUnderTest, condition: Callable[[Scrape], bool]) -> Scrape:
    """The first scrape that meets the condition."""
    async with asyncio.timeout(60):
        while not condition(now := await scrape(under_test)):
            await asyncio.sleep(0.05)
    return now
