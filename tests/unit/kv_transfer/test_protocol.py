"""The hand-over between both state machines: what is promised when all goes well, and when it does not."""

from dataclasses import replace

import pytest

from kv_transfer.protocol.effects import Failed, Freed, RankTransfer, Received
from kv_transfer.protocol.messages import Aborted, Cancel, End, Opened, Pieces, Refused, Release
from kv_transfer.protocol.transports import SHARED_MEMORY, ZMQ_TCP
from tests.factories.hand_overs import send_all
from tests.factories.transfer import (
    ADDRESS,
    FIRST_TOKEN,
    HEARTBEAT_S,
    KEY,
    LEASE_S,
    LOAD_TIMEOUT_S,
    PEER_TIMEOUT_S,
    Frame,
    Wire,
    lossy,
    make_key,
    sent,
    start,
)


def test_blocks_leave_as_soon_as_they_are_computed() -> None:
    wire = Wire()
    start(wire)
    wire.ready(0, 2)
    wire.deliver()
    assert wire.received_blocks() == {0: 100_000, 1: 101_000}
    assert wire.notifications == []
    wire.ready(2, 1)
    wire.finish_send()
    wire.deliver()
    assert wire.notifications == [
        Received(RankTransfer("r"), FIRST_TOKEN, 3, ZMQ_TCP, 0.0, 0.0),
        Freed(RankTransfer("r")),
    ]
    assert wire.received_blocks() == {0: 100_000, 1: 101_000, 2: 102_000}
    wire.assert_at_rest()


def test_blocks_computed_before_the_consumer_had_room_are_sent_when_it_has() -> None:
    wire = Wire()
    wire.begin_send(KEY, 48)
    wire.begin_load(KEY, 48)
    send_all(wire, 3)
    assert sent(wire, Pieces) == []
    wire.load(0, 3)
    wire.deliver()
    assert isinstance(wire.notifications[0], Received)
    wire.assert_at_rest()


@pytest.mark.parametrize("first", ["Hold", "Open"])
def test_a_consumers_message_may_come_before_the_producer_knows_of_the_request(first: str) -> None:
    wire = Wire()
    wire.begin_load(KEY, 32)
    if first == "Open":
        wire.load(0, 2)
    wire.deliver()
    wire.begin_send(KEY, 32)
    wire.ready(0, 2)
    wire.finish_send()
    if first == "Hold":
        wire.load(0, 2)
    wire.deliver()
    assert isinstance(wire.notifications[0], Received)
    wire.assert_at_rest()


def test_only_blocks_that_the_consumer_lacks_are_sent() -> None:
    wire = Wire()
    wire.begin_send(KEY, 64)
    wire.begin_load(KEY, 64)
    wire.load(2, 2)
    send_all(wire, 4)
    assert [index for pieces in sent(wire, Pieces) for index in pieces.indices] == [2, 3]
    assert wire.notifications[0] == Received(RankTransfer("r"), FIRST_TOKEN, 2, ZMQ_TCP, 0.0, 0.0)


def test_no_more_blocks_are_under_way_to_a_peer_than_its_window_and_transfers_take_turns() -> None:
    wire = Wire(window_blocks=4)
    keys = {name: make_key(name) for name in ("a", "b")}
    for name, key in keys.items():
        wire.begin_send(key, 160, name)
        wire.begin_load(key, 160, name)
        wire.load(0, 10, name)
    wire.deliver()
    for name in keys:
        wire.ready(0, 10, name)
    under_way = [
        frame.message.key.transfer_id for _, frame in wire.in_flight if isinstance(frame.message, Pieces)
    ]
    assert len(under_way) == 4
    wire.deliver()
    command = [block.key.transfer_id for block in sent(wire, Pieces)]
    assert sorted(command[4:10]) == ["a"] * 3 + ["b"] * 3, "the transfers did not take turns"


def test_c33_late_double_and_unknown_messages_are_counted_and_change_nothing() -> None:
    wire = Wire(lambda frame: [frame, frame])
    start(wire)
    send_all(wire, 3)
    assert [type(notification) for notification in wire.notifications] == [Received, Freed]
    assert wire.consumer_counters["kv_duplicate_messages"] + wire.consumer_counters["kv_late_messages"] > 0
    assert wire.producer_counters["kv_late_messages"] > 0
    before = list(wire.notifications)
    opened = Opened(KEY, "host", ZMQ_TCP, b"")
    for message in (opened, Refused(KEY, "?"), End(KEY, 0, 3, FIRST_TOKEN), Aborted(KEY, "?", False)):
        wire.at_consumer(wire.consumer.on_message(message, wire.clock.now()))
    assert not wire.consumer.wanted(Pieces(KEY, 0, (0,), (0,), (0,)), wire.clock.now())
    assert wire.producer.on_message(b"d", Release(KEY), wire.clock.now()) == []
    assert wire.notifications == before


def test_c42_a_silent_producer_is_noticed_by_heartbeat() -> None:
    wire = Wire()
    start(wire)
    wire.ready(0, 1)
    wire.deliver()
    wire.tamper = lambda frame: [] if frame.source == "producer" else [frame]
    wire.advance(PEER_TIMEOUT_S + 2 * HEARTBEAT_S)
    assert isinstance(wire.notifications[0], Failed)
    assert "silent" in wire.notifications[0].reason
    assert wire.notifications[0].num_valid_tokens == 16


@pytest.mark.parametrize("is_loading", [True, False])
def test_c42_a_producer_that_is_gone_is_not_waited_for(is_loading: bool) -> None:
    wire = Wire()
    wire.begin_send(KEY, 48)
    wire.begin_load(KEY, 48)
    if is_loading:
        wire.load(0, 3)
        wire.ready(0, 1)
    wire.deliver()
    for address in ("another", ADDRESS):
        assert wire.notifications == []
        wire.at_consumer(wire.consumer.on_gone(address))
    if not is_loading:
        wire.load(0, 3)  # the loss is remembered
    (failed,) = wire.notifications
    assert isinstance(failed, Failed)
    assert (failed.num_valid_tokens, failed.reason) == (
        16 * is_loading,
        "the prefill worker no longer accepts connections",
    )


def test_c43_prompts_of_different_lengths_are_refused() -> None:
    wire = Wire()
    wire.begin_send(KEY, 48)
    wire.begin_load(KEY, 47)
    wire.load(0, 3)
    wire.deliver()
    assert isinstance(wire.notifications[0], Failed)
    assert "48 != 47" in wire.notifications[0].reason


def test_c44_a_message_for_an_earlier_incarnation_of_the_producer_is_refused() -> None:
    wire = Wire()
    old = make_key(producer="p-0")
    wire.begin_load(old, 16)
    wire.load(0, 1)
    wire.deliver()
    assert isinstance(wire.notifications[0], Failed)
    assert "restarted" in wire.notifications[0].reason
    assert wire.producer_counters["kv_foreign_messages"] > 0
    wire.assert_at_rest()


def test_c44_another_incarnation_of_the_consumer_has_no_claim_on_a_transfer() -> None:
    wire = Wire()
    start(wire)
    wire.ready(0, 3)
    stranger = replace(KEY, consumer="d-0")
    effects = wire.producer.on_message(b"d-0", Cancel(stranger, "?"), wire.clock.now())
    assert effects == []
    wire.finish_send()
    wire.deliver()
    assert isinstance(wire.notifications[0], Received)


def test_c45_a_damaged_block_is_found_and_sent_again() -> None:
    damaged: list[int] = []

    def damage_once(frame: Frame) -> list[Frame]:
        if isinstance(frame.message, Pieces) and 1 in frame.message.indices and not damaged:
            damaged.append(1)
            return [Frame(frame.source, frame.message, tuple(666 for _ in frame.payload))]
        return [frame]

    wire = Wire(damage_once)
    start(wire)
    send_all(wire, 3)
    assert wire.received_blocks() == {0: 100_000, 1: 101_000, 2: 102_000}
    assert isinstance(wire.notifications[0], Received)
    assert (wire.consumer_counters["kv_checksum_failures"], wire.producer_counters["kv_pieces_resent"]) == (
        1,
        1,
    )


def test_c45_a_path_that_damages_everything_is_given_up() -> None:
    wire = Wire(lambda frame: [Frame(frame.source, frame.message, tuple(-1 for _ in frame.payload))])
    start(wire)
    wire.ready(0, 3)
    wire.deliver()
    assert isinstance(wire.notifications[0], Failed)
    assert "damaged" in wire.notifications[0].reason


def test_a_lost_block_heals_without_ending_the_transfer() -> None:
    lost: list[Frame] = []

    def lose_first_block(frame: Frame) -> list[Frame]:
        if isinstance(frame.message, Pieces) and not lost:
            lost.append(frame)
            return []
        return [frame]

    wire = Wire(lose_first_block)
    start(wire)
    wire.ready(0, 3)
    wire.finish_send()
    wire.advance(2 * HEARTBEAT_S)
    assert isinstance(wire.notifications[0], Received)
    wire.assert_at_rest()


@pytest.mark.parametrize("seed", range(200))
@pytest.mark.parametrize("transport", [ZMQ_TCP, SHARED_MEMORY])
def test_on_a_bad_network_every_transfer_ends_on_both_sides_and_no_wrong_byte_is_accepted(
    transport: str, seed: int
) -> None:
    wire = Wire(lossy(seed), transport=transport)
    num_transfers, num_blocks = 4, 5
    for i in range(num_transfers):
        key = make_key(f"t{i}")
        wire.begin_send(key, num_blocks * 16, f"r{i}")
        wire.begin_load(key, num_blocks * 16, f"r{i}")
        targets = tuple(200 + 10 * i + index for index in range(num_blocks))
        wire.at_consumer(wire.consumer.load(RankTransfer(f"r{i}"), 0, targets, wire.clock.now()))
    for index in range(num_blocks):
        for i in range(num_transfers):
            wire.source_blocks[10 * i + index] = 1_000 * i + index
            wire.at_producer(wire.producer.blocks_ready(RankTransfer(f"r{i}"), index, [10 * i + index]))
        wire.advance(0.3)
    for i in range(num_transfers):
        wire.finish_send(f"r{i}")
    wire.advance(LOAD_TIMEOUT_S + LEASE_S + PEER_TIMEOUT_S)
    wire.assert_at_rest()
    freed = [
        notification.rank_transfer.request_id
        for notification in wire.notifications
        if isinstance(notification, Freed)
    ]
    ended = [
        notification.rank_transfer.request_id
        for notification in wire.notifications
        if isinstance(notification, Received | Failed)
    ]
    assert sorted(freed) == sorted(ended) == [f"r{i}" for i in range(num_transfers)]
    for notification in wire.notifications:
        if isinstance(notification, Received):
            i = int(notification.rank_transfer.request_id[1:])
            assert [wire.target_blocks[200 + 10 * i + n] for n in range(num_blocks)] == [
                1_000 * i + n for n in range(num_blocks)
            ]


def test_c49_no_message_carries_a_time_of_day() -> None:
    wire = Wire()
    wire.clock.advance(123_456.789)
    start(wire)
    send_all(wire, 3)
    assert "123456" not in repr(wire.sent)


def test_c41_a_preempted_producers_blocks_are_not_read_until_they_are_computed_again() -> None:
    wire = Wire()
    wire.begin_send(KEY, 48)
    wire.ready(0, 2)
    wire.at_producer(wire.producer.withdraw(RankTransfer("r")))
    wire.source_blocks.clear()  # they belong to other requests now
    wire.begin_load(KEY, 48)
    wire.load(0, 3)
    wire.deliver()
    assert sent(wire, Pieces) == []
    send_all(wire, 3)
    assert wire.received_blocks() == {0: 100_000, 1: 101_000, 2: 102_000}
    assert isinstance(wire.notifications[0], Received)
    wire.assert_at_rest()


def test_c41_what_arrived_before_a_preemption_is_not_sent_again() -> None:
    wire = Wire()
    start(wire)
    wire.ready(0, 2)
    wire.deliver()
    wire.at_producer(wire.producer.withdraw(RankTransfer("r")))
    send_all(wire, 3)
    assert [index for pieces in sent(wire, Pieces) for index in pieces.indices] == [0, 1, 2]
    assert isinstance(wire.notifications[0], Received)


@pytest.mark.parametrize("is_complete", [True, False])
def test_c33_an_abort_that_crosses_the_end_of_its_load_is_ignored(is_complete: bool) -> None:
    wire = Wire()
    start(wire)
    if is_complete:
        wire.ready(0, 3)
        wire.finish_send()
    else:
        wire.at_producer(wire.producer.abort(RankTransfer("r"), "the prefill failed", False))
    wire.deliver()
    before = list(wire.notifications)
    wire.at_consumer(wire.consumer.abort(RankTransfer("r"), "the client left"))
    assert wire.notifications == before
    wire.assert_at_rest()
