"""What was handed over with whom: sums by end, peer and transport, from real hand-overs."""

from collections import Counter

import pytest

from baton.kv import KVTransferParams, TransferRole
from baton.worker import KVPeerCounts
from kv_transfer.commands import (
    AbortLoad,
    AbortSend,
    BeginSend,
    FinishSend,
    NoteStarvation,
    SendBlocks,
)
from kv_transfer.protocol.messages import Pieces
from kv_transfer.records import MAX_ROWS, PeerMetrics
from tests.factories.endpoints import LOAD_TIMEOUT_S, TOKEN, Fabric, Worker
from tests.factories.hand_overs import begin, begun, both_ends
from tests.factories.transfer import HEARTBEAT_S, Wire, honest, sent, start


def test_hand_overs_are_counted_by_peer_and_transport_with_their_times() -> None:
    fabric, prefill, decode = begun("shared_memory", 32)
    fabric.clock.advance(0.5)
    prefill.save(SendBlocks("r", 0, (1,)))
    fabric.deliver()
    fabric.clock.advance(0.25)
    prefill.command(FinishSend("r", 2, (2,), TOKEN))
    fabric.clock.advance(0.125)
    fabric.deliver()
    block = prefill.blocks[0][0].nbytes
    assert prefill.connector.peers() == (
        KVPeerCounts(TransferRole.PRODUCER, "d0", "shared_memory", 1, 0, 0, 2 * block, 0.0, 0.0, 0.125),
    )
    assert decode.connector.peers() == (
        KVPeerCounts(TransferRole.CONSUMER, "p0", "shared_memory", 1, 0, 0, 2 * block, 0.5, 0.375, 0.0),
    )


def test_a_worker_sums_the_rank_transfers_of_all_its_ranks() -> None:
    fabric, prefill, decode = begun("shared_memory", 32, 2, 1)
    prefill.command(FinishSend("r", 2, (1, 2), TOKEN))
    fabric.deliver()
    (gave,), (took,) = prefill.connector.peers(), decode.connector.peers()
    assert (gave.done, gave.num_bytes) == (took.done, took.num_bytes)
    assert (gave.done, took.done) == (2, 2)


def ends(worker: Worker) -> list[tuple[int, int, int]]:
    """Rank transfers with each peer that were done, that failed, and that were not needed."""
    return [(peer.done, peer.failed, peer.not_needed) for peer in worker.connector.peers()]


def test_what_did_not_arrive_counts_as_failed_on_both_ends() -> None:
    fabric = Fabric("zmq_tcp")
    prefill, decode = fabric.add("p0"), fabric.add("d0")
    begin(fabric, prefill, decode, 32)
    prefill.command(AbortSend("r", "the prefill failed", is_unneeded=False, is_held=True))
    fabric.deliver()
    assert ends(prefill) == ends(decode) == [(0, 1, 0)]
    begin(fabric, prefill, decode, 32, "late")
    fabric.network.cut("sim://p0/0")
    fabric.advance(LOAD_TIMEOUT_S)
    prefill.command(AbortSend("late", "the prefill failed", is_unneeded=False, is_held=True))
    assert ends(prefill) == ends(decode) == [(0, 2, 0)]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_c40_a_prompt_that_the_prefill_worker_answered_alone_is_no_failed_hand_over(num_ranks: int) -> None:
    fabric, prefill, decode = begun("zmq_tcp", 32, num_ranks, 1)
    prefill.save(SendBlocks("r", 0, (1,)))
    fabric.deliver()
    prefill.command(AbortSend("r", "token 0 was the last", is_unneeded=True, is_held=True))
    fabric.deliver()
    assert ends(decode) == [(0, 0, num_ranks)]
    assert ends(prefill) == [(0, 0, num_ranks)]
    counters = Counter(decode.connector.counters())
    assert (counters["kv_loads_not_needed"], counters["kv_loads_failed"]) == (num_ranks, 0)
    fabric.assert_at_rest()


def test_c31_a_postponed_load_has_not_failed() -> None:
    fabric = Fabric("zmq_tcp")
    prefill, decode = fabric.add("p0"), fabric.add("d0")
    other, _ = both_ends(prefill.ref, decode.ref, "other")
    prefill.command(BeginSend("other", other, 16))
    prefill.save(SendBlocks("other", 0, (9,)))
    begin(fabric, prefill, decode, 32)
    prefill.command(FinishSend("other", 1, (), TOKEN), NoteStarvation(is_starved=True))
    fabric.deliver()
    (failure,) = decode.output().failed_recving
    assert failure.is_postponed
    assert ends(decode) == []


def test_a_request_that_ends_in_the_queue_has_not_failed_to_be_handed_over() -> None:
    fabric = Fabric("zmq_tcp")
    prefill, decode = fabric.add("p0"), fabric.add("d0")
    transfer = KVTransferParams(TransferRole.PRODUCER, "r", 0, decode.ref)
    prefill.command(BeginSend("r", transfer, 32))
    prefill.command(AbortSend("r", "the client left", is_unneeded=True, is_held=False))
    assert ends(prefill) == [(0, 0, 1)]


def test_a_request_whose_client_left_was_not_needed_on_both_ends() -> None:
    fabric, prefill, decode = begun("zmq_tcp", 32)
    decode.command(AbortLoad("r", "the client left"))
    fabric.deliver()
    prefill.command(FinishSend("r", 2, (2,), TOKEN))
    assert ends(prefill) == ends(decode) == [(0, 0, 1)]


def test_bytes_that_were_lost_on_the_way_do_not_count_as_received() -> None:
    fabric, prefill, decode = begun("zmq_tcp", 32)
    fabric.network.num_payloads_to_lose = 1
    prefill.save(SendBlocks("r", 0, (1,)))
    fabric.deliver()
    assert decode.connector.counters()["kv_checksum_failures"] == 1
    prefill.command(FinishSend("r", 2, (2,), TOKEN))
    fabric.deliver()
    num_bytes = 2 * prefill.blocks[0][0].nbytes
    assert decode.connector.counters()["kv_bytes_received"] == num_bytes
    assert [peer.num_bytes for peer in decode.connector.peers()] == [num_bytes]


def test_pieces_that_a_repeated_open_asks_for_again_count_as_resent() -> None:
    wire = Wire(
        lambda frame: [] if isinstance(frame.message, Pieces) and 0 in frame.message.indices else [frame]
    )
    start(wire)
    wire.ready(0, 2)
    wire.ready(2, 1)
    wire.deliver()
    assert wire.producer_counters["kv_pieces_resent"] == 0
    wire.tamper = honest
    wire.advance(2 * HEARTBEAT_S)
    num_lost = sum(len(message.indices) for message in sent(wire, Pieces)) - 3
    assert wire.producer_counters["kv_pieces_resent"] == num_lost > 0


def test_nothing_is_copied_while_nothing_changes_and_peers_are_bounded() -> None:
    metrics = PeerMetrics()
    metrics.missed("p0", "", is_needed=True)
    assert metrics.snapshot() is metrics.snapshot()
    for number in range(MAX_ROWS + 5):
        metrics.missed(f"peer{number}", "", is_needed=True)
        metrics.moved(TransferRole.CONSUMER, f"peer{number}", "", 10)
    rows = metrics.snapshot()
    assert [row.peer for row in rows] == [f"peer{number}" for number in range(5, MAX_ROWS + 5)]
    assert {(row.failed, row.num_bytes) for row in rows} == {(1, 10)}
