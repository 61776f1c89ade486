"""UnreadAnswer: deltas that wait for their reader are merged, in order and bounded. RequestDriver: what it leaves
behind, and which commands it sends."""

import asyncio
import itertools

import pytest

from baton.clock import SystemClock
from baton.config import GatewayConfig, NetworkConfig
from baton.errors import GatewayStopping, RequestAborted, SlowReader, WorkerUnavailable
from baton.messages.request_plane import Heartbeat, KVEvents, SessionCommand, SubscribeKVEvents
from baton.request import PackedLogprobs, TokenLogprobs
from baton.system.tasks import end_tasks
from baton.worker import WorkerEndpoint
from gateway import turn_budget
from gateway.requests import driver as driver_module
from gateway.requests.driver import RequestDriver, UnreadAnswer
from gateway.requests.request import Delta
from gateway.routing.placement import RouteQuery
from gateway.workers.worker_client import WorkerClient
from tests.factories.dispatching import make_request
from tests.factories.routing import status


def read(unread: UnreadAnswer) -> Delta:
    return asyncio.run(asyncio.wait_for(unread.read(), 60))


def test_waiting_deltas_are_read_together_and_in_order() -> None:
    unread = UnreadAnswer(100)
    first, second = TokenLogprobs(1, -0.5, 1, ()), TokenLogprobs(2, -0.25, 2, ())
    unread.put(Delta((1,), "a", (first,)))
    unread.put(Delta((2, 3), "bc", (second,)))
    assert read(unread) == Delta((1, 2, 3), "abc", (first, second))
    unread.put(Delta((4,), "d"))
    assert read(unread) == Delta((4,), "d")
    unread.put(Delta((5,), "e", prompt_logprobs=PackedLogprobs.of([first])))
    unread.put(Delta((6,), "f"))
    assert read(unread) == Delta((5, 6), "ef", prompt_logprobs=PackedLogprobs.of([first]))
    unread.put(Delta((7,), "g"))
    assert read(unread) == Delta((7,), "g")


def test_a_fast_reader_waits_for_the_next_delta() -> None:
    async def test() -> Delta:
        unread = UnreadAnswer(100)
        reading = asyncio.create_task(unread.read())
        await asyncio.sleep(0)
        assert not reading.done()
        unread.put(Delta((1,), "a"))
        return await asyncio.wait_for(reading, 60)

    assert asyncio.run(test()) == Delta((1,), "a")


def test_a_failure_is_read_once_after_everything_before_it() -> None:
    unread = UnreadAnswer(100)
    unread.put(Delta((1,), "a"))
    unread.fail(WorkerUnavailable("gone"))
    assert read(unread).token_ids == (1,)
    with pytest.raises(WorkerUnavailable, match="gone"):
        read(unread)


def test_a_cut_off_answer_is_not_read() -> None:
    unread = UnreadAnswer(100)
    unread.put(Delta((1,), "a"))
    unread.fail(WorkerUnavailable("gone"))
    unread.cut_short(WorkerUnavailable("over"))
    with pytest.raises(WorkerUnavailable, match="over"):
        read(unread)


def test_the_unread_part_is_bounded() -> None:
    unread = UnreadAnswer(3)
    unread.put(Delta((1, 2, 3), "abc"))
    assert len(read(unread).token_ids) == 3
    assert unread.put(Delta((1, 2), "ab"))
    assert not unread.put(Delta((3, 4), "cd"))
    with pytest.raises(SlowReader, match="4 tokens of its answer wait, and at most 3 may"):
        read(unread)


async def test_a_bug_on_arrival_leaves_nothing_of_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = RequestDriver(GatewayConfig(), NetworkConfig(), None, b"key", "retry", SystemClock())

    def broken(_: RouteQuery) -> dict[str, int]:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(driver.router, "num_tokens_to_compute", broken)
    try:
        with pytest.raises(ZeroDivisionError):
            await anext(driver.generate(make_request(deadline=SystemClock().now() + 1.0)))
        assert driver.dispatcher.num_in_flight == 0
    finally:
        await driver.stop()


async def test_a_stopping_driver_ends_open_requests_and_refuses_new_ones() -> None:
    driver = RequestDriver(GatewayConfig(), NetworkConfig(), None, b"key", "retry", SystemClock())
    try:
        waiting = asyncio.ensure_future(anext(driver.generate(make_request("waits"))))
        while driver.dispatcher.num_queued == 0:
            await asyncio.sleep(0)
        driver.end_requests()
        for answer in (waiting, anext(driver.generate(make_request("late")))):
            with pytest.raises(GatewayStopping):
                await answer
        assert driver.dispatcher.num_queued == 0
        assert driver.dispatcher.tally.counters["rejected"] == 1
    finally:
        await driver.stop()


async def test_a_request_whose_prompt_is_still_hashed_is_aborted_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = RequestDriver(GatewayConfig(), NetworkConfig(), None, b"key", "retry", SystemClock())
    monkeypatch.setattr(driver_module, "LONG_PROMPT", 1)
    monkeypatch.setattr(turn_budget, "TURN_S", 0.0)
    monkeypatch.setattr(driver.router, "hashing", lambda *_: itertools.repeat(None))  # without end
    first = make_request("asked")
    answers = [first, make_request("asked-1", call_id="asked"), make_request("other")]
    tasks = [asyncio.ensure_future(anext(driver.generate(request))) for request in answers]
    try:
        await asyncio.sleep(0)
        assert not driver.abort("unknown", first.caller)
        assert driver.abort("asked", first.caller)
        for task in tasks[:2]:
            with pytest.raises(RequestAborted, match="request asked was aborted"):
                await task
        assert not driver.abort("asked", first.caller)
        assert not tasks[2].done()
    finally:
        await end_tasks(*tasks)
        await driver.stop()


async def test_each_session_with_a_worker_gets_one_subscription_for_kv_events(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    network = NetworkConfig(security="none")
    driver = RequestDriver(GatewayConfig(), network, None, b"key", "retry", SystemClock())
    sent: list[SessionCommand] = []
    monkeypatch.setattr(WorkerClient, "_send_command", lambda _, command: sent.append(command))
    d0 = status("d0")
    try:
        driver.workers.add_worker(WorkerEndpoint(d0.ref, d0.role, "tcp://127.0.0.1:1", "here", 1))
        client = driver.workers.client("d0")
        assert client is not None
        for session in (1, 2, 3):  # a new session means that the former one is lost
            client._on_heartbeat(Heartbeat(d0, session, 0))
            assert sent == [SubscribeKVEvents(session)], "not in the former session, and not twice"
            sent.clear()
            driver.on_kv_events("d0", KVEvents(0, True, b"", b""))
            client._on_heartbeat(Heartbeat(d0, session, 0))
            assert not sent, "the listing has arrived"
    finally:
        await driver.stop()
