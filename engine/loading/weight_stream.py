"""WeightStream: reads parts of files ahead to a device, in the order of their use; knows no model.

    file --preadv, several threads--> pinned buffers, two per thread --copies on an own stream--> device

A thread fills one of its two buffers while the other buffer is copied. So disk, host memory and PCIe are busy
at the same time. Python makes only a few calls per buffer of 32 MiB.
"""

import itertools
import mmap
import os
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from baton.errors import ModelError
from engine.device import Mark

NUM_READERS = 4
"""Number of threads. Each copies 3 to 7 GB/s from the page cache (preadv, on one core), and PCIe 5 transfers
up to 50 GB/s to a GPU."""
BUFFER_BYTES = 32 * 2**20
"""A copy of this size takes 0.6 ms on PCIe 5, so the time to start it does not matter. 256 MiB are pinned in
total."""
AHEAD_BYTES = 2 * 2**30
"""How much device memory may be filled before the weights are used; a layer of a 70B model has 1.7 GiB."""

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class FilePart:
    """`num_runs` runs of `run_bytes`, each `stride_bytes` after the previous one: a slice of a row-major tensor."""

    file: Path
    offset: int
    """Position of the first run in the file."""
    run_bytes: int
    num_runs: int = 1
    stride_bytes: int = 0

    @property
    def num_bytes(self) -> int:
        return self.run_bytes * self.num_runs

    def pieces(self, max_bytes: int) -> Iterator[tuple["FilePart", int]]:
        """Divides this part into smaller parts; yields each with its position in this part's bytes."""
        if self.num_runs > 1 and self.run_bytes <= max_bytes:
            runs_each = max_bytes // self.run_bytes
            for first in range(0, self.num_runs, runs_each):
                num_runs = min(runs_each, self.num_runs - first)
                offset = self.offset + first * self.stride_bytes
                yield (
                    FilePart(self.file, offset, self.run_bytes, num_runs, self.stride_bytes),
                    first * self.run_bytes,
                )
            return
        for run, start in itertools.product(range(self.num_runs), range(0, self.run_bytes, max_bytes)):
            num_bytes = min(max_bytes, self.run_bytes - start)
            offset = self.offset + run * self.stride_bytes + start
            yield FilePart(self.file, offset, num_bytes), run * self.run_bytes + start


class CudaCopies:
    """Makes copies to a GPU on a stream of their own. The copies overlap with the model's work on earlier weights."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def make_buffer(self, num_bytes: int) -> torch.Tensor:
        """Host memory to copy from.

        It is pinned: from other memory, the driver would copy twice, and the call would block.
        """
        with torch.cuda.device(self._device):  # a new thread's device is 0, which may be another rank's
            return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Device memory to copy to."""
        with torch.cuda.stream(self._stream):
            return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def start(self, to: torch.Tensor, source: torch.Tensor) -> Mark:
        """Begins a copy. The source may be overwritten when the copy's end is reached."""
        with torch.cuda.stream(self._stream):
            to.copy_(source, non_blocking=True)
            end = torch.cuda.Event(blocking=True)  # waiting threads sleep, since readers need the cores
            end.record(self._stream)
        return end

    def order_after_copies(self, tensor: torch.Tensor) -> None:
        """From now on, work of the calling thread on the tensor waits for all copies that were started before."""
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self._stream)
        # Without this, the allocator knows the tensor only on the copying stream. After the tensor is freed,
        # the next copy could then overwrite its memory while kernels of the current stream still read it.
        tensor.record_stream(current)


class WeightStream:
    """Reads `parts` ahead; begins at once.

    Call `next_part` once per part, in order, then `close`. An early `close` ends reading.

    Waits have no deadline here: the process that starts the worker limits how long loading may take.
    """

    def __init__(
        self,
        parts: Sequence[FilePart],
        copies: CudaCopies,
        *,
        num_readers: int = NUM_READERS,
        buffer_bytes: int = BUFFER_BYTES,
        ahead_bytes: int = AHEAD_BYTES,
    ) -> None:
        self._parts = parts
        self._copies = copies
        self._buffer_bytes = buffer_bytes
        self._ahead_bytes = ahead_bytes
        self._ends = list(itertools.accumulate(part.num_bytes for part in parts))
        self._changed = threading.Condition()
        self._pieces = deque(
            (index, *piece) for index, part in enumerate(parts) for piece in part.pieces(buffer_bytes)
        )
        self._num_missing = [sum(1 for _ in part.pieces(buffer_bytes)) for part in parts]
        self._arrived: dict[int, torch.Tensor] = {}
        self._num_taken = 0
        self._is_closed = False
        self._failure: Exception | None = None
        self._files = {file: _open(file) for file in {part.file for part in parts}}
        self._threads = [
            threading.Thread(target=self._read, name=f"weights-{i}", daemon=True) for i in range(num_readers)
        ]
        for thread in self._threads:
            thread.start()

    def next_part(self) -> torch.Tensor:
        """The bytes (uint8) of the next part, on the device; ModelError if they cannot be read."""
        index = self._num_taken
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None or not self._num_missing[index])
            if self._failure is not None:
                raise self._failure
            tensor = self._arrived.pop(index, None)
            self._num_taken += 1
            self._changed.notify_all()
        if tensor is None:  # an empty part has no pieces
            tensor = self._copies.allocate(0)
        self._copies.order_after_copies(tensor)
        return tensor

    def close(self) -> None:
        """Ends the threads, and waits until each has finished its present read."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        for file in self._files.values():
            file.close()

    def _read(self) -> None:
        """One reader: fills a buffer, starts its copy, and continues with the other buffer."""
        try:
            buffers = [_Buffer(self._copies, self._buffer_bytes) for _ in range(2)]
            for buffer in itertools.cycle(buffers):
                buffer.wait()
                if (piece := self._next_piece()) is None:
                    break
                index, part, start, tensor = piece
                self._files[part.file].read_into(part, buffer.bytes[: part.num_bytes])
                buffer.copy_to(tensor[start : start + part.num_bytes])
                with self._changed:
                    self._num_missing[index] -= 1
                    self._changed.notify_all()
            for buffer in buffers:
                buffer.wait()
        except Exception as failure:
            with self._changed:
                self._failure = self._failure or failure
                self._changed.notify_all()

    def _next_piece(self) -> tuple[int, FilePart, int, torch.Tensor] | None:
        """The next piece to read, with the memory of its whole part; None when nothing is left to read."""
        with self._changed:
            self._changed.wait_for(self._may_go_on)
            if self._is_over:
                return None
            index, part, start = self._pieces.popleft()
            if index not in self._arrived:
                self._arrived[index] = self._copies.allocate(self._parts[index].num_bytes)
            return index, part, start, self._arrived[index]

    @property
    def _is_over(self) -> bool:
        return self._is_closed or self._failure is not None or not self._pieces

    def _may_go_on(self) -> bool:
        """Whether the next piece may be read now. The part that `next_part` returns next may always be read."""
        if self._is_over:
            return True
        next_index = self._pieces[0][0]
        taken_bytes = self._ends[self._num_taken - 1] if self._num_taken else 0
        return next_index == self._num_taken or self._ends[next_index] - taken_bytes <= self._ahead_bytes


class _Buffer:
    """Host memory whose last copy may still be running."""

    def __init__(self, copies: CudaCopies, num_bytes: int) -> None:
        self._copies = copies
        self._tensor = copies.make_buffer(num_bytes)
        self._copied: Mark | None = None
        self.bytes: Bytes = self._tensor.numpy()

    def wait(self) -> None:
        """Waits until the buffer may be overwritten."""
        if self._copied is not None:
            self._copied.synchronize()
            self._copied = None

    def copy_to(self, target: torch.Tensor) -> None:
        self._copied = self._copies.start(target, self._tensor[: len(target)])


def _open(path: Path) -> "_OpenFile":
    try:
        return _OpenFile(path)
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error}") from error


class _OpenFile:
    """A file that any thread may read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("rb", buffering=0)
        self._map = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)

    def read_into(self, part: FilePart, target: Bytes) -> None:
        """Reads the part's bytes into `target`, without the interpreter's lock.

        A single run is read by preadv, which needs no page table entries. Many short runs are copied from the
        map, since a system call for each run would take longer than the copy."""
        if part.num_runs > 1:
            shape, strides = (part.num_runs, part.run_bytes), (part.stride_bytes, 1)
            runs = np.ndarray(shape, np.uint8, self._map, part.offset, strides)
            np.copyto(target.reshape(shape), runs)
            return
        num_read = 0
        try:
            while num_read < len(target):
                n = os.preadv(self._file.fileno(), [target[num_read:].data], part.offset + num_read)
                if n == 0:
                    raise ModelError(f"{self._path} ends early, at byte {part.offset + num_read}")
                num_read += n
        except OSError as error:
            raise ModelError(f"cannot read {self._path}: {error}") from error

    def close(self) -> None:
        self._map.close()
        self._file.close()
