"""Behaviour 34: how long a producer that says nothing is waited for."""

import pytest

from kv_transfer.protocol.effects import Failed, RankTransfer, Received
from kv_transfer.protocol.messages import TransferKey
from kv_transfer.protocol.waits import Waits
from tests.factories.transfer import HEARTBEAT_S, PEER_TIMEOUT_S, Frame, Wire, make_key, start


def mute_producer(frame: Frame) -> list[Frame]:
    return [] if frame.source == "producer" else [frame]


@pytest.mark.parametrize("has_spoken", [False, True])
def test_c34_a_silent_producer_is_given_up_after_the_timeout_and_not_before(has_spoken: bool) -> None:
    wire = Wire() if has_spoken else Wire(mute_producer)
    start(wire)
    wire.tamper = mute_producer
    steps = int(PEER_TIMEOUT_S / HEARTBEAT_S)
    for _ in range(steps):
        wire.advance(HEARTBEAT_S)
        assert wire.notifications == []
    wire.advance(HEARTBEAT_S)
    [notification] = wire.notifications
    assert isinstance(notification, Failed)
    assert "silent" in notification.reason


def test_c34_a_producer_that_always_answered_is_given_up_earlier() -> None:
    waits, key, later, stranger = Waits(0.5, 5.0), make_key("a"), make_key("b"), make_key(producer="p-2")

    def question(key: TransferKey, now: float) -> tuple[float, float]:
        """Begins to wait now. Returns the silence of the producer one heartbeat later, and the limit for this
        silence."""
        waits.ask_later(key, now)
        [(asked, silent_s, limit_s)] = waits.pop_questions(now + 0.5)
        assert asked == key
        return silent_s, limit_s

    waits.begin(key, 0.0)
    for beat in range(1, 12):
        assert question(key, beat / 2 - 0.5) == (0.5, 5.0), "it is not known for long"
        waits.on_message(key, beat / 2)
    assert question(key, 5.5) == (0.5, 2.0)
    waits.end(key)
    waits.begin(later, 7.5)
    waits.begin(stranger, 7.5)
    assert question(later, 7.5) == (0.5, 2.0)
    assert question(stranger, 7.5) == (0.5, 5.0)
    waits.end(later)
    for beat in range(16, 140):
        waits.pop_overdue(beat / 2)
    waits.begin(later, 70.0)
    assert question(later, 70.0) == (0.5, 5.0), "it is forgotten"


def test_c34_the_silence_of_an_earlier_leg_is_not_held_against_a_new_one() -> None:
    wire = Wire()
    wire.begin_send(make_key("a"), 16, "a")
    wire.begin_load(make_key("a"), 16, "a")
    wire.deliver()
    wire.at_producer(wire.producer.abort(RankTransfer("a"), "the prefill failed", False))
    wire.deliver()  # the scheduler will learn of it when it has room for the request
    wire.advance(100.0)
    wire.tamper = mute_producer
    wire.begin_send(make_key("b"), 16, "b")
    wire.begin_load(make_key("b"), 16, "b")
    wire.deliver()
    wire.advance(HEARTBEAT_S)
    wire.tamper = lambda frame: [frame]
    wire.at_consumer(wire.consumer.load(RankTransfer("b"), 0, (200,), wire.clock.now()))
    wire.ready(0, 1, "b")
    wire.finish_send("b")
    wire.deliver()
    assert any(
        isinstance(notification, Received) and notification.rank_transfer == RankTransfer("b")
        for notification in wire.notifications
    )


def test_c34_a_standstill_of_the_consumer_itself_is_no_silence_of_the_producer() -> None:
    wire = Wire()
    start(wire, num_blocks=3)
    wire.ready(0, 1)
    wire.deliver()
    wire.clock.advance(3 * PEER_TIMEOUT_S)  # SIGSTOP, a suspended laptop
    wire.at_consumer(wire.consumer.on_time(wire.clock.now()))
    assert wire.notifications == [], "no producer could answer"
    wire.deliver()
    wire.ready(1, 2)
    wire.finish_send()
    wire.deliver()
    assert isinstance(wire.notifications[0], Received)
