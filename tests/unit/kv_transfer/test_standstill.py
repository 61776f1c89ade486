"""A rank that stood still does not count this time against its peers. The silence of producers is in
test_silence.py."""

import pytest

from baton.system.standstill import Standstill
from kv_transfer.protocol.effects import Failed, Freed, RankTransfer, Received
from kv_transfer.protocol.producer import MAX_EARLY_LEASES
from kv_transfer.protocol.timers import Timers
from tests.factories.hand_overs import send_all
from tests.factories.transfer import HEARTBEAT_S, KEY, LEASE_S, LOAD_TIMEOUT_S, Frame, Wire, start

STOOD_S = 10 * LEASE_S


def freed(wire: Wire) -> bool:
    return any(isinstance(notification, Freed) for notification in wire.notifications)


def mute_consumer(frame: Frame) -> list[Frame]:
    return [frame] if frame.source == "producer" else []


def hold_a_lease(wire: Wire) -> None:
    """The prompt is computed, and its reader, whose scheduler has no room yet, asks to keep it."""
    wire.begin_send(KEY, 16)
    wire.begin_load(KEY, 16)
    wire.deliver()
    send_all(wire, 1)


def wake_producer(wire: Wire) -> None:
    """The producer does what is due, before it has read any message."""
    wire.clock.advance(STOOD_S)
    wire.at_producer(wire.producer.on_time(wire.clock.now()))


@pytest.mark.parametrize("lasted_s", [0.0, LEASE_S / 2])
def test_c38_a_lease_outlives_a_standstill_of_its_producer(lasted_s: float) -> None:
    wire = Wire()
    hold_a_lease(wire)
    wire.advance(lasted_s)
    wake_producer(wire)
    assert not freed(wire), "its reader may have spoken meanwhile"
    wire.load(0, 1)
    wire.deliver()
    assert any(isinstance(notification, Received) for notification in wire.notifications)
    assert freed(wire)


def test_c38_a_reader_that_died_meanwhile_is_noticed_within_a_lease() -> None:
    wire = Wire(mute_consumer)
    wire.begin_send(KEY, 16)
    wire.ready(0, 1)
    wire.finish_send()
    wake_producer(wire)
    assert not freed(wire)
    wire.advance(LEASE_S)
    assert freed(wire)


def test_c38_a_sign_of_life_after_a_standstill_is_worth_one_lease() -> None:
    wire = Wire()
    hold_a_lease(wire)
    wire.clock.advance(STOOD_S)
    wire.at_consumer(wire.consumer.on_time(wire.clock.now()))
    wire.deliver()
    wire.tamper = mute_consumer
    wire.advance(LEASE_S - 0.1)
    assert not freed(wire)
    wire.advance(0.2)
    assert freed(wire)


def test_c38_a_consumer_that_spoke_first_waits_on_for_an_engine_that_stood_still() -> None:
    wire = Wire()
    wire.begin_load(KEY, 16)
    wire.deliver()
    wire.advance(HEARTBEAT_S)
    wire.clock.advance(MAX_EARLY_LEASES * LEASE_S)
    wire.at_producer(wire.producer.on_time(wire.clock.now()))
    wire.at_consumer(wire.consumer.on_time(wire.clock.now()))
    wire.deliver()
    assert len(wire.producer) == 1
    wire.advance(MAX_EARLY_LEASES * LEASE_S)
    assert wire.producer_counters["kv_sends_started"] == len(wire.producer) == 0, "but not for ever"


def test_c36_a_load_has_its_time_beside_a_standstill_of_the_consumer() -> None:
    wire = Wire()
    start(wire, num_blocks=2)
    wire.advance(HEARTBEAT_S)
    wire.clock.advance(2 * LOAD_TIMEOUT_S)
    wire.at_consumer(wire.consumer.on_time(wire.clock.now()))
    assert wire.notifications == []
    wire.advance(LOAD_TIMEOUT_S)
    [notification] = wire.notifications
    assert isinstance(notification, Failed)
    assert "did not arrive" in notification.reason


def test_c36_a_consumer_that_stood_still_learns_that_its_lease_is_over() -> None:
    wire = Wire()
    hold_a_lease(wire)
    wire.tamper = lambda _: []
    for _ in range(8):
        wire.clock.advance(LEASE_S / 4)
        wire.at_producer(wire.producer.on_time(wire.clock.now()))
    assert freed(wire)
    wire.tamper = lambda frame: [frame]
    wire.load(0, 1)
    wire.deliver()
    assert isinstance(wire.notifications[-1], Failed)
    assert wire.notifications[-1].rank_transfer == RankTransfer("r")


def test_deadlines_are_put_off_by_standstills_and_by_nothing_else() -> None:
    standstill = Standstill(1.0)
    timers: Timers[str] = Timers(standstill)
    standstill.look(100.0)
    timers.set("early", 104.0)
    timers.set("late", 110.0)
    assert timers.next() == 101.0, "it has to look before that"
    assert timers.pop_due(101.0) == timers.pop_due(102.0) == []
    assert timers.pop_due(122.0) == [], "of 20 s one counts"
    timers.set("new", 122.5)
    assert timers.next() == 122.5
    assert timers.pop_due(122.5) == ["new"]
    assert timers.pop_due(123.0) == ["early"]
    assert timers.pop_due(128.0) == [], "nor do 4 of these 5"
    assert timers.next() == 129.0, "the late one is still to come"
