"""Postponed loads: a stuck producer reports it, the room is given back, and the load comes later."""

from kv_transfer.protocol.effects import CanLoad, Failed, Freed, Quiesced, RankTransfer, Received
from kv_transfer.protocol.incoming import IncomingState
from kv_transfer.protocol.messages import Ack, Cancel, ChecksumPolicy, End, Hold, Opened, Pieces, Release
from kv_transfer.protocol.transports import SHARED_MEMORY, ZMQ_TCP
from tests.factories.hand_overs import send_all
from tests.factories.transfer import (
    HEARTBEAT_S,
    KEY,
    LEASE_S,
    LOAD_TIMEOUT_S,
    Frame,
    Wire,
    make_key,
    sent,
    start,
)

OTHER = make_key("other")


def starve(wire: Wire, *, is_starved: bool = True) -> None:
    wire.at_producer(wire.producer.note_starvation(is_starved))


def start_stuck(
    *, transport: str = ZMQ_TCP, window_blocks: int = 4, checksums: ChecksumPolicy = ChecksumPolicy.ON
) -> Wire:
    """The consumer has room for three blocks of "r", of which the producer has computed one. It has no room for
    "other", whose prompt is complete."""
    wire = Wire(transport=transport, window_blocks=window_blocks, checksums=checksums)
    wire.begin_send(OTHER, 16, "other")
    wire.begin_load(OTHER, 16, "other")
    wire.ready(0, 1, "other")
    wire.finish_send("other")
    start(wire)
    wire.ready(0, 1)
    return wire


def postponed(num_valid_tokens: int) -> Failed:
    reason = "the prefill worker computes nothing until other prompts are loaded"
    return Failed(RankTransfer("r"), num_valid_tokens, reason, False, is_postponed=True)


def test_c31_a_load_is_put_off_with_what_it_has_and_goes_on_when_the_prompt_is_complete() -> None:
    wire = start_stuck()
    wire.deliver()
    starve(wire)
    wire.deliver()
    assert wire.notifications == [postponed(16)]
    assert sent(wire, Hold)[-1] == Hold(KEY, is_postponed=True)
    starve(wire, is_starved=False)
    wire.ready(1, 2)
    wire.finish_send()
    wire.deliver()
    assert wire.notifications[1:] == [CanLoad(RankTransfer("r"))]
    wire.load(1, 2)
    wire.deliver()
    assert [type(notification) for notification in wire.notifications[2:]] == [Received, Freed]
    assert wire.received_blocks() == {0: 100_000, 1: 101_000, 2: 102_000}
    wire.consumer.check_integrity()
    wire.producer.check_integrity()


def test_c31_nothing_is_put_off_while_a_complete_prompt_is_on_its_way() -> None:
    wire = start_stuck()
    wire.tamper = lambda frame: [] if isinstance(frame.message, Release) else [frame]
    wire.load(0, 1, "other")
    wire.deliver()
    starve(wire)
    wire.deliver()
    assert [type(notification) for notification in wire.notifications] == [Received]


def test_c31_nothing_is_put_off_while_no_prompt_is_complete() -> None:
    wire = Wire()
    start(wire)
    starve(wire)
    wire.advance(5 * HEARTBEAT_S)
    assert wire.notifications == []


def test_c31_nothing_is_put_off_while_others_compute() -> None:
    wire = start_stuck()
    wire.advance(5 * HEARTBEAT_S)
    assert wire.notifications == []


def test_c31_what_is_lost_on_the_way_is_said_again() -> None:
    """Three things are said: that the producer is stuck, that the room was given back, and that the prompt is
    complete."""
    wire = start_stuck()
    wire.deliver()
    wire.tamper = lambda _frame: []
    starve(wire)
    wire.tamper = lambda frame: [frame]
    assert wire.notifications == []
    wire.tamper = lambda frame: [] if isinstance(frame.message, Hold) else [frame]
    wire.advance(HEARTBEAT_S)
    assert wire.notifications == [postponed(16)]
    wire.tamper = lambda frame: [frame]
    wire.advance(HEARTBEAT_S)
    wire.tamper = lambda _frame: []
    wire.ready(1, 2)
    wire.finish_send()
    wire.tamper = lambda frame: [frame]
    wire.advance(HEARTBEAT_S)
    assert wire.notifications[1:] == [CanLoad(RankTransfer("r"))]
    wire.advance(5 * LEASE_S)  # it is said once, and the lease is kept meanwhile
    assert len(wire.notifications) == 2


def test_c31_what_was_under_way_does_not_fill_the_window_of_others() -> None:
    """The window has room for one piece, and the piece of the postponed load was never acknowledged."""
    wire = start_stuck(window_blocks=1)
    wire.tamper = lambda frame: [] if isinstance(frame.message, Pieces) else [frame]
    wire.deliver()
    wire.tamper = lambda frame: [frame]
    starve(wire)
    wire.deliver()
    wire.load(0, 1, "other")
    wire.deliver()
    assert [type(notification) for notification in wire.notifications] == [Failed, Received, Freed]


def test_c46_room_is_given_back_only_when_no_read_writes_it() -> None:
    wire = start_stuck(transport=SHARED_MEMORY)
    wire.reads_at_once = False
    wire.deliver()
    assert len(wire.reads) == 1
    starve(wire)
    wire.deliver()
    assert wire.notifications == []
    wire.finish_reads()
    wire.deliver()
    assert wire.notifications == [postponed(0)]
    states = [transfer.state for transfer in wire.consumer._transfers.values()]
    assert states == [IncomingState.HOLDING] * 2


def test_c46_an_end_of_the_load_before_proves_nothing_about_pieces_that_were_read_again() -> None:
    """That End is late. Meanwhile the request ends at the producer, whose message about this is lost, and
    other requests get its blocks."""
    late: list[Frame] = []

    def tamper(frame: Frame) -> list[Frame]:
        is_late = isinstance(frame.message, End) and frame.message.key == KEY and not late
        if is_late:
            late.append(frame)
        return [] if is_late else [frame]

    wire = start_stuck(transport=SHARED_MEMORY, checksums=ChecksumPolicy.OFF)
    wire.tamper = tamper
    wire.deliver()
    wire.ready(1, 2)
    wire.finish_send()
    wire.deliver()
    stuck = Opened(KEY, "host", SHARED_MEMORY, b"pool", is_stuck=True)
    wire.in_flight.append(("consumer", Frame("producer", stuck)))
    wire.deliver()
    assert wire.notifications == [postponed(0), CanLoad(RankTransfer("r"))]
    wire.reads_at_once = False
    wire.load(0, 3)
    wire.deliver()
    wire.in_flight.append(("consumer", late[0]))
    wire.deliver()
    wire.tamper = lambda _: []
    wire.at_producer(wire.producer.abort(RankTransfer("r"), "the client left", True))
    wire.finish_reads()
    assert not [each for each in wire.notifications if isinstance(each, Received)]


def test_c32_an_abort_while_a_load_is_being_put_off() -> None:
    wire = start_stuck(transport=SHARED_MEMORY)
    wire.reads_at_once = False
    wire.deliver()
    starve(wire)
    wire.deliver()
    wire.at_consumer(wire.consumer.abort(RankTransfer("r"), "the client left"))
    wire.deliver()
    assert wire.unwanted == [RankTransfer("r")]
    wire.finish_reads()
    assert wire.notifications == [Quiesced(RankTransfer("r"))]


def test_c39_an_abort_after_a_load_was_put_off_releases_the_producer_by_message() -> None:
    wire = start_stuck()
    wire.deliver()
    starve(wire)
    wire.deliver()
    wire.at_consumer(wire.consumer.abort(RankTransfer("r"), "the client left"))
    wire.deliver()
    assert wire.unwanted == [RankTransfer("r")]
    assert wire.notifications == [postponed(16)]
    assert wire.consumer.next_deadline() is not None  # that of the other
    wire.consumer.check_integrity()


def test_c34_a_load_that_was_put_off_has_no_more_time_than_any_other() -> None:
    wire = start_stuck()
    wire.deliver()
    starve(wire)
    wire.advance(LOAD_TIMEOUT_S)
    assert wire.notifications == [postponed(16), CanLoad(RankTransfer("r"))]
    assert sent(wire, Cancel)[-1].key == KEY
    wire.load(0, 3)
    assert isinstance(wire.notifications[-1], Failed)
    assert "did not arrive" in wire.notifications[-1].reason
    assert not wire.notifications[-1].is_postponed


def test_c34_the_next_try_of_a_load_that_was_put_off_has_only_the_rest_of_the_time() -> None:
    wire = start_stuck()
    wire.deliver()
    starve(wire)
    wire.advance(LOAD_TIMEOUT_S - 2 * HEARTBEAT_S)
    starve(wire, is_starved=False)
    wire.ready(1, 2)
    wire.finish_send()
    wire.deliver()
    wire.tamper = lambda frame: [] if isinstance(frame.message, Pieces) else [frame]
    wire.load(1, 2)
    wire.advance(HEARTBEAT_S)
    assert wire.notifications == [postponed(16), CanLoad(RankTransfer("r"))]
    wire.advance(HEARTBEAT_S)
    failed = wire.notifications[2]
    assert isinstance(failed, Failed)
    assert "did not arrive" in failed.reason


def test_c40_a_prompt_that_ended_elsewhere_after_it_was_put_off() -> None:
    wire = start_stuck()
    wire.deliver()
    starve(wire)
    wire.deliver()
    wire.at_producer(wire.producer.abort(RankTransfer("r"), "the request ended", True))
    wire.deliver()
    assert wire.notifications == [postponed(16), Freed(RankTransfer("r")), CanLoad(RankTransfer("r"))]
    wire.load(0, 3)
    assert wire.notifications[3:] == [Failed(RankTransfer("r"), 0, "the request ended", True)]


def test_c33_being_stuck_is_no_news_for_a_leg_that_holds_or_is_gone() -> None:
    wire = start_stuck()
    wire.deliver()
    opened = Opened(KEY, "host", None, b"", is_stuck=True)
    for _ in range(3):
        wire.at_consumer(wire.consumer.on_message(opened, wire.clock.now()))
    assert wire.notifications == [postponed(16)]
    wire.at_consumer(wire.consumer.abort(RankTransfer("r"), "the client left"))
    wire.at_consumer(wire.consumer.on_message(opened, wire.clock.now()))
    assert wire.notifications == [postponed(16)]


def test_c31_a_load_whose_prompt_is_not_even_begun_is_put_off_too() -> None:
    """The Open came before the producer's engine knew of the request; the engine is starved by then."""
    wire = Wire()
    wire.begin_send(OTHER, 16, "other")
    wire.ready(0, 1, "other")
    wire.finish_send("other")
    wire.begin_load(KEY, 48)
    wire.load(0, 3)
    wire.deliver()
    wire.begin_send(KEY, 48)
    starve(wire)
    wire.deliver()
    assert wire.notifications == [postponed(0)]


def test_a_prompt_that_was_preempted_after_its_load_was_put_off_comes_whole() -> None:
    wire = start_stuck()
    wire.deliver()
    starve(wire)
    wire.deliver()
    wire.at_producer(wire.producer.withdraw(RankTransfer("r")))
    starve(wire, is_starved=False)
    send_all(wire, 3)
    wire.load(0, 3)
    wire.deliver()
    assert wire.received_blocks() == {0: 100_000, 1: 101_000, 2: 102_000}


def test_c45_a_late_word_of_the_load_that_was_put_off_vouches_for_nothing_of_the_next() -> None:
    """The former load had other blocks. If the late message were believed, the End would not wait for pieces
    that are still being read."""
    wire = start_stuck(transport=SHARED_MEMORY)
    wire.deliver()
    starve(wire)
    wire.deliver()
    starve(wire, is_starved=False)
    wire.ready(1, 2)
    wire.finish_send()
    wire.deliver()
    wire.reads_at_once = False
    wire.load(0, 3)
    wire.deliver()
    wire.at_producer(wire.producer.on_message(b"consumer", Ack(KEY, 0, (0, 1, 2), ()), wire.clock.now()))
    wire.deliver()
    assert all(end.key != KEY for end in sent(wire, End))
    wire.finish_reads()
    wire.deliver()
    wire.finish_reads()
    wire.deliver()
    assert any(
        isinstance(notification, Received) and notification.rank_transfer == RankTransfer("r")
        for notification in wire.notifications
    )
