"""Which bytes two workers exchange if their block sizes or tensor-parallel ranks differ; pure arithmetic.

A *rank transfer* joins one rank of the producer to one rank of the consumer that needs some of its heads. The KV of a
rank transfer is cut into *pieces*. A piece has all heads of the rank transfer, and as many tokens as the smaller of
both workers' blocks. With equal sizes, the usual case, a piece is a block.

With several KV groups, the pieces of a prompt count up row by row, as the blocks of a request's table do.

Where heads share a latent, all ranks of a worker have the same bytes, and no rank transfer divides them. Each
rank of the consumer gets these bytes once. If the producer has more ranks, some of its ranks send nothing.

    producer: 2 ranks of 4 heads, blocks of 16 tokens        consumer: 4 ranks of 2 heads, blocks of 32 tokens

    rank 0   block 0        block 1                          rank 0   block 0
      h0 | piece 0    |  piece 1     |    -- 0 to 0 -->        h0 | piece 0    piece 1    |
      h1 |            |              |                         h1 |                       |
      h2 | piece 0    |  piece 1     |    -- 0 to 1 -->      rank 1 ...
      h3 |            |              |
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from baton.kv_groups import ONE_GROUP, KVGroups


@dataclass(frozen=True, slots=True)
class RankLayout:
    """The layout of one rank: `block_size` tokens per block, and its share of all heads.

    `groups` matters only for our own rank; the fingerprints say whether the peer's groups are the same.
    """

    block_size: int
    num_ranks: int = 1
    rank: int = 0
    groups: KVGroups = ONE_GROUP


@dataclass(frozen=True, slots=True)
class PieceShape:
    """Where a rank transfer's pieces lie in this rank's blocks.

    Piece `block_id * pieces_per_block + i` is the i-th of its block.
    """

    pieces_per_block: int
    num_tokens: int
    """Tokens of one piece."""
    first_head: int
    """The first head's index among this rank's heads."""
    num_heads: int
    num_groups: int = 1

    def num_pieces_for(self, num_tokens: int) -> int:
        """How many pieces the first `num_tokens` tokens of a prompt take."""
        return -(-num_tokens // self.num_tokens) * self.num_groups

    def pieces_of(
        self, first_entry: int, block_ids: Iterable[int | None], num_tokens: int
    ) -> Iterator[tuple[int, int]]:
        """For each piece of these blocks: its index in a prompt of `num_tokens` tokens, and its id.

        The blocks are those of the prompt's table from entry `first_entry` on. A block id of None: no piece of that
        block is needed.
        """
        num_pieces = self.num_pieces_for(num_tokens)
        for entry, block_id in enumerate(block_ids, first_entry):
            if block_id is None:
                continue
            row, group = divmod(entry, self.num_groups)
            for part in range(self.pieces_per_block):
                index = (row * self.pieces_per_block + part) * self.num_groups + group
                if index < num_pieces:  # the last block may have more pieces than the prompt
                    yield index, block_id * self.pieces_per_block + part


def mismatch(num_heads: int | None, ours: RankLayout, theirs: RankLayout) -> str | None:
    """Why two workers cannot exchange KV of `num_heads` heads in all, or None if they can.

    `num_heads`, here and below: the heads that are divided among a worker's ranks. None: each rank has
    everything.
    """
    for what, a, b in (
        ("block_size", ours.block_size, theirs.block_size),
        ("tensor-parallel ranks", ours.num_ranks, theirs.num_ranks),
    ):
        if a % b and b % a:
            return f"{what}: neither of {a} and {b} divides the other"
    if ours.groups.num_windowed and ours.block_size != theirs.block_size:
        return f"block_size: {ours.block_size} and {theirs.block_size} differ, but some layers have a sliding window"
    for num_ranks in (ours.num_ranks, theirs.num_ranks):
        if num_heads is not None and num_heads % num_ranks:
            return f"tensor-parallel ranks: {num_heads} heads cannot be divided among {num_ranks} ranks"
    return None


def peers_of(
    num_heads: int | None, rank: int, num_ranks: int, num_peer_ranks: int, *, is_producer: bool
) -> range:
    """The other worker's ranks that this rank exchanges KV with.

    These ranks have some of its heads. If `num_heads` is None, each rank has the whole KV (latents). Then each rank of
    the consumer receives all of it from one rank of the producer. If the producer has more ranks, some of them have no
    peer.
    """
    is_divided = num_heads is not None
    if num_peer_ranks >= num_ranks:
        num_each = num_peer_ranks // num_ranks
        first = rank * num_each
        return range(first, first + (num_each if is_divided or is_producer else 1))
    num_sharing = num_ranks // num_peer_ranks
    peer = rank // num_sharing
    has_peer = is_divided or not is_producer or rank % num_sharing == 0
    return range(peer, peer + has_peer)


def piece_shape(num_heads: int | None, ours: RankLayout, theirs: RankLayout) -> PieceShape:
    """The layout, in our blocks, of the pieces between two ranks; requires that `mismatch` returns None."""
    num_tokens = min(ours.block_size, theirs.block_size)
    num_parts = ours.block_size // num_tokens
    if num_heads is None:
        return PieceShape(num_parts, num_tokens, 0, 1, ours.groups.num_groups)
    our_heads, their_heads = num_heads // ours.num_ranks, num_heads // theirs.num_ranks
    our_first, their_first = ours.rank * our_heads, theirs.rank * their_heads
    first = max(our_first, their_first)
    last = min(our_first + our_heads, their_first + their_heads)
    return PieceShape(num_parts, num_tokens, first - our_first, last - first, ours.groups.num_groups)
