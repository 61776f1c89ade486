"""The block writer: which pieces arrived, and which of them are damaged, in host memory and on a device."""

from collections.abc import Callable

import numpy as np
import pytest
import xxhash

from baton.kv import KVFingerprint
from kv_transfer.consumer.block_writer import BlockWriter, WrittenPieces
from kv_transfer.cuda.memory import CudaMemory
from kv_transfer.pool import DeviceBlocks, DeviceKVBytes, KVBytes, RankPool
from kv_transfer.protocol.geometry import RankLayout
from kv_transfer.protocol.incoming import WantedPieces
from kv_transfer.protocol.messages import Pieces
from kv_transfer.transport.base import Bytes
from tests.factories.fake_cuda import FakeDriver, FakeHost
from tests.factories.transfer import KEY

NUM_BLOCKS = 8
FINGERPRINT = KVFingerprint(2, "model", "uint8", "LKHTD", 2, 4, 8, 16, 1)
BLOCK_NBYTES = 2 * 2 * 4 * 16 * 8
INDICES = (4, 5, 6)
PAYLOAD: Bytes = np.random.default_rng(1).integers(0, 256, (len(INDICES), BLOCK_NBYTES), np.uint8)
CHECKSUMS = tuple(xxhash.xxh3_64_intdigest(piece.tobytes()) for piece in PAYLOAD)


def on_the_host() -> RankPool:
    return KVBytes(np.zeros((NUM_BLOCKS, BLOCK_NBYTES), np.uint8), FINGERPRINT)


def on_a_device() -> RankPool:
    memory = CudaMemory(NUM_BLOCKS * BLOCK_NBYTES, 0, FakeDriver(FakeHost()))
    return DeviceKVBytes(DeviceBlocks(memory, BLOCK_NBYTES), FINGERPRINT)


def received(
    make_pool: Callable[[], RankPool],
    checksums: tuple[int, ...],
    payload: Bytes,
    *,
    has_checksums: bool = True,
) -> WrittenPieces:
    """The result for the first and the last of three pieces; the one between them is not wanted."""
    pool = make_pool()
    message = Pieces(KEY, 0, INDICES, (0, 1, 2), checksums)
    wanted = WantedPieces(message, "zmq_tcp", has_checksums, [0, 2], [INDICES[0], INDICES[2]], [7, 3])
    writer = BlockWriter(pool)
    writer.receive(wanted, pool.pieces(RankLayout(16, 1)), [payload.reshape(-1)])
    written = [each for _ in range(4) for each in writer.poll()]
    writer.close()
    assert [each.wanted for each in written] == [wanted]
    return written[0]


@pytest.mark.parametrize("make_pool", [on_the_host, on_a_device])
def test_pieces_that_are_missing_or_differ_from_their_checksums_are_damaged(
    make_pool: Callable[[], RankPool],
) -> None:
    first, second, third = CHECKSUMS
    for checksums, num_pieces, num_arrived, damaged in (
        (CHECKSUMS, 3, 2, set[int]()),
        ((first, second + 1, third), 3, 2, set[int]()),  # of a piece that is not wanted
        ((first, second, third + 1), 3, 2, {6}),
        (CHECKSUMS, 2, 1, {6}),
        ((first + 1, second, third), 2, 1, {4, 6}),
        (CHECKSUMS, 0, 0, {4, 6}),
        ((), 3, 2, {4, 6}),
    ):
        written = received(make_pool, checksums, PAYLOAD[:num_pieces])
        assert (written.num_arrived, written.damaged) == (num_arrived, damaged)
    written = received(make_pool, (), PAYLOAD[:2], has_checksums=False)
    assert (written.num_arrived, written.damaged) == (1, {6}), "no checksums were required"


def test_what_a_device_has_read_without_checksums_is_not_copied_out() -> None:
    driver = FakeDriver(FakeHost())
    driver.is_slow = True
    pool = DeviceKVBytes(
        DeviceBlocks(CudaMemory(NUM_BLOCKS * BLOCK_NBYTES, 0, driver), BLOCK_NBYTES), FINGERPRINT
    )
    writer = BlockWriter(pool)
    wanted = WantedPieces(Pieces(KEY, 0, INDICES, (0, 1, 2), ()), "cuda_ipc", False, [0], [INDICES[0]], [7])
    writer.on_read(wanted, pool.pieces(RankLayout(16, 1)))
    assert not driver.queued
    (written,) = writer.poll()
    assert (written.wanted, written.num_arrived, written.damaged) == (wanted, 1, set())
    writer.close()


def test_nothing_is_written_once_a_writer_is_closed() -> None:
    driver = FakeDriver(FakeHost())
    driver.is_slow = True
    pool = DeviceKVBytes(
        DeviceBlocks(CudaMemory(NUM_BLOCKS * BLOCK_NBYTES, 0, driver), BLOCK_NBYTES), FINGERPRINT
    )
    writer = BlockWriter(pool)
    message = Pieces(KEY, 0, INDICES, (0, 1, 2), CHECKSUMS)
    wanted = WantedPieces(message, "zmq_tcp", True, [0], [INDICES[0]], [7])
    writer.receive(wanted, pool.pieces(RankLayout(16, 1)), [PAYLOAD.reshape(-1)])
    assert driver.queued
    writer.close()
    assert not driver.queued
    assert not driver.streams
