"""What a way of moving bytes has to offer; the protocol above knows nothing else of it.

Messages always travel on a `Channel`. Bytes travel on it too, or are read by the consumer straight out of the
producer's pool: then both ends have a `PoolReader` of the same name. Everything here belongs to the transfer thread.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from baton.errors import BatonError
from kv_transfer.protocol.effects import Peer

Bytes = npt.NDArray[np.uint8]
Offsets = npt.NDArray[np.int64]

MAX_DESCRIPTION_BYTES = 64 * 1024


class TransportError(BatonError):
    """A peer's pool cannot be read in this way: not from here, not any more, or not what is asked for."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A header that came in. A payload that nobody reads is skipped."""

    peer: Peer
    is_from_producer: bool
    header: bytes


class Channel(Protocol):
    """Carries headers, and bytes behind them. Nothing blocks: what cannot be queued is dropped and counted."""

    @property
    def address(self) -> str: ...

    @property
    def num_dropped(self) -> int: ...

    def send(self, peer: Peer, header: bytes, payload: Sequence[Bytes] = ()) -> bool:
        """Queues a header and the payload behind it; False if they were dropped.

        The payload may be read long after this has returned.
        """
        ...

    def read_payload(self) -> Iterator[Bytes]:
        """The payload of the arrival at hand, to be read, not written: spans that are cut where the sender's were."""
        ...


@dataclass(frozen=True, slots=True)
class Runs:
    """Bytes to copy from a peer's pool to ours, run by run; offsets count from the beginning of each pool."""

    remote: Offsets
    local: Offsets
    lengths: Offsets

    def coalesced(self) -> "Runs":
        """The same bytes in as few runs as possible: neighbours that adjoin on both sides become one."""
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
        """TransportError if a run leaves either pool: a peer's word is never trusted."""
        for what, offsets, nbytes in (
            ("the peer's", self.remote, remote_nbytes),
            ("our", self.local, local_nbytes),
        ):
            # an end may exceed an int64, a beginning does not
            if len(offsets) and (
                offsets.min() < 0 or self.lengths.min() < 0 or (offsets > nbytes - self.lengths).any()
            ):
                raise TransportError(f"a run of bytes lies outside {what} pool of {nbytes} bytes")


@dataclass(frozen=True, slots=True)
class ReadDone:
    """A read is over: nothing of it writes our pool any more. `error` says why the bytes are not there."""

    number: int
    error: str | None


class RemotePool(Protocol):
    """A peer's pool, ready to be read."""

    @property
    def owner_pid(self) -> int | None:
        """The process of this host whose memory is kept from the system while this is open, although the process ends.

        None: nothing is kept. It is that process' own word, and so may be wrong.
        """
        ...

    def read(self, runs: Runs) -> int:
        """Begins to copy; returns the read's number, which `PoolReader.poll` names when it is over.

        TransportError if that cannot even be begun, or a run lies outside the pool; then nothing is being written.
        """
        ...

    def close(self) -> None:
        """Reads under way are over when this returns, and are still reported.

        TransportError if something cannot be given back; the reads are over all the same.
        """
        ...


class PoolReader(Protocol):
    """Reads other workers' pools, and lets others read ours."""

    @property
    def name(self) -> str: ...

    def describe(self) -> bytes | None:
        """Our pool, for peers to open, in at most MAX_DESCRIPTION_BYTES; None: it cannot be read in this way."""
        ...

    def open(self, description: bytes) -> RemotePool:
        """TransportError if that pool cannot be reached from here, or is none."""
        ...

    def poll(self) -> list[ReadDone]:
        """Reads that are over since the last call."""
        ...

    @property
    def poll_interval_s(self) -> float | None:
        """How often `poll` wants to be called while reads are under way; None if they are over as soon as begun."""
        ...

    def close(self) -> None:
        """Ends every read, and lets nobody read our pool any more. TransportError if something cannot be given back."""
        ...
