"""The control server without sockets: which calls it opens, refuses or drops, and one WaitView for all gateways."""

import asyncio

import msgpack
import pytest

from baton.errors import BatonError, ClusterError, FleetEnded
from baton.fleet import FleetView
from baton.messages.control import CONTROL_PLANE_VERSION, DescribeFleet, WaitView
from baton.messages.control_codec import (
    MAX_MESSAGE_BYTES,
    CallFrame,
    FailureFrame,
    read_reply,
    write_call,
)
from cluster.control_api import follower
from cluster.control_api import server as module
from cluster.control_api.calls import CONTROL_CODEC
from cluster.control_api.server import OpenCalls, ViewCache
from cluster.control_api.server_socket import MAX_CALLS_OF_ONE
from tests.factories.viewed_control import ViewedControl

PEER, OTHER = b"peer", b"other"


def frame(number: int = 1, timeout_s: float = 1.0) -> bytes:
    return write_call(CONTROL_CODEC.frame(number, timeout_s, DescribeFleet()))


def refusal(reply: CallFrame | bytes | None) -> BatonError:
    assert isinstance(reply, bytes)
    failure = read_reply(reply)
    assert isinstance(failure, FailureFrame)
    return failure.failure.to_error()


def test_a_call_is_open_until_it_is_closed() -> None:
    calls = OpenCalls()
    assert calls.open_call(PEER, [frame(7)]) == CONTROL_CODEC.frame(7, 1.0, DescribeFleet())
    assert calls.num_open == 1
    calls.close_call(PEER, 7)
    assert calls.num_open == 0


def test_one_connection_has_so_many_calls_and_others_have_theirs() -> None:
    calls = OpenCalls()
    for number in range(MAX_CALLS_OF_ONE):
        assert isinstance(calls.open_call(PEER, [frame(number)]), CallFrame)
    assert "too many open calls" in str(refusal(calls.open_call(PEER, [frame(1000)])))
    assert isinstance(calls.open_call(OTHER, [frame(1)]), CallFrame)
    calls.close_call(PEER, 0)
    assert isinstance(calls.open_call(PEER, [frame(1001)]), CallFrame)


def test_all_connections_together_have_so_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_CALLS", 2)
    calls = OpenCalls()
    assert isinstance(calls.open_call(b"a", [frame()]), CallFrame)
    assert isinstance(calls.open_call(b"b", [frame()]), CallFrame)
    refusal(calls.open_call(b"c", [frame()]))
    assert calls.num_open == 2


def test_a_number_that_is_under_way_is_no_second_call() -> None:
    calls = OpenCalls()
    calls.open_call(PEER, [frame()])
    assert calls.open_call(PEER, [frame()]) is None
    assert (calls.num_bad_messages, calls.num_open) == (1, 1)


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b""],
        [b"\x00"],
        [frame(), frame()],
        [msgpack.packb(["DescribeFleet"])],
        [msgpack.packb(["Call", CONTROL_PLANE_VERSION, 1, -1.0, b""])],
        [msgpack.packb(["Call", CONTROL_PLANE_VERSION, 1, float("nan"), b""])],
        [msgpack.packb(["Call", CONTROL_PLANE_VERSION, 1, 1.0, "text"])],
        [b"x" * (MAX_MESSAGE_BYTES + 1)],
    ],
)
def test_what_is_no_call_is_counted_and_nothing_else(frames: list[bytes]) -> None:
    calls = OpenCalls()
    assert calls.open_call(PEER, frames) is None
    assert (calls.num_bad_messages, calls.num_open) == (1, 0)


def test_a_call_of_another_version_is_refused_by_its_number() -> None:
    theirs = msgpack.packb(["Call", 99, 5, "whatever they do there"])
    reply = OpenCalls().open_call(PEER, [theirs])
    assert "version 99 of the control plane" in str(refusal(reply))
    assert isinstance(reply, bytes)
    assert read_reply(reply).number == 5


def view(version: int) -> FleetView:
    return FleetView("incarnation", version, ())


async def test_many_readers_are_one_question() -> None:
    controller = ViewedControl()
    cache = ViewCache(controller)
    running = asyncio.create_task(cache.run())
    readers = [asyncio.create_task(cache.wait_view(WaitView("", -1, 10.0))) for _ in range(5)]
    controller.answers.put_nowait(view(1))
    assert await asyncio.gather(*readers) == [view(1)] * 5
    assert await cache.wait_view(WaitView("", -1, 10.0)) == view(1)
    later = asyncio.create_task(cache.wait_view(WaitView("incarnation", 1, 10.0)))
    await asyncio.sleep(0)
    assert not later.done()
    controller.answers.put_nowait(view(1))  # no news
    controller.answers.put_nowait(view(2))
    assert await later == view(2)
    assert controller.asked[:2] == [("", -1), ("incarnation", 1)]
    running.cancel()


async def test_a_wait_without_a_change_returns_the_same_view() -> None:
    controller = ViewedControl()
    cache = ViewCache(controller)
    running = asyncio.create_task(cache.run())
    with pytest.raises(ClusterError, match="not answered yet"):
        await cache.wait_view(WaitView("", -1, 0.01))
    controller.answers.put_nowait(view(1))
    await cache.wait_view(WaitView("", -1, 10.0))
    assert await cache.wait_view(WaitView("incarnation", 1, 0.01)) == view(1)
    running.cancel()


async def test_a_controller_that_is_away_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower, "RETRY_S", 0.0)

    controller = ViewedControl()
    cache = ViewCache(controller)
    running = asyncio.create_task(cache.run())
    for said in (view(1), ClusterError("away"), ClusterError("away")):
        controller.answers.put_nowait(said)
    assert await cache.wait_view(WaitView("", -1, 10.0)) == view(1)
    controller.answers.put_nowait(view(2))
    assert await cache.wait_view(WaitView("incarnation", 1, 10.0)) == view(2)
    running.cancel()


async def test_present_and_later_callers_get_the_end_of_a_fleet() -> None:
    controller = ViewedControl()
    cache = ViewCache(controller)
    running = asyncio.create_task(cache.run())
    waiting = asyncio.create_task(cache.wait_view(WaitView("incarnation", 1, 10.0)))
    controller.answers.put_nowait(view(1))
    controller.answers.put_nowait(FleetEnded("an orphan"))
    with pytest.raises(FleetEnded, match="an orphan"):
        await running
    for reader in (waiting, cache.wait_view(WaitView("", -1, 10.0))):
        with pytest.raises(FleetEnded, match="an orphan"):
            await reader
