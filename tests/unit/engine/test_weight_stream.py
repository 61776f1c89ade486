"""Parts of files arrive whole, in order, and not further ahead than asked for."""

import itertools
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from baton.errors import ModelError
from engine.loading.weight_stream import FilePart, WeightStream
from tests.factories.host_copies import HostCopies


class LateCopy:
    """A copy that happens only in `synchronize`. So it also copies what was written to the source before."""

    def __init__(self, to: torch.Tensor, source: torch.Tensor) -> None:
        self._to, self._source = to, source

    def synchronize(self) -> None:
        self._to.copy_(self._source)


class LateCopies(HostCopies):
    """Copies as on a GPU's own stream, as late as possible, and a count of the memory that was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.num_allocated_bytes = 0
        self._lock = threading.Lock()

    def allocate(self, num_bytes: int) -> torch.Tensor:
        with self._lock:
            self.num_allocated_bytes += num_bytes
        return super().allocate(num_bytes)

    def start(self, to: torch.Tensor, source: torch.Tensor) -> LateCopy:
        return LateCopy(to, source)


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    rng = np.random.default_rng(0)
    paths = [tmp_path / name for name in ("a", "b")]
    for path in paths:
        path.write_bytes(rng.bytes(10_000))
    return paths


def expected(part: FilePart) -> bytes:
    content = part.file.read_bytes()
    starts = [part.offset + run * part.stride_bytes for run in range(part.num_runs)]
    return b"".join(content[start : start + part.run_bytes] for start in starts)


def parts_of(files: Sequence[Path]) -> list[FilePart]:
    a, b = files
    return [
        FilePart(a, 17, 3000),
        FilePart(b, 0, 10_000),
        FilePart(a, 5, 0),
        FilePart(b, 100, 48, 20, 96),  # runs shorter than a buffer
        FilePart(a, 2, 700, 3, 2000),  # runs longer than one
        FilePart(a, 9999, 1),
        *(FilePart(b, i, 40) for i in range(30)),
    ]


@pytest.mark.parametrize("num_readers", [1, 3])
@pytest.mark.parametrize("buffer_bytes", [64, 512, 1 << 20])
def test_every_part_arrives_whole_and_in_order(
    files: list[Path], num_readers: int, buffer_bytes: int
) -> None:
    parts = parts_of(files)
    stream = WeightStream(parts, HostCopies(), num_readers=num_readers, buffer_bytes=buffer_bytes)
    for part in parts:
        assert stream.next_part().numpy().tobytes() == expected(part)
    stream.close()


@pytest.mark.parametrize("num_readers", [1, 3])
def test_a_buffer_is_not_written_while_it_is_being_copied(files: list[Path], num_readers: int) -> None:
    parts = parts_of(files)
    stream = WeightStream(parts, LateCopies(), num_readers=num_readers, buffer_bytes=64)
    arrived = [stream.next_part() for _ in parts]
    for thread in stream._threads:  # they end when their last copies are over
        thread.join(60.0)
        assert not thread.is_alive()
    assert [tensor.numpy().tobytes() for tensor in arrived] == [expected(part) for part in parts]
    stream.close()


@pytest.mark.parametrize("ahead_bytes", [300, 350])
def test_no_more_is_read_ahead_than_allowed(files: list[Path], ahead_bytes: int) -> None:
    parts = [FilePart(files[0], 100 * i, 100) for i in range(50)]
    copies = LateCopies()
    stream = WeightStream(parts, copies, num_readers=2, buffer_bytes=64, ahead_bytes=ahead_bytes)
    for num_taken in range(10):
        deadline = time.monotonic() + 60.0
        while copies.num_allocated_bytes < 100 * (num_taken + 3):
            assert time.monotonic() < deadline
            time.sleep(0.001)
        time.sleep(0.005)
        assert copies.num_allocated_bytes == 100 * (num_taken + 3)
        stream.next_part()
    stream.close()


def test_a_part_larger_than_all_that_may_be_ahead_is_read_when_its_turn_comes(files: list[Path]) -> None:
    parts = [FilePart(files[0], 0, 10), FilePart(files[1], 0, 10_000), FilePart(files[0], 0, 10)]
    stream = WeightStream(parts, HostCopies(), num_readers=2, buffer_bytes=64, ahead_bytes=50)
    assert [stream.next_part().numel() for _ in parts] == [10, 10_000, 10]
    stream.close()


def test_closing_early_ends_the_threads(files: list[Path]) -> None:
    parts = [FilePart(files[0], 0, 1000) for _ in range(100)]
    stream = WeightStream(parts, HostCopies(), num_readers=3, buffer_bytes=64, ahead_bytes=2000)
    stream.next_part()
    stream.close()
    assert not any(thread.is_alive() for thread in stream._threads)


def test_a_file_that_ends_early_is_named(files: list[Path]) -> None:
    stream = WeightStream([FilePart(files[0], 9_990, 20)], HostCopies(), num_readers=2, buffer_bytes=64)
    with pytest.raises(ModelError, match=r"a ends early, at byte 10000"):
        stream.next_part()
    stream.close()


def test_pieces_cover_a_part_exactly_once(files: list[Path]) -> None:
    for part, max_bytes in itertools.product(parts_of(files), (1, 7, 64, 1000, 100_000)):
        seen = bytearray(part.num_bytes)
        pieces = list(part.pieces(max_bytes))
        for piece, start in pieces:
            assert piece.num_bytes <= max_bytes
            seen[start : start + piece.num_bytes] = expected(piece)
        assert bytes(seen) == expected(part)
        assert sum(piece.num_bytes for piece, _ in pieces) == part.num_bytes
