"""Reads of blocks that may be withdrawn meanwhile: without checksums, only the protocol notices."""

from kv_transfer.protocol.effects import Failed, RankTransfer, Received
from kv_transfer.protocol.messages import ChecksumPolicy, Opened
from kv_transfer.protocol.transports import SHARED_MEMORY, ZMQ_TCP
from tests.factories.hand_overs import send_all
from tests.factories.transfer import HEARTBEAT_S, LOAD_TIMEOUT_S, Wire, sent, start

FOREIGN = 666
"""What another request has written into a block that was taken back."""


def begin_two_reads() -> Wire:
    """Two blocks, a read for each, and both take their time."""
    wire = Wire(transport=SHARED_MEMORY, checksums=ChecksumPolicy.OFF)
    wire.reads_at_once = False
    start(wire, num_blocks=2)
    for index in range(2):
        wire.ready(index, 1)
        wire.deliver()
    assert len(wire.reads) == 2
    return wire


def fail_read(wire: Wire, index: int) -> None:
    """Moves the rest of the rank transfer to another transport: bytes over the channel."""
    wire.at_consumer(wire.consumer.on_read_failed(wire.reads.pop(index), "broken", wire.clock.now()))


def preempt(wire: Wire, block_id: int) -> None:
    wire.at_producer(wire.producer.withdraw(RankTransfer("r")))
    wire.source_blocks[block_id] = FOREIGN


def test_c35_a_torn_read_is_not_kept_because_another_one_failed() -> None:
    """Pieces without a proof stay unproven when the rank transfer continues with checksums."""
    wire = begin_two_reads()
    preempt(wire, 100)
    broken = wire.reads.pop(1)
    wire.finish_reads()
    wire.reads.append(broken)
    fail_read(wire, 0)
    wire.deliver()
    assert sent(wire, Opened)[-1].transport == ZMQ_TCP
    wire.advance(LOAD_TIMEOUT_S)
    assert wire.received_blocks()[0] == FOREIGN
    assert [
        (type(notification), getattr(notification, "num_valid_tokens", None))
        for notification in wire.notifications
    ] == [(Failed, 0)]


def test_c45_a_torn_read_is_not_accepted_because_the_rest_came_as_bytes() -> None:
    """The producer's End waits for every read that was begun, also after a change of transport."""
    wire = begin_two_reads()
    fail_read(wire, 0)
    wire.deliver()
    preempt(wire, 101)
    send_all(wire, 2)
    wire.source_blocks[101] = FOREIGN  # where the slow read looks; the block was computed again elsewhere
    wire.finish_reads()
    wire.source_blocks[101] = 101_000
    wire.deliver()
    assert wire.notifications == []
    wire.advance(2 * HEARTBEAT_S)
    assert isinstance(wire.notifications[0], Received)
    assert wire.received_blocks() == {0: 100_000, 1: 101_000}
