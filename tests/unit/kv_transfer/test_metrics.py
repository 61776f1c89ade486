"""What was handed over with whom: sums by end, peer and transport, from real hand-overs."""

from baton.kv import KVTransferParams, TransferRole
from baton.worker import KVPeerCounts
from kv_transfer.metrics import MAX_PEERS, PeerMetrics
from kv_transfer.orders import AbortLoad, BeginLoad, BeginSend, FinishSend, LoadBlocks, SendBlocks
from tests.factories.endpoints import TOKEN, Fabric, Worker


def begin(fabric: Fabric, prefill: Worker, decode: Worker, request_id: str) -> None:
    to_prefill = KVTransferParams(TransferRole.PRODUCER, request_id, 0, decode.ref)
    to_decode = KVTransferParams(TransferRole.CONSUMER, request_id, 0, prefill.ref)
    decode.order(BeginLoad(request_id, to_decode, 32))
    decode.load(LoadBlocks(request_id, 0, (1, 2)))
    prefill.order(BeginSend(request_id, to_prefill, 32))
    fabric.deliver()


def test_hand_overs_are_counted_by_peer_and_transport_with_their_times() -> None:
    fabric = Fabric("shared_memory")
    prefill, decode = fabric.add("p0"), fabric.add("d0")
    prefill.compute(32)
    begin(fabric, prefill, decode, "r")
    fabric.clock.advance(0.5)
    prefill.save(SendBlocks("r", 0, (1,)))
    fabric.deliver()
    fabric.clock.advance(0.25)
    prefill.order(FinishSend("r", 2, (2,), TOKEN))
    fabric.clock.advance(0.125)
    fabric.deliver()
    block = prefill.blocks[0][0].nbytes
    assert prefill.connector.peers() == (
        KVPeerCounts(TransferRole.PRODUCER, "d0", "shared_memory", 1, 0, 2 * block, 0.0, 0.0, 0.125),
    )
    assert decode.connector.peers() == (
        KVPeerCounts(TransferRole.CONSUMER, "p0", "shared_memory", 1, 0, 2 * block, 0.5, 0.375, 0.0),
    )


def test_what_did_not_arrive_counts_as_failed_on_both_ends() -> None:
    fabric = Fabric("zmq_tcp")
    prefill, decode = fabric.add("p0"), fabric.add("d0")
    prefill.compute(32)
    begin(fabric, prefill, decode, "r")
    decode.order(AbortLoad("r", "the client left"))
    fabric.deliver()
    prefill.order(FinishSend("r", 2, (2,), TOKEN))
    (given,), (taken,) = prefill.connector.peers(), decode.connector.peers()
    assert (given.done, given.failed) == (taken.done, taken.failed) == (0, 1)


def test_nothing_is_copied_while_nothing_changes_and_peers_are_bounded() -> None:
    metrics = PeerMetrics()
    metrics.missed("p0", "")
    assert metrics.snapshot() is metrics.snapshot()
    for number in range(MAX_PEERS + 5):
        metrics.missed(f"peer{number}", "")
    assert len(metrics.snapshot()) == MAX_PEERS
    assert metrics.snapshot()[-1].peer == f"peer{MAX_PEERS + 4}"
