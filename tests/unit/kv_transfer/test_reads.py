"""A consumer that reads the producer's pool itself: what it may trust, and when no read writes any more."""

import pytest

from kv_transfer.protocol.consumer import MAX_BAD_PIECES
from kv_transfer.protocol.effects import Failed, Freed, Quiesced, RankTransfer, Received
from kv_transfer.protocol.messages import Ack, ChecksumPolicy, End, Open, Pieces
from kv_transfer.protocol.transports import CUDA_IPC, NIXL, SHARED_MEMORY, ZMQ_TCP, TransportOffer
from tests.factories.hand_overs import send_all
from tests.factories.transfer import (
    HEARTBEAT_S,
    KEY,
    LEASE_S,
    LOAD_TIMEOUT_S,
    PEER_TIMEOUT_S,
    Wire,
    sent,
    start,
)

TRUTH = {0: 100_000, 1: 101_000, 2: 102_000}


def make_wire(checksums: ChecksumPolicy = ChecksumPolicy.OFF, *, reads_at_once: bool = True) -> Wire:
    wire = Wire(transport=SHARED_MEMORY, checksums=checksums)
    wire.reads_at_once = reads_at_once
    return wire


def test_the_pool_is_opened_before_it_is_read_and_no_bytes_are_sent() -> None:
    wire = make_wire()
    start(wire)
    send_all(wire, 3)
    assert [(pool.transport, pool.description) for pool in wire.opened_pools] == [(SHARED_MEMORY, b"pool")]
    assert not any(frame.payload for frame in wire.sent)
    assert wire.received_blocks() == TRUTH
    assert [type(notification) for notification in wire.notifications] == [Received, Freed]
    wire.assert_at_rest()


def test_the_end_waits_for_the_last_acknowledgement() -> None:
    wire = make_wire(reads_at_once=False)
    start(wire)
    send_all(wire, 3)
    assert sent(wire, End) == []
    wire.finish_reads()
    wire.deliver()
    assert len(sent(wire, End)) == 1
    assert isinstance(wire.notifications[0], Received)


def test_c46_blocks_withdrawn_during_their_read_are_read_again() -> None:
    wire = make_wire(reads_at_once=False)
    start(wire)
    wire.ready(0, 2)
    wire.deliver()
    wire.at_producer(wire.producer.withdraw(RankTransfer("r")))
    wire.source_blocks.update({100: -1, 101: -1})  # another request's
    wire.finish_reads()
    wire.deliver()
    assert {ack.version for ack in sent(wire, Ack)} == {0}
    wire.reads_at_once = True
    send_all(wire, 3)
    assert wire.received_blocks() == TRUTH
    assert [pieces.version for pieces in sent(wire, Pieces)][-1] == 1
    assert [type(notification) for notification in wire.notifications] == [Received, Freed]


@pytest.mark.parametrize("is_acknowledged", [True, False])
def test_c46_after_a_preemption_only_what_was_acknowledged_in_time_is_believed(is_acknowledged: bool) -> None:
    wire = make_wire()
    if not is_acknowledged:
        wire.tamper = lambda frame: [] if isinstance(frame.message, Ack) else [frame]
    start(wire)
    wire.ready(0, 2)
    wire.deliver()
    wire.at_producer(wire.producer.withdraw(RankTransfer("r")))
    wire.tamper = lambda frame: [frame]
    wire.advance(2 * HEARTBEAT_S)  # it says what it has, in its next Open
    assert sent(wire, Open)[-1].received == (0, 1)
    send_all(wire, 3)
    again = [index for pieces in sent(wire, Pieces) if pieces.version == 1 for index in pieces.indices]
    assert again == ([2] if is_acknowledged else [0, 1, 2])
    assert isinstance(wire.notifications[0], Received)


@pytest.mark.parametrize("how", ["abort", "silence", "deadline", "refusal"])
def test_c32_a_load_is_over_only_when_nothing_is_being_read_any_more(how: str) -> None:
    wire = make_wire(reads_at_once=False)
    start(wire)
    wire.ready(0, 2)
    wire.deliver()
    if how == "abort":
        wire.at_consumer(wire.consumer.abort(RankTransfer("r"), "the client left"))
    elif how == "silence":
        wire.tamper = lambda frame: [] if frame.source == "producer" else [frame]
        wire.advance(PEER_TIMEOUT_S + 2 * HEARTBEAT_S)
    elif how == "deadline":
        wire.advance(LOAD_TIMEOUT_S)
    else:
        wire.at_producer(wire.producer.abort(RankTransfer("r"), "the prefill failed", False))
    wire.deliver()
    assert not [
        notification for notification in wire.notifications if isinstance(notification, Failed | Quiesced)
    ]
    assert len(wire.consumer) == 1
    wire.finish_reads()
    ends = [
        type(notification)
        for notification in wire.notifications
        if isinstance(notification, Failed | Quiesced)
    ]
    assert ends == [Quiesced if how == "abort" else Failed]
    assert len(wire.consumer) == 0


@pytest.mark.parametrize("has_failed", [True, False])
def test_c33_an_abort_while_an_ended_load_drains_is_reported_as_quiet(has_failed: bool) -> None:
    """The end of a load that nothing needs any more is no failure."""
    wire = make_wire(reads_at_once=False)
    start(wire)
    wire.ready(0, 1)
    wire.deliver()
    if has_failed:
        wire.advance(LOAD_TIMEOUT_S)
    else:
        wire.at_producer(wire.producer.abort(RankTransfer("r"), "token 0 ended the answer", True))
        wire.deliver()
    wire.at_consumer(wire.consumer.abort(RankTransfer("r"), "the client left"))
    wire.finish_reads()
    (ended,) = [each for each in wire.notifications if isinstance(each, Failed | Quiesced)]
    assert ended == Quiesced(RankTransfer("r"), SHARED_MEMORY)
    assert isinstance(ended, Quiesced)
    assert ended.has_failed is has_failed


@pytest.mark.parametrize(
    ("checksums", "num_valid_tokens"),
    [(ChecksumPolicy.ON, 32), (ChecksumPolicy.OFF, 0), (ChecksumPolicy.AUTO, 0)],
)
def test_c35_without_checksums_nothing_that_was_read_is_kept_of_a_failed_load(
    checksums: ChecksumPolicy, num_valid_tokens: int
) -> None:
    wire = make_wire(checksums)
    start(wire)
    wire.ready(0, 2)
    wire.deliver()
    wire.advance(LOAD_TIMEOUT_S)
    reason = f"the prompt's KV cache did not arrive within {LOAD_TIMEOUT_S:g} s"
    failed = Failed(RankTransfer("r"), num_valid_tokens, reason, False, SHARED_MEMORY)
    assert failed in wire.notifications


@pytest.mark.parametrize(
    ("checksums", "consumer_host", "applies"),
    [
        (ChecksumPolicy.ON, "host", True),
        (ChecksumPolicy.OFF, "other", False),
        (ChecksumPolicy.AUTO, "host", False),
        (ChecksumPolicy.AUTO, "other", True),
    ],
)
def test_c45_between_hosts_checksums_are_required_unless_they_are_off(
    checksums: ChecksumPolicy, consumer_host: str, applies: bool
) -> None:
    assert checksums.applies("host", consumer_host) is applies


def test_c55_nothing_is_kept_of_a_prompt_that_its_producer_gave_up() -> None:
    """It may have computed the prompt wrongly, which no checksum shows."""
    wire = make_wire(ChecksumPolicy.ON)
    start(wire)
    wire.ready(0, 2)
    wire.deliver()
    wire.at_producer(wire.producer.abort(RankTransfer("r"), "the prefill failed", False))
    wire.source_blocks.clear()
    wire.deliver()
    assert wire.notifications[-1] == Failed(RankTransfer("r"), 0, "the prefill failed", False, SHARED_MEMORY)


def test_c45_a_piece_overwritten_during_its_read_fails_its_checksum() -> None:
    wire = make_wire(ChecksumPolicy.ON, reads_at_once=False)
    start(wire)
    wire.ready(0, 1)
    wire.deliver()
    wire.source_blocks[100] = -1
    wire.finish_reads()
    wire.source_blocks[100] = 100_000
    wire.deliver()
    assert wire.consumer_counters["kv_checksum_failures"] == 1, "it was offered again, in the same version"
    wire.ready(1, 2)
    wire.finish_send()
    wire.finish_reads()
    wire.deliver()
    wire.finish_reads()
    wire.deliver()
    assert wire.received_blocks() == TRUTH


def test_c45_a_preemption_under_many_reads_is_no_broken_path() -> None:
    """More pieces fail their checksums than a broken path is allowed, but none of them in the version that counts."""
    num_blocks = 2 * MAX_BAD_PIECES
    wire = Wire(transport=SHARED_MEMORY, checksums=ChecksumPolicy.ON, window_blocks=num_blocks)
    wire.reads_at_once = False
    start(wire, num_blocks=num_blocks)
    wire.ready(0, num_blocks)
    wire.deliver()
    wire.at_producer(wire.producer.withdraw(RankTransfer("r")))
    wire.source_blocks.update(dict.fromkeys(range(100, 100 + num_blocks), -1))
    wire.finish_reads()
    wire.reads_at_once = True
    wire.deliver()
    send_all(wire, num_blocks)
    wire.advance(HEARTBEAT_S)
    assert isinstance(wire.notifications[0], Received)
    assert wire.consumer_counters["kv_checksum_failures"] == 0


def test_an_unreachable_pool_is_tried_over_the_next_best_transport() -> None:
    wire = make_wire()
    start(wire)
    wire.at_consumer(wire.consumer.on_unreachable(KEY, SHARED_MEMORY, "no such memory", wire.clock.now()))
    wire.deliver()
    assert sent(wire, Open)[-1].transports == (ZMQ_TCP,)
    send_all(wire, 3)
    assert wire.received_blocks() == TRUTH
    assert wire.consumer_counters["kv_unreachable_pools"] == 1
    wire.assert_at_rest()


def test_a_failed_read_is_tried_over_the_next_best_transport() -> None:
    wire = make_wire(reads_at_once=False)
    start(wire)
    send_all(wire, 3)
    for wanted in wire.reads:
        wire.at_consumer(wire.consumer.on_read_failed(wanted, "it is gone", wire.clock.now()))
        wire.deliver()
    assert wire.received_blocks() == TRUTH
    assert sent(wire, Open)[-1].transports == (ZMQ_TCP,), (
        "reads that fail late do not speak against the next way"
    )
    assert isinstance(wire.notifications[0], Received)


def test_c34_without_a_transport_left_the_load_fails_and_both_ends_are_free() -> None:
    wire = make_wire()
    start(wire)
    for transport in (SHARED_MEMORY, ZMQ_TCP):
        wire.at_consumer(wire.consumer.on_unreachable(KEY, transport, "no such memory", wire.clock.now()))
        wire.deliver()
    assert isinstance(wire.notifications[0], Failed)
    assert "no transport reaches the prefill worker: no such memory" in wire.notifications[0].reason
    wire.finish_send()
    wire.advance(LEASE_S)
    wire.assert_at_rest()


@pytest.mark.parametrize(
    ("host", "wanted", "chosen"),
    [
        ("here", (CUDA_IPC, SHARED_MEMORY, ZMQ_TCP), SHARED_MEMORY),
        ("there", (SHARED_MEMORY, NIXL, ZMQ_TCP), NIXL),
        ("there", (SHARED_MEMORY, ZMQ_TCP), ZMQ_TCP),
        ("there", (SHARED_MEMORY,), None),
        ("here", (ZMQ_TCP, SHARED_MEMORY), ZMQ_TCP),
        ("here", (), None),
        ("here", ("carrier_pigeon",), None),
    ],
)
def test_the_consumers_best_way_that_the_producer_can_serve_is_taken(
    host: str, wanted: tuple[str, ...], chosen: str | None
) -> None:
    pools = {SHARED_MEMORY: b"memory", NIXL: b"agent"}
    assert TransportOffer("here", (SHARED_MEMORY, NIXL, ZMQ_TCP), pools).choose(host, wanted) == chosen


def test_a_pool_that_no_peer_can_map_is_not_offered() -> None:
    assert (
        TransportOffer("here", (SHARED_MEMORY, ZMQ_TCP)).choose("here", (SHARED_MEMORY, ZMQ_TCP)) == ZMQ_TCP
    )
