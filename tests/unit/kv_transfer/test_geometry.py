"""Unequal workers: which bytes of which piece go where, for every pair of rank counts and block sizes."""

from dataclasses import replace

import numpy as np
import pytest

from baton.kv import LATENT_LAYOUT, KVFingerprint
from baton.kv_groups import KVGroups
from kv_transfer.pool import HostPieces, KVBytes
from kv_transfer.protocol.geometry import PieceShape, RankLayout, mismatch, piece_shape
from kv_transfer.transport.base import Bytes

NUM_LAYERS, NUM_HEADS, HEAD_BYTES, NUM_TOKENS = 2, 8, 3, 96
FINGERPRINT = KVFingerprint(2, "m", "uint8", "LKHTD", NUM_LAYERS, NUM_HEADS, HEAD_BYTES, 16, 1)

RANKS = [(1, 1), (1, 2), (2, 1), (2, 4), (4, 2), (1, 8), (8, 1), (2, 2)]
BLOCK_SIZES = [(16, 16), (16, 32), (32, 16), (8, 32), (48, 16)]

KV_PHTB = np.random.default_rng(0).integers(
    0, 256, (NUM_LAYERS * 2, NUM_HEADS, NUM_TOKENS, HEAD_BYTES), dtype=np.uint8
)
"""What a model without ranks and blocks would have computed for the prompt."""


def make_pool(num_ranks: int, rank: int, block_size: int, seed: int) -> KVBytes:
    """A rank's pool of 15 blocks full of nonsense."""
    num_bytes = NUM_LAYERS * 2 * NUM_HEADS // num_ranks * block_size * HEAD_BYTES
    blocks = np.random.default_rng(seed).integers(0, 256, (15, num_bytes), dtype=np.uint8)
    return KVBytes(blocks, replace(FINGERPRINT, block_size=block_size, num_ranks=num_ranks), rank)


def heads_of(pool: KVBytes) -> slice:
    num_heads = NUM_HEADS // pool.layout.num_ranks
    return slice(pool.layout.rank * num_heads, (pool.layout.rank + 1) * num_heads)


def kv_in(pool: KVBytes, block_ids: list[int]) -> Bytes:
    """What the blocks hold, [planes, heads of the rank, tokens, bytes]."""
    num_heads = NUM_HEADS // pool.layout.num_ranks
    blocks = pool.blocks.reshape(15, NUM_LAYERS * 2, num_heads, pool.layout.block_size, HEAD_BYTES)
    return np.concatenate([blocks[block_id] for block_id in block_ids], axis=2)


def fill(pool: KVBytes, block_ids: list[int]) -> None:
    """The rank computes its heads of the prompt into these blocks."""
    size = pool.layout.block_size
    for number, block_id in enumerate(block_ids):
        tokens = KV_PHTB[:, heads_of(pool), number * size : (number + 1) * size]
        pool.blocks[block_id] = np.ascontiguousarray(tokens).reshape(-1)


def hand_over(
    source: HostPieces, target: HostPieces, sources: list[int], targets: list[int], how: str
) -> None:
    offered = dict(source.shape.pieces_of(0, sources, NUM_TOKENS))
    wanted = dict(target.shape.pieces_of(0, targets, NUM_TOKENS))
    assert offered.keys() == wanted.keys()
    pieces = [(offered[index], wanted[index]) for index in offered]
    if how == "sent":
        spans = source.spans([theirs for theirs, _ in pieces])
        sent = np.concatenate(spans).reshape(len(pieces), -1)
        for (theirs, ours), piece in zip(pieces, sent, strict=True):
            target.store(ours, piece)
            assert source.checksum(theirs) == target.checksum(ours)
    else:
        runs = target.runs([theirs for theirs, _ in pieces], [ours for _, ours in pieces])
        source_bytes, target_bytes = source._blocks.reshape(-1), target._blocks.reshape(-1)
        runs.check_within(source_bytes.nbytes, target_bytes.nbytes)
        for remote, local, length in zip(runs.remote, runs.local, runs.lengths, strict=True):
            target_bytes[local : local + length] = source_bytes[remote : remote + length]


@pytest.mark.parametrize("how", ["sent", "read"])
@pytest.mark.parametrize(("num_producers", "num_consumers"), RANKS)
@pytest.mark.parametrize(("producer_block", "consumer_block"), BLOCK_SIZES)
def test_whatever_the_ranks_and_blocks_every_head_of_every_token_arrives(
    num_producers: int, num_consumers: int, producer_block: int, consumer_block: int, how: str
) -> None:
    sources = [14 - 2 * i if i < 7 else 2 * i - 13 for i in range(NUM_TOKENS // producer_block)]
    targets = [1 + i for i in range(NUM_TOKENS // consumer_block)]
    producers = [make_pool(num_producers, rank, producer_block, 1) for rank in range(num_producers)]
    for producer in producers:
        fill(producer, sources)
    for rank in range(num_consumers):
        consumer = make_pool(num_consumers, rank, consumer_block, 2)
        before = consumer.blocks.copy()
        for peer in consumer.peers_of(num_producers, is_producer=False):
            producer = producers[peer]
            assert rank in producer.peers_of(num_consumers, is_producer=True)
            source, target = producer.pieces(consumer.layout), consumer.pieces(producer.layout)
            assert source.nbytes == target.nbytes
            hand_over(source, target, sources, targets, how)
        assert (kv_in(consumer, targets) == KV_PHTB[:, heads_of(consumer)]).all()
        others = [block_id for block_id in range(15) if block_id not in targets]
        assert (consumer.blocks[others] == before[others]).all()


@pytest.mark.parametrize("how", ["sent", "read"])
@pytest.mark.parametrize(("num_producers", "num_consumers"), RANKS)
@pytest.mark.parametrize(("producer_block", "consumer_block"), BLOCK_SIZES)
def test_every_rank_gets_the_latents_of_all_heads_from_one_rank(
    num_producers: int, num_consumers: int, producer_block: int, consumer_block: int, how: str
) -> None:
    latents = replace(FINGERPRINT, layout=LATENT_LAYOUT, num_kv_heads=1)
    truth_LTB = KV_PHTB[:NUM_LAYERS, 0]
    sources = [13 - 2 * i if i < 7 else 2 * i - 12 for i in range(NUM_TOKENS // producer_block)]
    targets = [1 + i for i in range(NUM_TOKENS // consumer_block)]

    def pool_of(num_ranks: int, rank: int, block_size: int) -> KVBytes:
        blocks = np.zeros((15, NUM_LAYERS * block_size * HEAD_BYTES), dtype=np.uint8)
        return KVBytes(blocks, replace(latents, block_size=block_size, num_ranks=num_ranks), rank)

    producers = [pool_of(num_producers, rank, producer_block) for rank in range(num_producers)]
    for producer in producers:
        for number, block_id in enumerate(sources):
            tokens = truth_LTB[:, number * producer_block : (number + 1) * producer_block]
            producer.blocks[block_id] = np.ascontiguousarray(tokens).reshape(-1)
    asked = []
    for rank in range(num_consumers):
        consumer = pool_of(num_consumers, rank, consumer_block)
        (peer,) = consumer.peers_of(num_producers, is_producer=False)
        asked.append((peer, rank))
        source, target = producers[peer].pieces(consumer.layout), consumer.pieces(producers[peer].layout)
        hand_over(source, target, sources, targets, how)
        shape = NUM_LAYERS, consumer_block, HEAD_BYTES
        held = np.concatenate([consumer.blocks[block_id].reshape(shape) for block_id in targets], axis=1)
        assert (held == truth_LTB).all()
    served = [
        (producer.layout.rank, rank)
        for producer in producers
        for rank in producer.peers_of(num_consumers, is_producer=True)
    ]
    assert served == sorted(asked), "both ends know the same rank transfers"


def test_ranks_need_not_divide_a_latent() -> None:
    assert mismatch(None, RankLayout(16, 16), RankLayout(16)) is None
    reason = mismatch(None, RankLayout(16, 2), RankLayout(16, 3))
    assert reason == "tensor-parallel ranks: neither of 2 and 3 divides the other"


def test_equal_workers_exchange_whole_blocks_in_place() -> None:
    source, target = make_pool(2, 1, 16, 1), make_pool(2, 1, 16, 2)
    view = target.pieces(source.layout)
    assert view.shape == PieceShape(1, 16, 0, NUM_HEADS // 2)
    first, second = view.spans([3, 7, 8])
    first[:], second[:] = 7, 8
    assert (target.blocks[3] == 7).all()
    assert (target.blocks[7:9] == 8).all(), "neighbours are one span"
    runs = view.runs([4, 5, 6, 9], [1, 2, 3, 4])
    size = target.blocks[0].nbytes
    assert runs.lengths.tolist() == [3 * size, size], "neighbours are copied at once"


@pytest.mark.parametrize(
    ("ours", "theirs", "reason"),
    [
        (RankLayout(16), RankLayout(24), "block_size: neither of 16 and 24 divides the other"),
        (RankLayout(16, 2), RankLayout(16, 3), "tensor-parallel ranks: neither of 2 and 3"),
        (RankLayout(16, 16), RankLayout(16), "tensor-parallel ranks: 8 heads cannot be divided among 16"),
        (RankLayout(16, 2), RankLayout(64, 8), None),
        (
            RankLayout(16, groups=KVGroups(1, 1, 64)),
            RankLayout(32),
            "block_size: 16 and 32 differ, but some layers",
        ),
        (RankLayout(16, groups=KVGroups(1, 1, 64)), RankLayout(16, 2), None),
        (RankLayout(16, groups=KVGroups(2)), RankLayout(32), None),
    ],
)
def test_c43_what_cannot_be_exchanged_is_named(
    ours: RankLayout, theirs: RankLayout, reason: str | None
) -> None:
    found = mismatch(NUM_HEADS, ours, theirs)
    assert found is None if reason is None else reason in (found or "")


def test_a_prompt_takes_only_as_many_pieces_as_it_has_tokens() -> None:
    shape = piece_shape(NUM_HEADS, RankLayout(32), RankLayout(16))
    assert [shape.num_pieces_for(n) for n in (1, 16, 17, 32, 33)] == [1, 1, 2, 2, 3]
    assert list(shape.pieces_of(0, [5, 7], 33)) == [(0, 10), (1, 11), (2, 14)]
    assert list(shape.pieces_of(1, [None, 7], 96)) == [(4, 14), (5, 15)]


def test_the_pieces_of_several_groups_count_up_row_by_row() -> None:
    """Two groups, and blocks of two pieces: both ends give each piece of a prompt the same number."""
    large = piece_shape(NUM_HEADS, RankLayout(32, groups=KVGroups(2)), RankLayout(16))
    small = piece_shape(NUM_HEADS, RankLayout(16, groups=KVGroups(2)), RankLayout(32))
    in_large = [index for index, _ in large.pieces_of(0, range(4), 64)]
    assert in_large == [*(0, 2), *(1, 3), *(4, 6), *(5, 7)]
    assert [index for index, _ in small.pieces_of(0, range(8), 64)] == list(range(8))
    assert [large.num_pieces_for(n) for n in (1, 16, 17, 33)] == [2, 2, 4, 6]


def test_a_block_of_a_group_has_only_its_layers() -> None:
    num_bytes = NUM_LAYERS * NUM_HEADS * 16 * HEAD_BYTES
    pool = KVBytes(np.zeros((3, num_bytes), np.uint8), replace(FINGERPRINT, groups=KVGroups(1, 1, 64)))
    assert pool.pieces(pool.layout).nbytes == num_bytes, "of one of two layers, keys and values"
