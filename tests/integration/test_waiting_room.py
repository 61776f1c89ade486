"""Requests that no worker has room for, or for which there is no worker at present: they wait in order."""

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from gateway import Tokenizer
from gateway.auth.callers import ANYBODY
from gateway.client import RequestEvent
from tests.factories.gateway import (
    GatewayUnderTest,
    answering,
    beginning,
    gateway_with,
    outputs_of,
    refusal,
    silent,
    tokens_of,
)

ANSWER = [5, 6, 7, 8]


def ask(under_test: GatewayUnderTest, request_id: str, **options: Any) -> "asyncio.Task[list[RequestEvent]]":
    return asyncio.create_task(under_test.ask(request_id=request_id, **options))


async def counted(under_test: GatewayUnderTest) -> tuple[int, int]:
    """The numbers of requests with workers, and of waiting requests. Checks that the end of every other request was
    counted."""
    description = await under_test.client.describe()
    gateway = description["gateway"]
    counters = {name: int(count) for name, count in gateway["counters"].items()}
    ended = sum(counters[name] for name in ("finished", "failed", "rejected", "aborted"))
    assert counters["received"] == ended + gateway["in_flight"] + gateway["queued"]
    return gateway["in_flight"], gateway["queued"]


async def until_all_ended(under_test: GatewayUnderTest) -> None:
    """A client's call may end a moment before its request does."""
    async with asyncio.timeout(60):
        while await counted(under_test) != (0, 0):
            await asyncio.sleep(0.01)


async def until_queued(under_test: GatewayUnderTest, num_queued: int) -> None:
    await under_test.until(lambda: under_test.dispatcher.num_queued == num_queued)


async def test_one_waits_for_the_other_and_is_seen_waiting(folder: Path) -> None:
    async with gateway_with(folder, {}, {"w0": silent}, max_in_flight=1) as under_test:
        first = ask(under_test, "first")
        request = await under_test.workers["w0"].next_request()
        second = ask(under_test, "second")
        await until_queued(under_test, 1)
        assert await counted(under_test) == (1, 1)
        assert under_test.gateway._driver.oldest_queued_s > 0.0
        under_test.workers["w0"].say(request, outputs_of(request, ANSWER))
        assert tokens_of(await first) == ANSWER
        request = await under_test.workers["w0"].next_request()
        assert await counted(under_test) == (1, 0)
        under_test.workers["w0"].say(request, outputs_of(request, ANSWER))
        assert tokens_of(await second) == ANSWER
        await until_all_ended(under_test)


async def test_a_request_waits_for_a_worker_that_is_yet_to_come(folder: Path) -> None:
    async with gateway_with(folder, {}, {}) as under_test:
        call = ask(under_test, "early")
        await until_queued(under_test, 1)
        under_test.add("w0", answering(ANSWER))
        assert tokens_of(await call) == ANSWER


async def test_requests_that_ran_already_come_before_new_ones(folder: Path) -> None:
    async with gateway_with(folder, {}, {"w0": beginning(ANSWER[:2])}, max_in_flight=1) as under_test:
        calls = [ask(under_test, "old")]
        await under_test.workers["w0"].next_request()
        calls.append(ask(under_test, "new"))
        await until_queued(under_test, 1)
        await under_test.until(lambda: under_test.gateway.report().num_first_tokens == 1)
        under_test.gateway.workers.worker_died("w0", "killed by the test")
        await until_queued(under_test, 2)
        w1 = under_test.add("w1", silent)
        order = []
        for _ in calls:
            request = await w1.next_request()
            order.append(len(request.output_token_ids))
            start = len(request.output_token_ids)
            w1.say(request, outputs_of(request, ANSWER[start:], start))
        assert order == [2, 0]
        assert [tokens_of(await call) for call in calls] == [ANSWER] * 2


async def test_a_waiting_request_ends_when_its_client_leaves_or_aborts_it(folder: Path) -> None:
    async with gateway_with(folder, {}, {}) as under_test:
        leaver, aborted, late = (
            ask(under_test, "a"),
            ask(under_test, "b"),
            ask(under_test, "c", timeout_s=3.0),
        )
        await until_queued(under_test, 3)
        leaver.cancel()
        await until_queued(under_test, 2)
        assert await under_test.client.abort("b") == 1
        assert (await refusal(aborted)).code == "ABORTED"
        assert (await refusal(late)).code == "DEADLINE_EXCEEDED"
        await until_queued(under_test, 0)
        await until_all_ended(under_test)


async def test_a_request_without_room_in_time_is_refused_with_a_retry_hint(folder: Path) -> None:
    workers = {"w0": silent}
    async with gateway_with(folder, {}, workers, max_in_flight=1, placement_timeout_s=0.2) as under_test:
        first = ask(under_test, "first")
        await under_test.workers["w0"].next_request()
        error = await refusal(ask(under_test, "second"))
        assert error.code == "RESOURCE_EXHAUSTED"
        assert "no room within 0.2 s: 1 requests are with workers, which is the limit" in str(error)
        await under_test.client.abort("first")
        await refusal(first)
        await until_all_ended(under_test)


async def test_time_in_which_the_gateway_stood_still_is_not_waited(folder: Path) -> None:
    workers = {"w0": silent}
    async with gateway_with(folder, {}, workers, max_in_flight=1, placement_timeout_s=1.0) as under_test:
        first = ask(under_test, "first")
        await under_test.workers["w0"].next_request()
        second = ask(under_test, "second")
        await until_queued(under_test, 1)
        time.sleep(1.5)  # noqa: ASYNC251 - as after SIGSTOP
        await under_test.client.abort("first")
        await refusal(first)
        await under_test.workers["w0"].next_abort()
        await under_test.workers["w0"].next_request()
        await under_test.client.abort("second")
        await refusal(second)


async def test_the_queue_is_bounded(folder: Path) -> None:
    async with gateway_with(folder, {}, {"w0": silent}, max_in_flight=1, max_queued=1) as under_test:
        calls = [ask(under_test, "first")]
        await under_test.workers["w0"].next_request()
        calls.append(ask(under_test, "second"))
        await until_queued(under_test, 1)
        error = await refusal(ask(under_test, "third"))
        assert (error.code, "1 requests wait already" in str(error)) == ("RESOURCE_EXHAUSTED", True)
        assert await counted(under_test) == (1, 1)
        assert await under_test.client.abort("second", "first") == 2
        assert {(await refusal(call)).code for call in calls} == {"ABORTED"}


async def test_a_flood_of_other_requests_keeps_no_urgent_one_out(folder: Path) -> None:
    async with gateway_with(folder, {}, {"w0": silent}, max_in_flight=1, max_queued=3) as under_test:
        worker = under_test.workers["w0"]
        calls = [ask(under_test, "first")]
        request = await worker.next_request()
        flood = [ask(under_test, f"idle-{number}", priority=5) for number in range(4)]
        error = await refusal((await asyncio.wait(flood, return_when=asyncio.FIRST_COMPLETED))[0].pop())
        assert error.code == "RESOURCE_EXHAUSTED"
        urgent = ask(under_test, "urgent", priority=-1)
        await under_test.until(lambda: sum(call.done() for call in flood) == 2)
        errors = [await refusal(call) for call in flood if call.done()]
        assert {error.code for error in errors} == {"RESOURCE_EXHAUSTED"}
        assert all(error.details.retry_after_s for error in errors)
        assert any("a new request is more urgent" in str(error) for error in errors)
        worker.say(request, outputs_of(request, ANSWER))
        request = await worker.next_request()
        assert request.request_id.startswith("urgent")
        worker.say(request, outputs_of(request, ANSWER))
        assert tokens_of(await urgent) == ANSWER
        assert await under_test.client.abort(*(f"idle-{number}" for number in range(4))) == 2
        await asyncio.gather(*calls, *flood, return_exceptions=True)


async def test_as_many_chats_may_come_at_once_as_the_gateway_accepts(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chats wait for a thread that renders their template before they wait in the queue."""
    goes_on, render = threading.Event(), Tokenizer.render_chat

    def held(tokenizer: Tokenizer, *arguments: Any) -> str:
        assert goes_on.wait(30)
        return render(tokenizer, *arguments)

    monkeypatch.setattr(Tokenizer, "render_chat", held)
    workers = {"w0": answering(ANSWER)}
    async with gateway_with(folder, {}, workers, max_in_flight=2, max_queued=298) as under_test:
        messages = [("user", "Hi")]
        calls = [ask(under_test, f"r{number}", text=None, messages=messages) for number in range(300)]
        turns = under_test.gateway._preprocessor.pool._template_threads._turns
        await under_test.until(lambda: len(turns) >= 290 or any(call.done() for call in calls))
        goes_on.set()
        assert {tuple(tokens_of(await call)) for call in calls} == {tuple(ANSWER)}


async def test_a_request_aborted_as_its_worker_is_lost_does_not_wait_for_another(folder: Path) -> None:
    async with gateway_with(folder, {}, {"w0": silent}) as under_test:
        call = ask(under_test, "a")
        await under_test.workers["w0"].next_request()
        under_test.gateway.workers.worker_died("w0", "killed by the test")
        assert under_test.gateway._driver.abort("a", ANYBODY)
        assert (await asyncio.wait_for(refusal(call), 60)).code == "ABORTED"
        await until_all_ended(under_test)
