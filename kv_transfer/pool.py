"""A rank's KV pool as bytes, cut into the pieces that rank transfers exchange; knows no tensor and no transfer.

A block is [planes, heads, tokens, bytes], one span; a plane is the keys, the values or the latents of one layer of a KV
group. Latents count as one head. In host memory, pieces are read and written in place. On a device, other devices
copy them directly, and staging.py moves those that travel over a channel.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import xxhash

from baton.kv import KVFingerprint
from kv_transfer.cuda.memory import CudaMemory
from kv_transfer.protocol.geometry import PieceShape, RankLayout, mismatch, peers_of, piece_shape
from kv_transfer.transport.base import Bytes, Offsets, Runs

MAX_POOL_NBYTES = 2**62
"""Largest pool: every offset in it, and the end of every run, fits into an int64."""


@dataclass(frozen=True, slots=True)
class BlockShape:
    """Shape of one rank's blocks. A cell is one token's key or value of one head, or its latent."""

    num_planes: int
    num_heads: int
    block_size: int
    cell_nbytes: int

    @property
    def nbytes(self) -> int:
        return self.num_planes * self.num_heads * self.block_size * self.cell_nbytes


class RankPool:
    """A rank's pool, in any memory."""

    def __init__(self, block_nbytes: int, fingerprint: KVFingerprint, rank: int) -> None:
        self.fingerprint = fingerprint
        self.layout = RankLayout(fingerprint.block_size, fingerprint.num_ranks, rank, fingerprint.groups)
        self.block_nbytes = block_nbytes
        num_planes = fingerprint.num_planes // fingerprint.groups.num_groups
        num_heads = self._heads_on(fingerprint.num_ranks)
        cell_nbytes = block_nbytes // (num_planes * num_heads * fingerprint.block_size)
        self._block = BlockShape(num_planes, num_heads, fingerprint.block_size, cell_nbytes)
        assert self._block.nbytes == block_nbytes, (
            f"a block of {block_nbytes} bytes does not match {self._block}"
        )

    def mismatch(self, theirs: RankLayout) -> str | None:
        """Why no KV can be exchanged with a peer of this layout; None if KV can be exchanged."""
        return mismatch(self.fingerprint.num_divided_heads, self.layout, theirs)

    def peers_of(self, num_peer_ranks: int, *, is_producer: bool) -> range:
        """The peer ranks with which this rank exchanges KV, if the peer has `num_peer_ranks` ranks."""
        ours = self.layout
        return peers_of(
            self.fingerprint.num_divided_heads,
            ours.rank,
            ours.num_ranks,
            num_peer_ranks,
            is_producer=is_producer,
        )

    def pieces(self, theirs: RankLayout) -> "PieceView":
        """This pool, cut into the pieces of a rank transfer with a rank of layout `theirs`."""
        return PieceView(*self._sides(theirs))

    def _heads_on(self, num_ranks: int) -> int:
        """Number of heads in the blocks of one rank, if a worker has `num_ranks` ranks."""
        num_heads = self.fingerprint.num_divided_heads
        return 1 if num_heads is None else num_heads // num_ranks

    def _sides(self, theirs: RankLayout) -> tuple["PiecesInBlocks", "PiecesInBlocks"]:
        """Our side of a rank transfer, and the side of a rank of layout `theirs`."""
        num_heads, heads_there = self.fingerprint.num_divided_heads, self._heads_on(theirs.num_ranks)
        blocks_there = replace(self._block, num_heads=heads_there, block_size=theirs.block_size)
        return (
            PiecesInBlocks(self._block, piece_shape(num_heads, self.layout, theirs)),
            PiecesInBlocks(blocks_there, piece_shape(num_heads, theirs, self.layout)),
        )


class KVBytes(RankPool):
    """A pool in this process's memory: uint8 [num_blocks, bytes of a block]."""

    def __init__(self, blocks: Bytes, fingerprint: KVFingerprint, rank: int = 0) -> None:
        assert blocks.flags.c_contiguous, "the pool is not one contiguous span"
        super().__init__(blocks.shape[1], fingerprint, rank)
        self.blocks = blocks

    def pieces(self, theirs: RankLayout) -> "HostPieces":
        return HostPieces(self.blocks, *self._sides(theirs))


@dataclass(frozen=True, slots=True)
class DeviceBlocks:
    """Blocks of `block_nbytes` bytes, from the beginning of a device's memory."""

    memory: CudaMemory
    block_nbytes: int


class DeviceKVBytes(RankPool):
    """A pool in a device's memory."""

    def __init__(self, blocks: DeviceBlocks, fingerprint: KVFingerprint, rank: int = 0) -> None:
        super().__init__(blocks.block_nbytes, fingerprint, rank)
        self.memory = blocks.memory


def make_pool(blocks: Bytes | DeviceBlocks, fingerprint: KVFingerprint, rank: int) -> RankPool:
    if isinstance(blocks, DeviceBlocks):
        return DeviceKVBytes(blocks, fingerprint, rank)
    return KVBytes(blocks, fingerprint, rank)


@dataclass(frozen=True, slots=True)
class _Grid:
    """Where the pieces of a rank transfer are in one end's pool: the strides from block to block and from piece to
    piece (`part_nbytes`), and the offset of each run from the beginning of its piece."""

    block_nbytes: int
    part_nbytes: int
    pieces_per_block: int
    run_offsets: Offsets

    def offsets(self, piece_ids: Sequence[int]) -> Offsets:
        """Offsets of all runs of all pieces, from the beginning of the pool; OverflowError for impossible piece ids."""
        ids = np.asarray(piece_ids, dtype=np.int64)
        if len(ids) and not 0 <= ids.min() <= ids.max() < MAX_POOL_NBYTES // self.block_nbytes:
            raise OverflowError(f"piece ids {ids.min()} to {ids.max()} are outside any pool")
        blocks, parts = np.divmod(ids, self.pieces_per_block)
        starts = blocks * self.block_nbytes + parts * self.part_nbytes
        offsets: Offsets = (starts[:, None] + self.run_offsets).reshape(-1)
        return offsets


@dataclass(frozen=True, slots=True)
class PiecesInBlocks:
    """The blocks of one end of a rank transfer, and its pieces in them."""

    block: BlockShape
    pieces: PieceShape

    @property
    def are_whole(self) -> bool:
        """Whether each piece is a block."""
        return self.pieces.num_heads == self.block.num_heads and self.pieces.pieces_per_block == 1

    def grid(self, num_cut_axes: int) -> _Grid:
        """`num_cut_axes`: how many axes of a piece (first planes, then heads) this grid cuts into runs."""
        block, pieces = self.block, self.pieces
        head_nbytes = block.block_size * block.cell_nbytes
        run_offsets = np.array([pieces.first_head * head_nbytes])
        if num_cut_axes > 0:
            planes = np.arange(block.num_planes) * (block.num_heads * head_nbytes)
            run_offsets = (planes[:, None] + run_offsets).reshape(-1)
        if num_cut_axes > 1:
            run_offsets = (run_offsets[:, None] + np.arange(pieces.num_heads) * head_nbytes).reshape(-1)
        part_nbytes = pieces.num_tokens * block.cell_nbytes
        return _Grid(block.nbytes, part_nbytes, pieces.pieces_per_block, run_offsets)


class PieceView:
    """Where the bytes of a rank transfer's pieces are on both ends, in runs that are contiguous on both."""

    def __init__(self, ours: PiecesInBlocks, peers: PiecesInBlocks) -> None:
        self.shape, self.is_whole = ours.pieces, ours.are_whole
        num_planes, num_heads = ours.block.num_planes, self.shape.num_heads
        self.nbytes = num_planes * num_heads * self.shape.num_tokens * ours.block.cell_nbytes
        """Bytes of one piece."""
        if ours.are_whole and peers.are_whole:
            num_cut_axes = 0
        else:
            num_cut_axes = 1 if self.shape.pieces_per_block == peers.pieces.pieces_per_block == 1 else 2
        self._run_nbytes = self.nbytes // (1, num_planes, num_planes * num_heads)[num_cut_axes]
        self._ours, self._peers = ours.grid(num_cut_axes), peers.grid(num_cut_axes)

    def runs(self, peers: Sequence[int], ours: Sequence[int]) -> Runs:
        """The runs that copy each of the peer's pieces to one of ours."""
        local = self._ours.offsets(ours)
        return Runs(self._peers.offsets(peers), local, np.full(len(local), self._run_nbytes)).coalesced()

    def runs_of(self, piece_ids: Sequence[int]) -> Runs:
        """The runs that copy between our pieces and one span that contains these pieces in order. `remote` is the
        offset in that span."""
        local = self._ours.offsets(piece_ids)
        lengths = np.full(len(local), self._run_nbytes)
        return Runs(np.arange(len(local)) * self._run_nbytes, local, lengths).coalesced()


class HostPieces(PieceView):
    """A rank transfer's pieces in a KVBytes. A piece's bytes are in the same order on both ends."""

    def __init__(self, blocks: Bytes, ours: PiecesInBlocks, peers: PiecesInBlocks) -> None:
        super().__init__(ours, peers)
        self._blocks = blocks
        block = ours.block
        self._cells_NPHTB = blocks.reshape(
            len(blocks), block.num_planes, block.num_heads, block.block_size, block.cell_nbytes
        )

    def at(self, piece_id: int) -> Bytes:
        """The piece in place: [bytes] if it is a whole block, else [planes, heads, tokens, bytes]."""
        if self.is_whole:
            block: Bytes = self._blocks[piece_id]
            return block
        block_id, part = divmod(piece_id, self.shape.pieces_per_block)
        heads = slice(self.shape.first_head, self.shape.first_head + self.shape.num_heads)
        tokens = slice(part * self.shape.num_tokens, (part + 1) * self.shape.num_tokens)
        piece_PHTB: Bytes = self._cells_NPHTB[block_id, :, heads, tokens]
        return piece_PHTB

    def spans(self, piece_ids: Sequence[int]) -> list[Bytes]:
        """The pieces' bytes in order, [bytes] each, in as few spans as possible; in place if possible."""
        if self.is_whole:
            runs = _runs_of_neighbours(piece_ids)
            return [self._blocks[first : last + 1].reshape(-1) for first, last in runs]
        pieces = [self.at(piece_id) for piece_id in piece_ids]
        return [np.stack(pieces).reshape(-1)] if pieces else []

    def store(self, piece_id: int, span: Bytes) -> None:
        """Writes the piece's bytes, [bytes]."""
        piece = self.at(piece_id)
        piece[...] = span.reshape(piece.shape)

    def checksum(self, piece_id: int) -> int:
        """xxh3_64 of the piece's bytes."""
        return xxhash.xxh3_64_intdigest(np.ascontiguousarray(self.at(piece_id)).data)


def _runs_of_neighbours(piece_ids: Sequence[int]) -> list[list[int]]:
    """First and last of each run of consecutive ids."""
    runs: list[list[int]] = []
    for piece_id in piece_ids:
        if runs and piece_id == runs[-1][1] + 1:
            runs[-1][1] = piece_id
        else:
            runs.append([piece_id, piece_id])
    return runs
