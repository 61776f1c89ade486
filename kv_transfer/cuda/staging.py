"""Stager: moves pieces between device memory and the host through a few pinned buffers; knows no peer, no message.

Copies are queued on a stream of their own, and `poll` checks whether they are done. Only two calls wait for copies:
`close`, and a call that could not queue a copy. While the processor handles one buffer's content, the device fills or
empties the next.

    take out    device --> pinned buffer --> checksums, and a copy that the sender may keep
    put in      bytes that came --> pinned buffer, checksums --> device

Outgoing bytes are copied once more on the host, out of the pinned buffer. ZeroMQ reads a payload only when it
is sent. Without this copy, a peer that reads nothing would block the buffer for all other peers.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np
import xxhash

from kv_transfer.cuda.memory import CudaMemory, pinned_array, queue_copies
from kv_transfer.pool import DeviceKVBytes, PieceView, RankPool
from kv_transfer.protocol.outgoing import BYTES_PER_TURN
from kv_transfer.transport.base import Bytes, Runs, TransportError

logger = logging.getLogger(__name__)

NUM_BUFFERS = 2
POLL_INTERVAL_S = 0.0005
"""The time between two polls. For comparison: copying 4 MiB over PCIe 5 takes some 100 us, and computing the checksums
of 4 MiB takes as long again."""

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Staged(Generic[T]):
    """Pieces that are taken out or put in. `poll` returns them when all copying of them has ended."""

    what: T
    """The caller's name for these pieces."""
    has_bytes: bool
    has_checksums: bool
    num_batches: int = 0
    """Unfinished batches."""
    spans: list[Bytes] = field(default_factory=list)
    """If `take_out` was called with `has_bytes`: the bytes of whole pieces, in order."""
    checksums: list[int] = field(default_factory=list)
    """xxh3_64 of each piece, in the order of the request; empty if not requested."""
    error: str | None = None
    """Why the copying failed, if it did."""
    is_wanted: bool = True


@dataclass(frozen=True, slots=True)
class _Batch(Generic[T]):
    """Pieces of one job that fit into a buffer."""

    job: Staged[T]
    runs: Runs
    piece_nbytes: int
    num_pieces: int
    pieces: Sequence[Bytes] | None
    """The bytes to put in; None if the pieces are taken out."""

    @property
    def nbytes(self) -> int:
        return self.num_pieces * self.piece_nbytes


@dataclass(frozen=True, slots=True)
class _Copy(Generic[T]):
    """A running batch, and the event that completes when its copies have ended."""

    batch: _Batch[T]
    buffer: Bytes
    event: int


class Stager(Generic[T]):
    """Moves pieces of one pool; belongs to the transfer thread. Call `poll` every POLL_INTERVAL_S while it is busy."""

    def __init__(self, memory: CudaMemory, buffer_nbytes: int) -> None:
        """`buffer_nbytes`: at least the largest piece. CudaError if the host cannot lock so much memory."""
        self._memory = memory
        self._driver = memory.driver
        self._stream = self._driver.make_stream()
        self._buffer_nbytes = buffer_nbytes
        device, driver = self._driver.device, self._driver
        self._free = [pinned_array(buffer_nbytes, device, driver) for _ in range(NUM_BUFFERS)]
        """Pinned buffers that no running copy uses."""
        self._waiting: deque[_Batch[T]] = deque()
        self._under_way: deque[_Copy[T]] = deque()
        """Running copies, in the order in which they were queued on the stream."""
        self._done: list[Staged[T]] = []

    def take_out(
        self, what: T, view: PieceView, piece_ids: Sequence[int], *, has_bytes: bool, has_checksums: bool
    ) -> None:
        """Begins to copy pieces to the host; they must not change until `poll` reports them or `drop` is called."""
        self._begin(Staged(what, has_bytes, has_checksums), view, piece_ids, None)

    def put_in(
        self,
        what: T,
        view: PieceView,
        piece_ids: Sequence[int],
        pieces: Sequence[Bytes],
        *,
        has_checksums: bool,
    ) -> None:
        """Begins to write pieces to the pool. Each of `pieces` is an array [bytes], which must stay unchanged until
        `poll` reports it."""
        self._begin(Staged(what, False, has_checksums), view, piece_ids, pieces)

    def drop(self, is_meant: Callable[[T], bool]) -> None:
        """Cancels those jobs of `take_out` whose `what` satisfies `is_meant`. `poll` then does not report them. Jobs of
        `put_in` must not be cancelled."""
        for batch in (*self._waiting, *(copy.batch for copy in self._under_way)):
            batch.job.is_wanted &= not is_meant(batch.job.what)
        self._waiting = deque(batch for batch in self._waiting if batch.job.is_wanted)
        self._done = [staged for staged in self._done if not is_meant(staged.what)]

    def poll(self) -> list[Staged[T]]:
        """Jobs finished since the last call. Processes at most NUM_BUFFERS buffers, which takes a few milliseconds."""
        for _ in range(NUM_BUFFERS):
            if not self._under_way or not self._is_over(self._under_way[0]):
                break
            self._end(self._under_way.popleft())
        self._start()
        done, self._done = self._done, []
        return done

    @property
    def poll_interval_s(self) -> float | None:
        """Time between calls of `poll`; None while there is nothing to poll for."""
        return POLL_INTERVAL_S if self._under_way or self._done else None

    def close(self) -> None:
        """Waits for all running copies, and releases everything."""
        self._waiting.clear()
        self._wait()
        while self._under_way:
            self._release(self._under_way.popleft())
        self._free.clear()  # the last reference to each buffer
        with suppress(TransportError):  # a lost context has released everything
            self._driver.drop_stream(self._stream)

    def _begin(
        self, job: Staged[T], view: PieceView, piece_ids: Sequence[int], pieces: Sequence[Bytes] | None
    ) -> None:
        num_per_batch = self._buffer_nbytes // view.nbytes
        assert num_per_batch, (
            f"a piece of {view.nbytes} bytes does not fit into a buffer of {self._buffer_nbytes}"
        )
        for first in range(0, len(piece_ids), num_per_batch):
            ids = piece_ids[first : first + num_per_batch]
            put = None if pieces is None else pieces[first : first + num_per_batch]
            self._waiting.append(_Batch(job, view.runs_of(ids), view.nbytes, len(ids), put))
            job.num_batches += 1
        assert job.num_batches, "no pieces"
        self._start()

    def _start(self) -> None:
        """Queues the copies of waiting batches while buffers are free."""
        while self._waiting and self._free:
            batch, buffer = self._waiting.popleft(), self._free.pop()
            try:
                self._under_way.append(_Copy(batch, buffer, self._queue(batch, buffer)))
            except TransportError as error:
                self._wait()  # some copies may be queued
                self._free.append(buffer)
                self._note_end(batch, str(error))

    def _queue(self, batch: _Batch[T], buffer: Bytes) -> int:
        """Queues the copies of a batch. Returns the event that completes when they have ended."""
        device, host, runs = self._memory.address, buffer.ctypes.data, batch.runs
        if batch.pieces is None:
            out = Runs(runs.local, runs.remote, runs.lengths)
            queue_copies(self._driver, out, device, host, self._stream)
        else:
            np.concatenate(batch.pieces, out=buffer[: batch.nbytes])
            self._collect_from(batch, buffer)
            queue_copies(self._driver, runs, host, device, self._stream)
        return self._driver.record(self._stream)

    def _is_over(self, copy: _Copy[T]) -> bool:
        try:
            return self._driver.is_over(copy.event)
        except TransportError as error:  # the context is lost, with everything that was queued
            copy.batch.job.error = str(error)
            return True

    def _end(self, copy: _Copy[T]) -> None:
        if copy.batch.pieces is None and copy.batch.job.is_wanted and copy.batch.job.error is None:
            self._collect_from(copy.batch, copy.buffer)
        self._release(copy)
        self._note_end(copy.batch, None)

    def _collect_from(self, batch: _Batch[T], buffer: Bytes) -> None:
        """Extracts from the buffer the bytes and checksums that the job requested."""
        held = buffer[: batch.nbytes]
        if batch.job.has_checksums:
            pieces = held.reshape(batch.num_pieces, batch.piece_nbytes)
            batch.job.checksums += [xxhash.xxh3_64_intdigest(piece.data) for piece in pieces]
        if batch.job.has_bytes:
            batch.job.spans.append(held.copy())

    def _release(self, copy: _Copy[T]) -> None:
        self._free.append(copy.buffer)
        with suppress(TransportError):  # lost with its context
            self._driver.drop(copy.event)

    def _note_end(self, batch: _Batch[T], error: str | None) -> None:
        job = batch.job
        job.num_batches -= 1
        job.error = job.error or error
        if job.num_batches == 0 and job.is_wanted:
            self._done.append(job)

    def _wait(self) -> None:
        """Waits until no queued copy runs any more."""
        try:
            self._driver.wait(self._stream)
        except TransportError as error:
            logger.warning("the CUDA device does not respond: %s", error)


def make_stager(pool: RankPool) -> Stager[T] | None:
    """A stager for a pool on a device; None for a pool in host memory, whose pieces are used in place."""
    if not isinstance(pool, DeviceKVBytes):
        return None
    return Stager(pool.memory, max(pool.block_nbytes, BYTES_PER_TURN))
