"""Behaviours 51 to 53 at the gateway: a request that loses its worker continues elsewhere, after the client's
tokens."""

import asyncio
import time
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import pytest

from baton.request import (
    EngineRequest,
    ErrorKind,
    OnPreemption,
    RequestOutput,
)
from baton.worker import WorkerState
from gateway import GatewayError
from gateway.client import RequestEvent
from tests.factories.gateway import (
    NETWORK,
    GatewayUnderTest,
    Script,
    answering,
    beginning,
    failing,
    failure_of,
    gateway_with,
    outputs_of,
    silent,
    tokens_of,
)
from tests.factories.models import make_tokenizer
from worker import suspect_turns

TOKENIZER = make_tokenizer()
TEXT = "The cache is the baton"
ANSWER = TOKENIZER.encode(TEXT).ids
HALF = len(ANSWER) // 2


half = beginning(ANSWER[:HALF])
half_and_back = failing(ErrorKind.GIVEN_BACK, "the worker drains", after=ANSWER[:HALF])


HAS_BEGUN: WeakKeyDictionary[asyncio.Task[Any], asyncio.Event] = WeakKeyDictionary()
"""Set once the client of this call of `ask` has something: what its worker sent with it is at the gateway, too."""


async def ask(under_test: GatewayUnderTest, **options: Any) -> list[RequestEvent]:
    events = []
    async for event in under_test.client.generate(text="Hello", **options):
        events.append(event)
        begun(asyncio.current_task()).set()
    return events


def begun(call: asyncio.Task[Any] | None) -> asyncio.Event:
    assert call is not None
    return HAS_BEGUN.setdefault(call, asyncio.Event())


async def lose(
    under_test: GatewayUnderTest, worker: str, call: "asyncio.Task[list[RequestEvent]]"
) -> EngineRequest:
    """Waits until the worker has sent half of the answer, and removes the worker. Returns the request that it had."""
    request = await under_test.workers[worker].next_request()
    await begun(call).wait()
    assert not call.done()
    under_test.gateway.workers.worker_died(worker, "killed by the test")
    return request


async def counters(under_test: GatewayUnderTest) -> dict[str, int]:
    description = await under_test.client.describe()
    return {name: int(count) for name, count in description["gateway"]["counters"].items() if int(count)}


async def test_c52_a_request_goes_on_elsewhere_behind_the_tokens_that_the_client_has(folder: Path) -> None:
    async with gateway_with(folder, {}, {"w0": half}) as under_test:
        call = asyncio.create_task(ask(under_test, sampling={"max_tokens": 20}))
        first = await lose(under_test, "w0", call)
        second = await under_test.add("w1", answering(ANSWER)).next_request()
        events = await call
        assert tokens_of(events) == ANSWER
        assert "".join(event.text for event in events) == TEXT
        assert first.output_token_ids == ()
        assert second.output_token_ids == tuple(ANSWER[:HALF])
        assert second.prompt_token_ids == first.prompt_token_ids
        assert second.sampling_params == first.sampling_params, "counted from position 0, with the same seed"
        assert second.sampling_params.seed is not None
        assert second.request_id != first.request_id
        completion = events[-1].completion
        assert completion is not None
        assert completion.placement["attempts"] == 2
        assert completion.usage["completion_tokens"] == len(ANSWER)
        assert await counters(under_test) == {"received": 1, "finished": 1, "migrated_lost": 1} | {
            "finished_fallback: no prefill worker": 1
        }


async def test_c52_a_process_that_is_gone_is_noticed_long_before_its_silence_is(folder: Path) -> None:
    async with gateway_with(folder, {}, {"w0": half}) as under_test:
        call = asyncio.create_task(ask(under_test))
        await under_test.workers["w0"].next_request()
        w1 = under_test.add("w1", answering(ANSWER))
        await under_test.until(lambda: len(under_test.gateway.workers.statuses) == 2)
        gone_at = time.monotonic()
        under_test.workers.pop("w0").stop()
        await w1.next_request()
        assert time.monotonic() - gone_at < NETWORK.peer_timeout_s / 2
        assert tokens_of(await call) == ANSWER
        description = await under_test.client.describe()
        assert [worker["state"] for worker in description["workers"]] == ["dead", "ready"]


async def test_c52_each_attempt_has_a_hand_over_of_its_own(folder: Path) -> None:
    prefill: dict[str, Script] = {"w0": answering(ANSWER)}
    async with gateway_with(folder, prefill, {"w1": half_and_back, "w2": answering(ANSWER)}) as under_test:
        events = [await ask(under_test) for _ in range(2)]  # one of the two goes to w1 first
        assert [tokens_of(answer) for answer in events] == [ANSWER, ANSWER]
        w0 = under_test.workers["w0"]
        received = [w0.received.get() for _ in range(w0.received.qsize())]
        transfers = [request.kv_transfer for request in received if isinstance(request, EngineRequest)]
        resumed = [
            request for request in received if isinstance(request, EngineRequest) and request.output_token_ids
        ]
        assert {request.output_token_ids for request in resumed} == {tuple(ANSWER[:HALF])}
        assert [request.kv_transfer.attempt for request in resumed if request.kv_transfer] == [1] * len(
            resumed
        )
        assert len({transfer.transfer_id for transfer in transfers if transfer}) == len(transfers)
        kept = {request.on_preemption for request in received if isinstance(request, EngineRequest)}
        assert kept == {OnPreemption.RESUME}, "a prompt is computed where it was begun"


async def test_c52_a_stop_string_may_begin_on_one_worker_and_end_on_another(folder: Path) -> None:
    first, second = ANSWER[:HALF], ANSWER[HALF:]
    stop = TOKENIZER.decode(first)[-2:] + TOKENIZER.decode(second)[:2]
    assert TEXT.count(stop) == 1, "the stop string lies across the seam"
    async with gateway_with(folder, {}, {"w0": half}) as under_test:
        call = asyncio.create_task(ask(under_test, sampling={"stop": [stop]}))
        await lose(under_test, "w0", call)
        under_test.add("w1", answering(ANSWER))
        events = await call
        assert "".join(event.text for event in events) == TEXT[: TEXT.index(stop)]
        assert events[-1].completion is not None
        assert events[-1].completion.finish_reason == "stop"


async def test_c52_late_outputs_of_a_lost_worker_reach_no_client(folder: Path) -> None:
    """Neither does a token whose predecessors never came: a new computation may give another token."""

    def with_a_gap(request: EngineRequest) -> list[RequestOutput]:
        outputs = outputs_of(request, [ANSWER[0], 77, 78], finish=None)
        return [outputs[0], outputs[2]]

    async with gateway_with(folder, {}, {"w0": with_a_gap}) as under_test:
        call = asyncio.create_task(ask(under_test))
        late = await under_test.workers["w0"].next_request()
        w1 = under_test.add("w1", silent)
        await under_test.until(lambda: len(under_test.gateway.workers.statuses) == 2)
        under_test.workers["w0"].say(late, [failure_of(late, ErrorKind.GIVEN_BACK, "no blocks")])
        request = await w1.next_request()
        assert request.output_token_ids == tuple(ANSWER[:1])
        under_test.workers["w0"].say(late, outputs_of(late, [66, 67], start=1))
        await asyncio.sleep(0.1)
        w1.say(request, outputs_of(request, ANSWER[1:], start=1))
        assert tokens_of(await call) == ANSWER


async def test_c52_a_request_whose_last_token_came_before_the_loss_is_complete(folder: Path) -> None:
    """Only the report of its end was lost, and no worker is left to ask."""
    async with gateway_with(folder, {}, {"w0": half}) as under_test:
        call = asyncio.create_task(ask(under_test, sampling={"max_tokens": HALF}))
        await lose(under_test, "w0", call)
        events = await call
        assert tokens_of(events) == ANSWER[:HALF]
        assert events[-1].completion is not None
        assert events[-1].completion.finish_reason == "length"


async def test_c51_a_request_that_every_worker_fails_ends_after_three_in_a_row(folder: Path) -> None:
    decode = {"w0": failing(ErrorKind.INTERNAL, "the device has failed")}
    async with gateway_with(folder, {}, decode) as under_test:
        with pytest.raises(GatewayError, match=r"gave up after 3 attempt.*the device has failed"):
            await ask(under_test)
        assert await counters(under_test) == {"received": 1, "failed": 1, "migrated_failed": 2}


async def test_c52_a_failure_that_is_made_good_by_the_same_worker_is_not_the_clients(folder: Path) -> None:
    def once_in_a_while(request: EngineRequest) -> list[RequestOutput]:
        start = len(request.output_token_ids)
        if start == len(ANSWER) - 1:
            return outputs_of(request, ANSWER[start:], start)
        token = outputs_of(request, ANSWER[start : start + 1], start, finish=None)
        return [*token, failure_of(request, ErrorKind.INTERNAL, "the step failed")]

    async with gateway_with(folder, {}, {"w0": once_in_a_while}) as under_test:
        events = await ask(under_test)
        assert tokens_of(events) == ANSWER
        assert len(ANSWER) > 3, "more failures than may come in a row"


async def test_c51_a_request_that_kills_its_workers_ends(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suspect_turns, "SUSPECT_TURN_S", 0.1)  # a worker that died would not wait for its end
    async with gateway_with(folder, {}, {"w0": silent}) as under_test:
        w0, call = under_test.workers["w0"], asyncio.create_task(ask(under_test))
        while not call.done():  # an attempt may end before it is sent: not all reach the worker
            if w0.received.empty():
                await asyncio.sleep(0.01)
            elif isinstance(w0.received.get(), EngineRequest):
                under_test.gateway.workers.worker_died("w0", "killed by the test")
                under_test.gateway.workers.add_worker(w0.endpoint)
        with pytest.raises(GatewayError, match="5 workers ended one after another"):
            await call


async def test_c51_a_new_connection_to_a_worker_ends_what_it_did_over_the_former_one(folder: Path) -> None:
    """The Hello of the new connection ends the request, not an abort: outside a session, an abort would be dropped,
    but still counted."""
    async with gateway_with(folder, {}, {"w0": silent}) as under_test:
        w0, call = under_test.workers["w0"], asyncio.create_task(ask(under_test))
        await w0.next_request()
        under_test.gateway.workers.worker_died("w0", "the test says so")
        under_test.gateway.workers.add_worker(w0.endpoint)
        assert (await w0.next_abort()).startswith("client")
        again = await w0.next_request()
        w0.say(again, outputs_of(again, ANSWER))
        assert tokens_of(await call) == ANSWER
        assert w0._server.num_bad_messages == 0


async def test_c36_a_request_is_given_back_twice_and_then_stays(folder: Path) -> None:
    given_back: list[EngineRequest] = []

    def without_room(request: EngineRequest) -> list[RequestOutput]:
        given_back.append(request)
        if request.on_preemption is OnPreemption.RESUME:
            start = len(request.output_token_ids)
            return outputs_of(request, ANSWER[start:], start)
        return [failure_of(request, ErrorKind.GIVEN_BACK, "out of blocks")]

    async with gateway_with(folder, {}, {"w0": without_room, "w1": without_room}) as under_test:
        assert tokens_of(await ask(under_test)) == ANSWER
        assert [request.on_preemption for request in given_back] == [
            OnPreemption.GIVE_BACK,
            OnPreemption.GIVE_BACK,
            OnPreemption.RESUME,
        ]
        assert (await counters(under_test))["migrated_given_back"] == 2


async def test_c52_a_decode_worker_that_samples_another_token_than_was_delivered_does_not_go_on_behind_it(
    folder: Path,
) -> None:
    def other(request: EngineRequest) -> list[RequestOutput]:
        if request.kv_transfer is None:
            return answering(ANSWER)(request)
        return []

    async with gateway_with(
        folder, {"w0": answering(ANSWER)}, {"w1": other}, load_failure_policy="recompute"
    ) as under_test:
        call = asyncio.create_task(ask(under_test))
        request = await under_test.workers["w1"].next_request()
        await under_test.workers["w0"].next_request()
        await begun(call).wait()
        under_test.gateway.workers.worker_died("w0", "killed by the test")
        under_test.workers["w1"].say(request, outputs_of(request, [ANSWER[0] + 1, 9, 9], finish=None))
        assert await under_test.workers["w1"].next_abort() == request.request_id
        second = await under_test.workers["w1"].next_request()
        assert second.output_token_ids == tuple(ANSWER[:1])
        assert tokens_of(await call) == ANSWER


async def test_c34_a_drain_of_the_prefill_worker_fails_no_request_though_the_decode_worker_reports_first(
    folder: Path,
) -> None:
    """Policy `fail`: the transfer ends with the prompt, and the consumer may be first to report it."""
    workers = ({"w0": silent}, {"w1": silent})
    async with gateway_with(folder, *workers, load_failure_policy="fail") as under_test:
        call = asyncio.create_task(ask(under_test))
        w0, w1 = under_test.workers["w0"], under_test.workers["w1"]
        to_decode, to_prefill = await w1.next_request(), await w0.next_request()
        w1.say(to_decode, [failure_of(to_decode, ErrorKind.KV_LOAD_FAILED, "no prompt")])
        assert await w0.next_abort() == to_prefill.request_id
        w0.say(to_prefill, [failure_of(to_prefill, ErrorKind.GIVEN_BACK, "the worker drains")])
        again = await w1.next_request()
        w1.say(again, outputs_of(again, ANSWER))
        assert tokens_of(await call) == ANSWER


async def test_c34_whom_a_leaving_prefill_worker_did_not_even_refuse_goes_on_elsewhere(folder: Path) -> None:
    """Policy `fail`: the request was on its way when the worker's port closed. No rollout fails a request."""
    workers: tuple[dict[str, Script], dict[str, Script]] = ({"w0": silent}, {"w1": silent})
    async with gateway_with(folder, *workers, load_failure_policy="fail") as under_test:
        call = asyncio.create_task(ask(under_test))
        w0, w1 = under_test.workers["w0"], under_test.workers["w1"]
        await w1.next_request()
        await w0.next_request()
        w0.state = WorkerState.DRAINING
        client = under_test.gateway.workers.client("w0")
        assert client is not None
        await under_test.until(lambda: client.status is not None and client.status.state is w0.state)
        under_test.gateway.workers.worker_died("w0", "its process has ended")
        assert await w1.next_abort()
        again = await w1.next_request()
        w1.say(again, outputs_of(again, ANSWER))
        assert tokens_of(await call) == ANSWER
