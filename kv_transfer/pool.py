"""KVBytes: this rank's KV pool as bytes, cut into the pieces that legs exchange; knows no tensor and no transfer."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from baton.kv import KVFingerprint
from kv_transfer.protocol.geometry import PieceShape, RankLayout, mismatch, piece_shape
from kv_transfer.transport.base import Bytes, Offsets, Runs


class KVBytes:
    """uint8 [num_blocks, bytes of a block], read and written in place. A block is [planes, heads, tokens, bytes].

    A plane is the keys or the values of one layer.
    """

    def __init__(self, blocks: Bytes, fingerprint: KVFingerprint, rank: int = 0) -> None:
        assert blocks.flags.c_contiguous, "the pool is not one span"
        self.blocks = blocks
        self.layout = RankLayout(fingerprint.block_size, fingerprint.num_ranks, rank)
        self._num_kv_heads = fingerprint.num_kv_heads
        num_heads = self._num_kv_heads // fingerprint.num_ranks
        self._cells_NPHTB = blocks.reshape(
            len(blocks), fingerprint.num_layers * 2, num_heads, fingerprint.block_size, -1
        )

    def mismatch(self, theirs: RankLayout) -> str | None:
        """Why no KV can be exchanged with such a peer, or None if it can."""
        return mismatch(self._num_kv_heads, self.layout, theirs)

    def pieces(self, theirs: RankLayout) -> "PieceView":
        """How the leg to one rank of a peer sees this pool."""
        ours = piece_shape(self._num_kv_heads, self.layout, theirs)
        peers = piece_shape(self._num_kv_heads, theirs, self.layout)
        return PieceView(
            self._cells_NPHTB, ours, self._num_kv_heads // theirs.num_ranks, theirs.block_size, peers
        )


@dataclass(frozen=True, slots=True)
class _Grid:
    """How a leg's pieces lie in one end's pool: strides in bytes, and where a piece's runs begin within it."""

    block_nbytes: int
    part_nbytes: int
    pieces_per_block: int
    run_offsets: Offsets

    def offsets(self, piece_ids: Sequence[int]) -> Offsets:
        """Of every run of every piece, from the beginning of the pool."""
        blocks, parts = np.divmod(np.asarray(piece_ids, dtype=np.int64), self.pieces_per_block)
        starts = blocks * self.block_nbytes + parts * self.part_nbytes
        offsets: Offsets = (starts[:, None] + self.run_offsets).reshape(-1)
        return offsets


class PieceView:
    """One leg's pieces of the pool. A piece's bytes are in the same order on both ends of the leg."""

    def __init__(
        self,
        cells_NPHTB: Bytes,
        shape: PieceShape,
        peer_heads: int,
        peer_block_size: int,
        peer_shape: PieceShape,
    ) -> None:
        _, num_planes, num_heads, block_size, cell_nbytes = cells_NPHTB.shape
        self.shape = shape
        self._cells_NPHTB = cells_NPHTB
        self._is_whole = shape.num_heads == num_heads and shape.pieces_per_block == 1
        self.nbytes = num_planes * shape.num_heads * shape.num_tokens * cell_nbytes
        is_peer_whole = peer_shape.num_heads == peer_heads and peer_shape.pieces_per_block == 1
        if self._is_whole and is_peer_whole:
            run_axes = 0
        else:
            run_axes = 1 if shape.pieces_per_block == peer_shape.pieces_per_block == 1 else 2
        self._run_nbytes = self.nbytes // (1, num_planes, num_planes * shape.num_heads)[run_axes]
        self._ours = _grid(num_planes, num_heads, block_size, cell_nbytes, shape, run_axes)
        self._theirs = _grid(num_planes, peer_heads, peer_block_size, cell_nbytes, peer_shape, run_axes)

    @property
    def pool_bytes(self) -> Bytes:
        """The whole pool, [bytes]: what the offsets of `runs` count in."""
        flat: Bytes = self._cells_NPHTB.reshape(-1)
        return flat

    def at(self, piece_id: int) -> Bytes:
        """The piece in place: [bytes] if it is a whole block, else [planes, heads, tokens, bytes]."""
        block_id, part = divmod(piece_id, self.shape.pieces_per_block)
        block_PHTB: Bytes = self._cells_NPHTB[block_id]
        if self._is_whole:
            return block_PHTB.reshape(-1)
        heads = slice(self.shape.first_head, self.shape.first_head + self.shape.num_heads)
        tokens = slice(part * self.shape.num_tokens, (part + 1) * self.shape.num_tokens)
        return block_PHTB[:, heads, tokens]

    def span(self, piece_id: int) -> Bytes:
        """The piece's bytes in one span, [bytes]: in place where it is a whole block, else a copy."""
        return np.ascontiguousarray(self.at(piece_id)).reshape(-1)

    def buffer_for(self, piece_id: int) -> Bytes:
        """Where to receive the piece's bytes, [bytes]; `store` must follow."""
        return self.at(piece_id) if self._is_whole else np.empty(self.nbytes, np.uint8)

    def store(self, piece_id: int, buffer: Bytes) -> None:
        """What `buffer_for` gave is filled."""
        if not self._is_whole:
            piece_PHTB = self.at(piece_id)
            piece_PHTB[...] = buffer.reshape(piece_PHTB.shape)

    def checksum(self, piece_id: int) -> int:
        """xxh3_64 of the piece's bytes."""
        return xxhash.xxh3_64_intdigest(self.span(piece_id).data)

    def runs(self, peers: Sequence[int], ours: Sequence[int]) -> Runs:
        """What to copy so that each of the peer's pieces becomes one of ours."""
        local = self._ours.offsets(ours)
        return Runs(self._theirs.offsets(peers), local, np.full(len(local), self._run_nbytes)).coalesced()


def _grid(
    num_planes: int, num_heads: int, block_size: int, cell_nbytes: int, shape: PieceShape, run_axes: int
) -> _Grid:
    """`run_axes`: how many of a piece's axes, planes and then heads, are cut into runs."""
    head_nbytes = block_size * cell_nbytes
    run_offsets = np.array([shape.first_head * head_nbytes])
    if run_axes > 0:
        run_offsets = (np.arange(num_planes)[:, None] * (num_heads * head_nbytes) + run_offsets).reshape(-1)
    if run_axes > 1:
        run_offsets = (run_offsets[:, None] + np.arange(shape.num_heads) * head_nbytes).reshape(-1)
    return _Grid(
        num_planes * num_heads * head_nbytes,
        shape.num_tokens * cell_nbytes,
        shape.pieces_per_block,
        run_offsets,
    )
