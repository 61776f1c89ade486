"""The interface of a transport; the protocol above knows nothing else of it.

Messages always travel on a `Channel`. Bytes also travel on it, unless the consumer reads them directly from the
producer's pool. In this case, both ends have a `PoolReader` of the same name. Everything here belongs to the transfer
thread.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from baton.errors import BatonError
from kv_transfer.protocol.effects import Peer

Bytes = npt.NDArray[np.uint8]
Offsets = npt.NDArray[np.int64]

MAX_DESCRIPTION_BYTES = 64 * 1024


def host_id() -> str:
    """A name that is equal for processes that can map each other's memory: they share a kernel and a PID namespace."""
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot_id}/{os.stat('/proc/self/ns/pid').st_ino}"


class TransportError(BatonError):
    """This transport cannot read a peer's pool: not from here, not any more, or not the requested part."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A header that arrived. If its payload is not read before the next arrival, the payload is skipped."""

    peer: Peer
    is_from_producer: bool
    header: bytes


class Channel(Protocol):
    """Carries headers, and bytes after them. Nothing blocks: what cannot be queued is dropped and counted."""

    def send(self, peer: Peer, header: bytes, payload: Sequence[Bytes] = ()) -> bool:
        """Queues a header and the payload behind it; False if they were dropped.

        The payload may be read long after this has returned.
        """
        ...

    def read_payload(self) -> Iterator[Bytes]:
        """The payload of the current arrival, read-only, in spans that end only where spans of the sender ended."""
        ...


@dataclass(frozen=True, slots=True)
class Runs:
    """Bytes to copy from a peer's pool to ours, run by run; offsets count from the beginning of each pool."""

    remote: Offsets
    local: Offsets
    lengths: Offsets

    def coalesced(self) -> "Runs":
        """The same bytes in as few runs as possible: neighbours that are contiguous on both sides are merged."""
        if len(self.lengths) < 2:
            return self
        adjoins = (self.remote[1:] == self.remote[:-1] + self.lengths[:-1]) & (
            self.local[1:] == self.local[:-1] + self.lengths[:-1]
        )
        if not adjoins.any():
            return self
        starts = np.flatnonzero(np.concatenate(([True], ~adjoins)))
        return Runs(self.remote[starts], self.local[starts], np.add.reduceat(self.lengths, starts))

    def check_within(self, remote_nbytes: int, local_nbytes: int) -> None:
        """TransportError if a run leaves either pool: a peer's values are never trusted."""
        for what, offsets, nbytes in (
            ("the peer's", self.remote, remote_nbytes),
            ("our", self.local, local_nbytes),
        ):
            # the sum of offset and length may exceed an int64
            if len(offsets) and (
                offsets.min() < 0 or self.lengths.min() < 0 or (offsets > nbytes - self.lengths).any()
            ):
                raise TransportError(f"a run of bytes lies outside {what} pool of {nbytes} bytes")


@dataclass(frozen=True, slots=True)
class ReadDone:
    """A read that has ended and no longer writes our pool. `error` says why bytes are missing."""

    number: int
    error: str | None


class RemotePool(Protocol):
    """A peer's pool, ready to be read."""

    @property
    def owner_pid(self) -> int | None:
        """Id of the process of this host whose memory stays allocated while this pool is open, even after its end.

        None: no memory is kept. The id comes from that process, so it may be wrong.
        """
        ...

    def read(self, runs: Runs) -> int:
        """Begins to copy. Returns the read's number. When the read has ended, `PoolReader.poll` reports this number.

        TransportError if the copy cannot begin, or a run lies outside the pool; then nothing is being written.
        """
        ...

    def close(self) -> None:
        """Ends current reads. They have ended when this returns, and `PoolReader.poll` still reports them.

        TransportError if something cannot be released; the reads have ended all the same.
        """
        ...


class PoolReader(Protocol):
    """Reads other workers' pools, and lets other workers read ours."""

    @property
    def name(self) -> str: ...

    def describe(self) -> bytes | None:
        """A description with which peers can open our pool, at most MAX_DESCRIPTION_BYTES. None: peers cannot read our
        pool over this transport.
        """
        ...

    def open(self, description: bytes) -> RemotePool:
        """TransportError if that pool cannot be reached from here, or the description is invalid."""
        ...

    def poll(self) -> list[ReadDone]:
        """Reads that ended since the last call."""
        ...

    @property
    def poll_interval_s(self) -> float | None:
        """Time between calls of `poll` during reads; None if reads end at once."""
        ...

    def close(self) -> None:
        """Ends every read; other workers can no longer read our pool. TransportError if a release fails."""
        ...
