"""BlockWriter: writes arriving pieces, and compares their checksums with those in the message.

In host memory, pieces are written at once; on a device, asynchronously. BlockWriter knows no peer.
"""

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from kv_transfer.cuda.staging import Staged, Stager, make_stager
from kv_transfer.pool import HostPieces, PieceView, RankPool
from kv_transfer.protocol.incoming import WantedPieces
from kv_transfer.transport.base import Bytes

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WrittenPieces:
    """The result for pieces whose writes have ended."""

    wanted: WantedPieces
    num_arrived: int
    damaged: set[int]
    """Indices of wanted pieces that did not arrive, or whose checksum is wrong."""


_Staging = tuple[WantedPieces, tuple[int, ...]]
"""The wanted pieces, and the indices of the missing ones."""


class BlockWriter:
    """Writes pieces to one rank's pool; belongs to the transfer thread."""

    def __init__(self, pool: RankPool) -> None:
        self._stager: Stager[_Staging] | None = make_stager(pool)
        self._written: list[WrittenPieces] = []

    def receive(self, wanted: WantedPieces, view: PieceView, payload: Iterable[Bytes]) -> None:
        """Writes the wanted pieces of a payload. `poll` reports when they are written.

        The payload has all pieces of the message, in spans of whole pieces.
        """
        places = dict(zip(wanted.positions, wanted.piece_ids, strict=True))
        arrived = _pieces(payload, view.nbytes, places)
        if isinstance(view, HostPieces):
            for piece_id, piece in arrived:
                view.store(piece_id, piece)
            self._check_checksums(
                wanted, view, tuple(wanted.message.indices[position] for position in places)
            )
            return
        pieces = dict(arrived)
        missing = tuple(wanted.message.indices[position] for position in places)
        if not pieces:
            self._written.append(_compared(wanted, missing, ()))
            return
        assert self._stager is not None, "pieces on a device need a pool on a device"
        self._stager.put_in(
            (wanted, missing), view, [*pieces], [*pieces.values()], has_checksums=wanted.has_checksums
        )

    def on_read(self, wanted: WantedPieces, view: PieceView) -> None:
        """Call it when a PoolReader has written all pieces. `poll` reports them when their checksums are compared."""
        if isinstance(view, HostPieces):
            self._check_checksums(wanted, view, ())
        elif not wanted.has_checksums:
            self._written.append(_compared(wanted, (), ()))
        else:
            assert self._stager is not None, "pieces on a device need a pool on a device"
            self._stager.take_out((wanted, ()), view, wanted.piece_ids, has_bytes=False, has_checksums=True)

    def poll(self) -> list[WrittenPieces]:
        """Pieces written since the last call."""
        if self._stager is not None:
            self._written += [_written(staged) for staged in self._stager.poll()]
        written, self._written = self._written, []
        return written

    @property
    def poll_interval_s(self) -> float | None:
        """Time between calls of `poll`; None while no call is needed."""
        return self._stager.poll_interval_s if self._stager is not None else None

    def close(self) -> None:
        """Stops writing. Nothing is written any more when this returns."""
        if self._stager is not None:
            self._stager.close()

    def _check_checksums(self, wanted: WantedPieces, view: HostPieces, missing: tuple[int, ...]) -> None:
        checksums: list[int] = []
        if wanted.has_checksums:
            for index, piece_id in zip(wanted.indices, wanted.piece_ids, strict=True):
                if index not in missing:
                    checksums.append(view.checksum(piece_id))
        self._written.append(_compared(wanted, missing, checksums))


def _pieces(
    payload: Iterable[Bytes], piece_nbytes: int, places: dict[int, int]
) -> Iterator[tuple[int, Bytes]]:
    """Yields each wanted piece's target and bytes. Removes the piece from `places`, which has the targets of the wanted
    pieces by their position in the payload."""
    position = 0
    for span in payload:
        if len(span) % piece_nbytes:
            return
        for piece in span.reshape(-1, piece_nbytes):
            if position in places:
                yield places.pop(position), piece
            position += 1


def _written(staged: Staged[_Staging]) -> WrittenPieces:
    wanted, missing = staged.what
    if staged.error is not None:  # the pieces will be requested again, like lost pieces
        logger.warning("cannot write KV to the device, or read it back for its checksum: %s", staged.error)
        return _compared(wanted, wanted.indices, ())
    return _compared(wanted, missing, staged.checksums)


def _compared(wanted: WantedPieces, missing: Sequence[int], checksums: Sequence[int]) -> WrittenPieces:
    """The result for these pieces. `checksums`: the checksums of the pieces that arrived, in order. They are not used
    unless `wanted.has_checksums`."""
    damaged, theirs = set(missing), wanted.message.checksums
    if wanted.has_checksums:
        arrived = [
            (position, index)
            for position, index in zip(wanted.positions, wanted.indices, strict=True)
            if index not in damaged
        ]
        for (position, index), checksum in zip(arrived, checksums, strict=True):
            if not theirs or checksum != theirs[position]:
                damaged.add(index)
    return WrittenPieces(wanted, len(wanted.indices) - len(missing), damaged)
