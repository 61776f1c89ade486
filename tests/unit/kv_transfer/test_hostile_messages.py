"""Messages of peers that once did harm. tests/property/wire_fuzz.py found each of them."""

import os
import threading
from collections.abc import Callable
from dataclasses import replace

import msgpack
import numpy as np
import pytest

from baton.clock import SystemClock, VirtualClock
from baton.config import KVTransferConfig
from baton.errors import WireError
from baton.kv import KVFingerprint, KVTransferParams, TransferRole, WorkerRef
from baton.messages.wire import unpack
from baton.request import FirstToken
from kv_transfer.commands import BeginSend, FinishSend, SendBlocks
from kv_transfer.connector.endpoint import TransferEndpoint, make_endpoint
from kv_transfer.consumer.remote_pools import IDLE_S, RemotePools
from kv_transfer.pool import KVBytes
from kv_transfer.protocol.geometry import RankLayout
from kv_transfer.protocol.messages import (
    MAX_HEADER_BYTES,
    PREFIX_BYTES,
    TO_CONSUMER,
    TO_PRODUCER,
    Aborted,
    Ack,
    ChecksumPolicy,
    Hold,
    Open,
    Refused,
    TransferKey,
    Unreadable,
)
from kv_transfer.protocol.transports import ZMQ_TCP, TransportOffer
from kv_transfer.transport.base import Arrival, Runs, TransportError
from kv_transfer.transport.shared_memory import FORMAT, SharedMemory, SharedMemoryReader
from kv_transfer.transport.zmq_tcp import ZmqChannel
from tests.factories.costs import expect_cost_in_proportion
from tests.factories.endpoint_under_fire import BLOCK_NBYTES
from tests.factories.recording_channel import RecordingChannel
from tests.factories.transfer import FINGERPRINT, KEY, Wire, start
from tests.factories.wire_values import seal

LONG = "x" * 10_000
OURS = TransferKey("t", 0, "us", "peer")


def make_end(channel: RecordingChannel, clock: VirtualClock) -> TransferEndpoint:
    pool = KVBytes(np.zeros((8, BLOCK_NBYTES), np.uint8), FINGERPRINT)
    offer = TransportOffer("host", (ZMQ_TCP,))
    return make_endpoint(KVTransferConfig(), "us", pool, channel, {}, offer, clock)


def make_open(fingerprint: KVFingerprint = FINGERPRINT, transports: tuple[str, ...] = (ZMQ_TCP,)) -> Open:
    return Open(OURS, fingerprint, 16, 0, (), (), "host", transports, ChecksumPolicy.OFF)


def give_a_prompt(end: TransferEndpoint) -> None:
    peer = WorkerRef("d0", "peer", ("tcp://peer",), 16)
    end.execute(BeginSend("r", KVTransferParams(TransferRole.PRODUCER, "t", 0, peer), 16))
    end.execute(SendBlocks("r", 0, (1,)))
    end.execute(FinishSend("r", 1, (), FirstToken(7, None)))


def test_a_name_too_long_to_be_answered_is_refused() -> None:
    """The answer to a name of a megabyte could not be sent. Nor could the message at the end of its lease:
    that ended the transfer thread, one lease after the name had come."""
    channel, clock = RecordingChannel(), VirtualClock()
    end = make_end(channel, clock)
    hold = unpack(TO_PRODUCER.encode(Hold(OURS))[PREFIX_BYTES:])
    hold[1][0] = "x" * (MAX_HEADER_BYTES - 100)
    end.on_arrival(Arrival(b"d", False, seal(msgpack.packb(hold))))
    assert [type(message) for message in channel.sent] == [Unreadable]
    assert end.next_deadline() is None


def test_reasons_are_cut_so_that_they_can_be_passed_on() -> None:
    for message in (Refused(OURS, LONG), Aborted(OURS, LONG, False)):
        assert len(message.reason) == 1000
        assert TO_CONSUMER.decode(TO_CONSUMER.encode(message)) == message


def test_blocks_come_home_after_an_open_that_could_not_be_refused() -> None:
    """The refusal quoted the fingerprint, and so was too large to be sent. Then the rest was lost."""
    channel, clock = RecordingChannel(), VirtualClock()
    end = make_end(channel, clock)
    give_a_prompt(end)
    with pytest.raises(WireError):
        make_open(transports=("x" * 600,))
    with pytest.raises(WireError):
        make_open(transports=(ZMQ_TCP,) * 17)
    odd = KVFingerprint(2, "x" * 512, "x" * 512, "x" * 512, 2, 2, 8, 16, 1)
    end.on_arrival(Arrival(b"d", False, TO_PRODUCER.encode(make_open(odd))))
    assert end.collect_output().finished_sending == ("r",)


@pytest.mark.parametrize("name", ["block_size", "num_ranks"])
def test_an_open_from_blocks_without_tokens_or_a_worker_without_ranks_is_bad(name: str) -> None:
    """The numbers may differ from ours, so they were divided by one another: that ended the transfer thread."""
    channel, clock = RecordingChannel(), VirtualClock()
    end = make_end(channel, clock)
    give_a_prompt(end)
    odd = replace(FINGERPRINT)
    object.__setattr__(odd, name, 0)
    end.on_arrival(Arrival(b"d", False, TO_PRODUCER.encode(make_open(odd))))
    assert [type(message) for message in channel.sent] == [Unreadable]


def test_two_peers_that_cannot_read_each_other_do_not_report_it_for_ever() -> None:
    channel, clock = RecordingChannel(), VirtualClock()
    end = make_end(channel, clock)
    end.on_arrival(Arrival("tcp://producer", True, b"of another version"))
    assert not channel.sent
    end.on_arrival(Arrival(b"consumer", False, b"of another version"))
    assert [type(message) for message in channel.sent] == [Unreadable]


def test_an_early_open_is_not_believed_to_have_received_anything() -> None:
    """A thousand of them may wait, and each could have held a megabyte of claims."""
    channel, clock = RecordingChannel(), VirtualClock()
    end = make_end(channel, clock)
    claims = tuple(range(1000))
    early = Open(OURS, FINGERPRINT, 16, 0, claims, claims, "host", (ZMQ_TCP,), ChecksumPolicy.OFF)
    for _ in range(2):
        end.on_arrival(Arrival(b"d", False, TO_PRODUCER.encode(early)))
    kept = end._producer_end._producer._transfers[OURS].open
    assert kept is not None
    assert kept.received == kept.received_versions == ()


def test_acknowledging_many_pieces_takes_time_in_proportion() -> None:
    """Each damaged piece was looked up in the list of valid ones: seconds in which no heartbeat was answered."""

    def prepare(num_damaged: int) -> Callable[[], None]:
        wire = Wire(window_blocks=num_damaged)
        wire.begin_send(KEY, num_damaged * 16)
        wire.begin_load(KEY, num_damaged * 16)
        wire.load(0, num_damaged)
        wire.tamper = lambda frame: [] if isinstance(frame.message, Ack) else [frame]
        wire.ready(0, num_damaged)
        wire.deliver()
        ack = Ack(KEY, 0, tuple(range(num_damaged, 500 * num_damaged)), tuple(range(num_damaged)))

        def acknowledge() -> None:
            wire.producer.on_message(b"consumer", ack, 0.0)
            assert wire.producer_counters["kv_pieces_resent"] == num_damaged

        return acknowledge

    expect_cost_in_proportion(prepare, 600)


def test_a_piece_is_acknowledged_once() -> None:
    wire = Wire()
    wire.tamper = lambda frame: [] if isinstance(frame.message, Ack) else [frame]
    start(wire)
    wire.ready(0, 2)
    wire.deliver()
    wire.at_producer(wire.producer.on_message(b"consumer", Ack(KEY, 0, (0, 0), (0, 1)), 0.0))
    assert wire.producer_counters["kv_duplicate_messages"] == 2
    assert wire.producer_counters["kv_pieces_resent"] == 1


@pytest.mark.parametrize(
    "piece_id", [-1, 2**63 // BLOCK_NBYTES - 1, 2**64 // BLOCK_NBYTES, 2**63 - 1, 2**63, 2**64 - 1]
)
def test_pieces_of_no_possible_pool_are_refused(piece_id: int) -> None:
    """Offsets that overflow came out within the pool, or passed the check and ended the transfer thread."""
    view = KVBytes(np.zeros((8, BLOCK_NBYTES), np.uint8), FINGERPRINT).pieces(RankLayout(16))
    with pytest.raises(OverflowError):
        view.runs([piece_id], [0])


def test_a_run_that_ends_beyond_all_numbers_lies_outside() -> None:
    runs = Runs(np.array([2**63 - 8]), np.array([0]), np.array([16]))
    with pytest.raises(TransportError, match="outside the peer's pool"):
        runs.check_within(1024, 1024)


def test_a_description_that_names_a_pipe_is_refused_at_once() -> None:
    """Opening a pipe waits for its writer; the transfer thread would have waited with it."""
    reader = SharedMemoryReader(np.zeros(8, np.uint8), None)
    read_end, write_end = os.pipe()
    os.close(write_end)
    refused = threading.Event()

    def open_it() -> None:
        with pytest.raises(TransportError):
            reader.open(msgpack.packb([FORMAT, os.getpid(), read_end, 1, 8]))
        refused.set()

    threading.Thread(target=open_it, daemon=True).start()
    try:
        assert refused.wait(60)
    finally:
        os.close(read_end)


def test_an_idle_pool_is_closed_at_its_deadline_and_not_a_rounding_error_later() -> None:
    """In floats, (5.3 + 30) - 5.3 is less than 30. So the deadline was due again and again, but the pool did not count
    as idle for 30 s."""
    memory = SharedMemory(4096)
    reader, clock = SharedMemoryReader(memory.array, memory), VirtualClock(5.3)
    pools = RemotePools({reader.name: reader}, clock)
    description = reader.describe()
    assert description is not None
    pools.open(("p-1", 0, reader.name), description)
    deadline = pools.next_deadline()
    assert deadline == 5.3 + IDLE_S
    clock.advance(deadline - clock.now())
    pools.close_unused(set[str]().__contains__)
    assert pools.next_deadline() is None


@pytest.mark.parametrize(
    ("addresses", "block_size", "incarnation"),
    [
        ((), 16, "i"),
        (("tcp://d",), 0, "i"),
        (("tcp://d",), -16, "i"),
        (("tcp://d",), 2**63, "i"),
        (("tcp://d",) * 2000, 16, "i"),
        (("tcp://d",), 16, LONG),
        ((LONG,), 16, "i"),
    ],
)
def test_a_peer_that_cannot_be_is_refused_where_it_is_read(
    addresses: tuple[str, ...], block_size: int, incarnation: str
) -> None:
    """Such a peer comes in a gateway's request. The command to exchange KV with it once ended the transfer thread."""
    with pytest.raises(WireError):
        WorkerRef("d0", incarnation, addresses, block_size)


@pytest.mark.parametrize(
    "address", ["garbage", "tcp://nohost:", "foo://x", "udp://127.0.0.1:5", f"ipc://{LONG}"]
)
def test_a_message_to_an_address_that_is_none_is_dropped(address: str) -> None:
    channel = ZmqChannel(
        "127.0.0.1", BLOCK_NBYTES, None, SystemClock(), max_queued_bytes=BLOCK_NBYTES, dead_s=60.0
    )
    try:
        channel.send(address, b"header")
        assert channel.num_dropped == 1
    finally:
        channel.close()
