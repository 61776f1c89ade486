"""The connection between two ranks: order, sizes, and how each end notices the other's close."""

import socket
import struct
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import WireError
from engine.ranks import channel as rank_channel
from engine.ranks.channel import RankChannel, frame_of
from engine.ranks.messages import (
    FROM_RANK,
    MAX_PLAN_BYTES,
    TO_RANK,
    FromRank,
    Join,
    Plan,
    Ready,
    StepFailed,
    Stop,
    ToRank,
)
from tests.factories.fake_rank import make_plan
from tests.factories.wire_values import kinds_of

RankZeroEnd = RankChannel[ToRank, FromRank]
RankEnd = RankChannel[FromRank, ToRank]


@pytest.fixture
def ends() -> Iterator[tuple[RankZeroEnd, RankEnd]]:
    ours, theirs = socket.socketpair()
    zero, rank = RankChannel(ours, TO_RANK, FROM_RANK), RankChannel(theirs, FROM_RANK, TO_RANK)
    yield zero, rank
    zero.close()
    rank.close()


@pytest.fixture
def line() -> Iterator[tuple[socket.socket, RankEnd]]:
    """A rank's end, and the bare socket at the other."""
    ours, theirs = socket.socketpair()
    rank = RankChannel(theirs, FROM_RANK, TO_RANK)
    yield ours, rank
    ours.close()
    rank.close()


def send_all(end: RankEnd, messages: Sequence[FromRank]) -> None:
    for message in messages:
        end.send(message)


def test_messages_arrive_whole_and_in_order_both_ways(ends: tuple[RankZeroEnd, RankEnd]) -> None:
    zero, rank = ends
    large = StepFailed(1, "x" * 3_000_000)  # more than the system takes at once
    sender = threading.Thread(target=send_all, args=(rank, [Ready(), large, Ready()]))
    sender.start()
    assert [zero.receive() for _ in range(3)] == [Ready(), large, Ready()]
    sender.join()
    zero.send(Join())
    zero.send(Stop())
    assert [rank.receive(), rank.receive()] == [Join(), Stop()]


def test_a_plan_may_be_larger_than_any_message_of_a_peer(ends: tuple[RankZeroEnd, RankEnd]) -> None:
    """Eighty requests over one document of 131,072 tokens that is in the prefix cache begin in one step."""
    zero, rank = ends
    plan = replace(make_plan(1), preempted_req_ids=frozenset(["x" * 40_000_000]))
    sender = threading.Thread(target=zero.send_frame, args=(frame_of(TO_RANK, Plan(plan)),))
    sender.start()
    assert rank.receive() == Plan(plan)
    sender.join()


def test_messages_of_several_threads_do_not_mix(ends: tuple[RankZeroEnd, RankEnd]) -> None:
    zero, rank = ends
    messages = [StepFailed(step, "x" * 50_000) for step in range(40)]
    threads = [
        threading.Thread(target=send_all, args=(rank, part)) for part in (messages[:20], messages[20:])
    ]
    for thread in threads:
        thread.start()
    received = [zero.receive() for _ in messages]
    for thread in threads:
        thread.join()
    assert sorted(message.step for message in received if isinstance(message, StepFailed)) == list(range(40))


def test_each_end_learns_that_the_other_is_gone(ends: tuple[RankZeroEnd, RankEnd]) -> None:
    zero, rank = ends
    rank.send(Ready())
    rank.close()
    assert zero.receive() == Ready(), "messages sent before still arrive"
    assert zero.receive() is None
    with pytest.raises(BrokenPipeError):
        zero.send(Join())


def test_closing_ends_a_wait_of_ones_own(ends: tuple[RankZeroEnd, RankEnd]) -> None:
    zero, _ = ends
    received: list[FromRank | None] = []
    reader = threading.Thread(target=lambda: received.append(zero.receive()))
    reader.start()
    zero.close()
    reader.join(60.0)
    assert received == [None]


def test_a_message_that_is_cut_off_is_none(line: tuple[socket.socket, RankEnd]) -> None:
    other, rank = line
    other.sendall(struct.pack(">I", 100) + b"half")
    other.close()
    assert rank.receive() is None


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (struct.pack(">I", MAX_PLAN_BYTES + 1), "a rank's message of 1073741825 bytes"),
        (struct.pack(">I", 4) + b"\xc1\xc1\xc1\xc1", "not msgpack"),
    ],
)
def test_what_is_no_message_is_refused(
    line: tuple[socket.socket, RankEnd], data: bytes, complaint: str
) -> None:
    other, rank = line
    other.sendall(data)
    with pytest.raises(WireError, match=complaint):
        rank.receive()


def test_an_end_that_reads_nothing_does_not_hold_up_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_channel, "SEND_TIMEOUT_S", 0.25)
    ours, theirs = socket.socketpair()
    rank: RankEnd = RankChannel(ours, FROM_RANK, TO_RANK)
    with theirs, pytest.raises(BlockingIOError):
        rank.send(StepFailed(1, "x" * 20_000_000))
    rank.close()


@given(st.sampled_from([TO_RANK, FROM_RANK]), st.binary(max_size=300))
def test_hostile_bytes_are_wire_errors(codec: object, data: bytes) -> None:
    assert kinds_of(codec)
    with pytest.raises(WireError):
        codec.decode(data)  # type: ignore[attr-defined]
