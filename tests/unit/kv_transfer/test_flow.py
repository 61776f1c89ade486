"""How much is sent to each peer, and when: windows, turns, and acknowledgements that cross an Open."""

import pytest

from kv_transfer.protocol.effects import Freed, RankTransfer, Received, SendPieces
from kv_transfer.protocol.messages import Ack, Hold, Open, Pieces, Release
from kv_transfer.protocol.outgoing import (
    BYTES_PER_TURN,
    BYTES_PER_TURN_BY_DEVICE,
    BYTES_PER_TURN_READ,
    OutgoingState,
    OutgoingTransfer,
    SendWindow,
)
from kv_transfer.protocol.transports import CUDA_IPC, SHARED_MEMORY, ZMQ_TCP
from tests.factories.hand_overs import send_all
from tests.factories.transfer import ADDRESS, HEARTBEAT_S, KEY, Frame, Wire, honest, make_key, sent, start


def test_pieces_that_are_long_under_way_are_not_sent_again() -> None:
    """On a slow link, each heartbeat repeated them all. The repeated bytes delayed the link further."""
    wire, under_way = Wire(), list[Frame]()

    def delay(frame: Frame) -> list[Frame]:
        if frame.source != ADDRESS:
            return [frame]
        under_way.append(frame)
        return []

    start(wire)
    wire.tamper = delay
    send_all(wire, 3)
    wire.advance(3 * HEARTBEAT_S)
    assert sorted(index for message in sent(wire, Pieces) for index in message.indices) == [0, 1, 2]
    wire.tamper = honest
    wire.in_flight.extend(("consumer", frame) for frame in under_way)
    wire.deliver()
    assert wire.producer_counters["kv_pieces_resent"] == wire.consumer_counters["kv_duplicate_messages"] == 0
    assert {type(notification) for notification in wire.notifications} == {Received, Freed}
    wire.assert_at_rest()


def test_pieces_of_an_ended_connection_are_sent_again_at_once() -> None:
    wire = Wire()
    start(wire)
    wire.tamper = lambda frame: [] if frame.source == ADDRESS else [frame]
    wire.ready(0, 3)
    wire.deliver()
    wire.tamper = honest
    effects = wire.producer.on_message(b"another connection", sent(wire, Open)[-1], wire.clock.now())
    repeated = [effect.indices for effect in effects if isinstance(effect, SendPieces)]
    assert sorted(repeated) == [(0,), (1,), (2,)]


def test_c33_an_ack_counts_for_a_piece_that_was_about_to_be_offered_again() -> None:
    """A heartbeat asks for the piece during its read, while another rank transfer fills the window."""
    wire = Wire(transport=SHARED_MEMORY, window_blocks=2)
    wire.reads_at_once = False
    for name, first_block in (("a", 200), ("b", 300)):
        key = make_key(name)
        wire.begin_send(key, 32, name)
        wire.begin_load(key, 32, name)
        wire.at_consumer(
            wire.consumer.load(RankTransfer(name), 0, (first_block, first_block + 1), wire.clock.now())
        )
        wire.deliver()
        wire.ready(0, 2, name)
        wire.deliver()
        wire.clock.advance(HEARTBEAT_S / 2)
    wire.at_consumer(wire.consumer.on_time(wire.clock.now()))
    wire.deliver()
    wire.finish_send("a")
    wire.finish_send("b")
    wire.reads_at_once = True
    wire.finish_reads()
    wire.deliver()
    received = [
        notification.rank_transfer.request_id
        for notification in wire.notifications
        if isinstance(notification, Received)
    ]
    assert sorted(received) == ["a", "b"], "without waiting for another heartbeat"
    assert sum(isinstance(notification, Freed) for notification in wire.notifications) == 2
    wire.assert_at_rest()


def test_c33_a_late_hold_does_not_take_the_window_elsewhere() -> None:
    wire = Wire(window_blocks=2)
    start(wire, num_blocks=2)
    wire.tamper = lambda frame: [] if isinstance(frame.message, Ack) else [frame]
    wire.ready(0, 2)
    wire.deliver()
    for message in (Hold(KEY), Ack(KEY, 0, (0, 1), ())):
        wire.producer.on_message(b"another connection", message, 0.0)
    assert not +wire.producer._window._inflight
    assert not -wire.producer._window._inflight
    wire.producer.on_message(b"another connection", Release(KEY), 0.0)
    assert not wire.producer._window._inflight.total()


def test_an_ack_that_comes_twice_is_counted_and_changes_nothing() -> None:
    wire = Wire(lambda frame: [frame, frame] if isinstance(frame.message, Ack) else [frame])
    start(wire)
    send_all(wire, 3)
    assert isinstance(wire.notifications[0], Received)
    assert wire.producer_counters["kv_duplicate_messages"] > 0
    wire.assert_at_rest()


MIB = 2**20


@pytest.mark.parametrize(
    ("transport", "turn", "window"),
    [
        (ZMQ_TCP, BYTES_PER_TURN, 64 * MIB),
        (SHARED_MEMORY, BYTES_PER_TURN_READ, 64 * MIB),
        (CUDA_IPC, BYTES_PER_TURN_BY_DEVICE, 2 * BYTES_PER_TURN_BY_DEVICE),
    ],
)
def test_each_way_to_move_bytes_has_its_turn_and_its_window(transport: str, turn: int, window: int) -> None:
    transfer = OutgoingTransfer(KEY, OutgoingState.STREAMING, piece_nbytes=MIB, transport=transport)
    transfer.unsent.extend(range(2**10))
    sends = SendWindow(64 * MIB)
    sends.join(transfer)
    turns = [len(indices) for _, indices in sends.next_turns()]
    assert set(turns) == {turn // MIB}
    assert sum(turns) == window // MIB
    assert sends.acknowledged(transfer, 0)
    assert [len(indices) for _, indices in sends.next_turns()] == [1], "room for one more"


def test_a_rank_transfer_whose_pieces_were_withdrawn_gets_no_turn() -> None:
    waits, withdrawn = (
        OutgoingTransfer(make_key(name), OutgoingState.STREAMING, piece_nbytes=MIB) for name in "ab"
    )
    sends = SendWindow(MIB)
    for transfer in (withdrawn, waits):
        transfer.unsent.extend([0, 1])
        sends.join(transfer)
    withdrawn.withdraw()
    assert [(transfer, indices) for transfer, indices in sends.next_turns()] == [(waits, (0,))]
    assert sends.acknowledged(waits, 0)
    assert [(transfer, indices) for transfer, indices in sends.next_turns()] == [(waits, (1,))]


def test_a_rank_transfer_that_ended_before_its_turn_gets_none() -> None:
    other = make_key("other")
    wire = Wire(lambda frame: [] if isinstance(frame.message, Pieces) else [frame], window_blocks=1)
    start(wire)
    wire.ready(0, 3)
    wire.at_consumer(wire.consumer.abort(RankTransfer("r"), "its client left"))
    wire.deliver()
    wire.begin_send(other, 16, "other")
    wire.begin_load(other, 16, "other")
    wire.load(0, 1, "other")
    wire.deliver()
    wire.ready(0, 1, "other")
    assert [pieces.key for pieces in sent(wire, Pieces)] == [KEY, other]
