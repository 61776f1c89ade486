"""Which calls a control server opens, and which it refuses or drops; no sockets."""

import msgpack
import pytest

from baton.errors import BatonError
from baton.messages.control import FLEET_PLANE_VERSION, DescribeFleet
from baton.messages.control_codec import (
    MAX_MESSAGE_BYTES,
    CallFrame,
    FailureFrame,
    read_reply,
    write_call,
)
from cluster.control_api import open_calls as module
from cluster.control_api.calls import CONTROL_CODEC
from cluster.control_api.open_calls import OpenCalls

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
    for number in range(module.MAX_CALLS_OF_ONE):
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
        [msgpack.packb(["Call", FLEET_PLANE_VERSION, 1, -1.0, b""])],
        [msgpack.packb(["Call", FLEET_PLANE_VERSION, 1, float("nan"), b""])],
        [msgpack.packb(["Call", FLEET_PLANE_VERSION, 1, 1.0, "text"])],
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
    assert "version 99 of the fleet plane" in str(refusal(reply))
    assert isinstance(reply, bytes)
    assert read_reply(reply).number == 5
