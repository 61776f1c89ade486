"""Behaviour 34 at the gateway: a request whose prompt does not arrive moves, stays on its decode worker, or is
refused."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from baton.kv import KVTransferParams, OnLoadFailure, TransferRole
from baton.request import EngineRequest, ErrorKind, FinishReason, RequestOutput, StageTimes
from baton.transfer import TransferEvent, TransferEventKind, TransferRecord
from gateway import GatewayError, Tokenizer
from tests.factories.gateway import (
    NETWORK,
    GatewayUnderTest,
    Script,
    failing,
    failure_of,
    gateway_with,
    outputs_of,
    silent,
    tokens_of,
)

ANSWER = [5, 6, 7, 8]


def is_producer(request: EngineRequest) -> bool:
    return request.kv_transfer is not None and request.kv_transfer.role is TransferRole.PRODUCER


def only_from(prefill: str) -> Script:
    """A decode worker that gets prompts from only one prefill worker. It computes the prompts of local requests
    itself."""

    def script(request: EngineRequest) -> list[RequestOutput]:
        if request.kv_transfer is None:
            return outputs_of(request, ANSWER)
        if request.kv_transfer.peer.name == prefill:
            *first, last = outputs_of(request, ANSWER)
            return [*first, with_stages(last, transfer_bytes=100)]
        if request.kv_transfer.on_failure is OnLoadFailure.RECOMPUTE:
            *first, last = outputs_of(request, ANSWER)
            return [*first, with_stages(last, transfer_bytes=0)]
        failure = failure_of(request, ErrorKind.KV_LOAD_FAILED, "the prefill worker was silent")
        failure.stage_times = StageTimes(transfer_s=0.5, transfers=(lost_transfer(request.kv_transfer),))
        return [failure]

    return script


def lost_transfer(transfer: KVTransferParams) -> TransferRecord:
    """A transfer that began a second after the request's arrival, and was given up two seconds later."""
    return TransferRecord(
        role=transfer.role,
        peer=transfer.peer.name,
        attempt=transfer.attempt,
        events=(TransferEvent(TransferEventKind.BEGUN, 1.0), TransferEvent(TransferEventKind.FAILED, 3.0)),
        reason="the prefill worker was silent",
    )


def with_stages(output: RequestOutput, transfer_bytes: int) -> RequestOutput:
    output.stage_times = StageTimes(transfer_bytes=transfer_bytes)
    return output


def handing_over(request: EngineRequest) -> list[RequestOutput]:
    return outputs_of(request, ANSWER[:1], finish=FinishReason.HANDED_OVER)


async def answer(under_test: GatewayUnderTest, **options: Any) -> tuple[list[int], dict[str, Any]]:
    """The tokens that reached the client, and the workers that computed them."""
    events = await under_test.ask(**options)
    assert events[-1].completion is not None
    return tokens_of(events), events[-1].completion.placement


async def paths(under_test: GatewayUnderTest) -> dict[str, int]:
    description = await under_test.client.describe()
    return {path: number for path, number in description["gateway"]["paths"].items() if number}


async def test_c34_retry_asks_another_prefill_worker_and_no_token_is_lost_or_doubled(folder: Path) -> None:
    prefill = {"p0": handing_over, "p1": handing_over}
    decode = {"d0": only_from("p1")}
    async with gateway_with(folder, prefill, decode, routing_policy="round_robin") as under_test:
        for _ in range(2):  # one of the two goes to p0 first
            tokens, placement = await answer(under_test)
            assert tokens == ANSWER
            assert placement["prefill"] == "p1"
        assert await paths(under_test) == {"disaggregated": 2}


async def test_c34_retry_recomputes_where_no_other_prefill_worker_is_left(folder: Path) -> None:
    async with gateway_with(folder, {"p0": handing_over}, {"d0": only_from("nobody")}) as under_test:
        tokens, placement = await answer(under_test)
        assert tokens == ANSWER
        assert (placement["mode"], placement["attempts"]) == ("local", 2)
        assert await paths(under_test) == {"fallback": 1}


async def test_c34_the_transfers_of_attempts_that_failed_are_in_the_timing(folder: Path) -> None:
    prefill = {"p0": handing_over, "p1": handing_over}
    async with gateway_with(folder, prefill, {"d0": only_from("nobody")}) as under_test:
        events = await under_test.ask()
    assert events[-1].completion is not None
    transfers = events[-1].completion.timing["transfers"]
    assert [(end["worker"], end["role"], end["attempt"]) for end in transfers] == [
        ("d0", "consumer", 1),
        ("d0", "consumer", 2),
    ]
    assert {end["peer"] for end in transfers} == {"p0", "p1"}
    offsets = []
    for end in transfers:
        begun, failed = end["events"]
        assert (begun["name"], failed["name"], end["reason"]) == (
            "begun",
            "failed",
            "the prefill worker was silent",
        )
        assert failed["at_s"] - begun["at_s"] == pytest.approx(2.0)
        offsets.append(begun["at_s"] - 1.0)
    assert 0.0 <= offsets[0] < offsets[1] < 10.0, "each attempt counts from the request's arrival"


async def test_c34_the_last_attempt_needs_no_prefill_worker(folder: Path) -> None:
    prefill = {f"p{number}": handing_over for number in range(4)}
    async with gateway_with(folder, prefill, {"d0": only_from("nobody")}) as under_test:
        tokens, placement = await answer(under_test)
        assert tokens == ANSWER
        assert (placement["mode"], placement["attempts"]) == ("local", 3)


async def test_c53_a_required_disaggregation_is_never_recomputed(folder: Path) -> None:
    async with gateway_with(
        folder, {"p0": handing_over}, {"d0": only_from("nobody")}, load_failure_policy="recompute"
    ) as under_test:
        with pytest.raises(GatewayError, match="the prefill worker was silent"):
            await answer(under_test, mode="disaggregated")


async def test_c53_a_prompt_that_the_decode_worker_recomputed_counts_as_fallback(folder: Path) -> None:
    async with gateway_with(
        folder, {"p0": handing_over}, {"d0": only_from("nobody")}, load_failure_policy="recompute"
    ) as under_test:
        tokens, placement = await answer(under_test)
        assert tokens == ANSWER
        assert (placement["mode"], placement["attempts"]) == ("local", 1)
        assert await paths(under_test) == {"fallback": 1}


async def test_c53_a_recomputed_prompt_counts_as_fallback_if_a_stop_string_ends_the_answer(
    folder: Path,
) -> None:
    """The gateway finds the stop string, so the worker's last output never arrives."""

    def script(request: EngineRequest) -> list[RequestOutput]:
        first, *rest = outputs_of(request, ANSWER)[:-1]
        return [with_stages(first, transfer_bytes=0), *rest]

    stop = Tokenizer(folder).decode(ANSWER[2:3], skip_special_tokens=True)
    workers = {"p0": handing_over}, {"d0": script}
    async with gateway_with(folder, *workers, load_failure_policy="recompute") as under_test:
        _, placement = await answer(under_test, sampling={"stop": [stop]})
        assert placement["mode"] == "local"
        assert await paths(under_test) == {"fallback": 1}


@pytest.mark.parametrize("how", ["lost", "failed"])
async def test_c34_recompute_lets_the_decode_worker_go_on_without_its_prefill_worker(
    folder: Path, how: str
) -> None:
    prefill = {"p0": failing(ErrorKind.INTERNAL, "the device failed") if how == "failed" else silent}
    async with gateway_with(folder, prefill, {"d0": silent}, load_failure_policy="recompute") as under_test:
        call = asyncio.create_task(answer(under_test))
        decode = under_test.workers["d0"]
        request = await decode.next_request()
        await under_test.workers["p0"].next_request()
        if how == "lost":
            under_test.gateway.workers.worker_died("p0", "killed by the test")
        *first, last = outputs_of(request, ANSWER)
        decode.say(request, [*first, with_stages(last, transfer_bytes=0)])
        tokens, placement = await call
        assert tokens == ANSWER
        assert placement["attempts"] == 1


async def test_c34_fail_tells_the_client(folder: Path) -> None:
    prefill = {"p0": handing_over, "p1": handing_over}
    async with gateway_with(
        folder, prefill, {"d0": only_from("nobody")}, load_failure_policy="fail"
    ) as under_test:
        with pytest.raises(GatewayError, match=r"gave up after 1 attempt.*the prefill worker was silent"):
            await answer(under_test)


async def test_c51_a_request_ends_if_its_decode_request_ended_before_its_prefill_request(
    folder: Path,
) -> None:
    def ended(request: EngineRequest) -> list[RequestOutput]:
        return outputs_of(request, [0], finish=FinishReason.ABORT)

    workers = ({"p0": silent}, {"d0": ended})
    async with gateway_with(folder, *workers, load_failure_policy="recompute") as under_test:
        call = asyncio.create_task(answer(under_test))
        request = await under_test.workers["p0"].next_request()
        await asyncio.sleep(NETWORK.heartbeat_interval_s)
        under_test.workers["p0"].say(request, ended(request))
        with pytest.raises(GatewayError, match="UNAVAILABLE"):
            await call
