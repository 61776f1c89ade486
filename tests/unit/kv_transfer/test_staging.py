"""The stager: it moves the right bytes through two buffers, never waits, and reads and writes nothing after its
end."""

import numpy as np
import pytest
import xxhash

from baton.kv import KVFingerprint
from kv_transfer.cuda.memory import CudaMemory
from kv_transfer.cuda.staging import NUM_BUFFERS, Staged, Stager
from kv_transfer.pool import DeviceBlocks, DeviceKVBytes, PieceView
from kv_transfer.protocol.geometry import RankLayout
from kv_transfer.transport.base import Bytes
from tests.factories.fake_cuda import FakeDriver, FakeHost

NUM_BLOCKS = 12
FINGERPRINT = KVFingerprint(2, "model", "uint8", "LKHTD", 2, 4, 8, 16, 1)
BLOCK_NBYTES = 2 * 2 * 4 * 16 * 8
SAME = RankLayout(16, 1)
UNLIKE = RankLayout(8, 2, 1)
"""Of a peer with two ranks and smaller blocks: a piece of ours has many runs."""


class Device:
    """A pool of random bytes on a pretended device, and a stager whose buffers hold two blocks."""

    def __init__(self, *, is_slow: bool = True) -> None:
        self.host = FakeHost()
        self.driver = FakeDriver(self.host)
        memory = CudaMemory(NUM_BLOCKS * BLOCK_NBYTES, 0, self.driver)
        self.blocks: Bytes = np.frombuffer(self.host.memories[memory.address], np.uint8)
        self.blocks[:] = np.random.default_rng(1).integers(0, 256, self.blocks.size)
        self.pool = DeviceKVBytes(DeviceBlocks(memory, BLOCK_NBYTES), FINGERPRINT)
        self.stager: Stager[str] = Stager(memory, 2 * BLOCK_NBYTES)
        self.driver.is_slow = is_slow

    def piece(self, view: PieceView, piece_id: int) -> Bytes:
        """As it is in the pool."""
        runs = view.runs_of([piece_id])
        places = zip(runs.local.tolist(), runs.lengths.tolist(), strict=True)
        return np.concatenate([self.blocks[start : start + length] for start, length in places])

    def take_out(self, name: str, view: PieceView, piece_ids: list[int]) -> None:
        self.stager.take_out(name, view, piece_ids, has_bytes=True, has_checksums=True)


@pytest.mark.parametrize("theirs", [SAME, UNLIKE])
@pytest.mark.parametrize("takes_rows", [True, False])
def test_pieces_come_out_and_go_in_with_the_right_bytes(theirs: RankLayout, takes_rows: bool) -> None:
    device = Device(is_slow=False)
    device.driver.takes_rows = takes_rows
    view = device.pool.pieces(theirs)
    ids = [7, 0, 3, 4, 11]
    expected = [device.piece(view, piece_id) for piece_id in ids]
    device.take_out("out", view, ids)
    [out] = drain(device)
    assert out.error is None
    assert np.array_equal(np.concatenate(out.spans), np.concatenate(expected))
    assert out.checksums == [xxhash.xxh3_64_intdigest(piece.tobytes()) for piece in expected]
    before = device.blocks.copy()
    places = [1, 2, 5, 9, 10]
    device.stager.put_in("in", view, places, expected, has_checksums=True)
    [put] = drain(device)
    assert (put.error, put.checksums, put.spans) == (None, out.checksums, [])
    for place, piece in zip(places, expected, strict=True):
        assert np.array_equal(device.piece(view, place), piece)
    changed = np.flatnonzero(before != device.blocks)
    runs = view.runs_of(places)
    allowed = [
        np.arange(start, start + length)
        for start, length in zip(runs.local.tolist(), runs.lengths.tolist(), strict=True)
    ]
    assert np.isin(changed, np.concatenate(allowed)).all(), "other pieces were written"


def drain(device: Device) -> list[Staged[str]]:
    done = []
    while device.stager.poll_interval_s is not None:
        device.driver.run()
        done += device.stager.poll()
    return done


def test_the_device_fills_the_next_buffer_while_one_is_looked_at_and_no_other() -> None:
    device = Device()
    view = device.pool.pieces(SAME)
    device.take_out("out", view, [0, 2, 4, 6, 8, 10, 1])
    assert len(device.driver.queued) == 2 * NUM_BUFFERS, "two blocks a buffer"
    assert device.stager.poll() == []
    device.driver.run_next()
    device.driver.run_next()
    assert device.stager.poll() == [], "there is more of it"
    assert len(device.driver.queued) == 2 * NUM_BUFFERS
    [out] = drain(device)
    expected = [device.piece(view, piece_id) for piece_id in (0, 2, 4, 6, 8, 10, 1)]
    assert np.array_equal(np.concatenate(out.spans), np.concatenate(expected))
    assert device.stager.poll_interval_s is None
    assert set(device.driver.events.values()) == {-1}, "every event was dropped"


def test_what_came_out_stays_as_it_was_when_its_buffer_is_filled_again() -> None:
    device = Device(is_slow=False)
    view = device.pool.pieces(SAME)
    device.take_out("first", view, [0, 1])
    [first] = drain(device)
    expected = np.concatenate([device.piece(view, 0), device.piece(view, 1)])
    device.take_out("others", view, [2, 3, 4, 5, 6, 7])
    drain(device)
    assert np.array_equal(np.concatenate(first.spans), expected)


def test_a_piece_is_not_in_before_its_copy_is_over() -> None:
    device = Device()
    view = device.pool.pieces(SAME)
    piece = np.full(BLOCK_NBYTES, 42, np.uint8)
    device.stager.put_in("in", view, [3], [piece], has_checksums=False)
    assert device.stager.poll() == []
    assert not (device.piece(view, 3) == 42).all()
    device.driver.run()
    assert [done.what for done in device.stager.poll()] == ["in"]
    assert (device.piece(view, 3) == 42).all()


def test_what_is_dropped_is_never_named_and_gives_its_buffers_back() -> None:
    device = Device()
    view = device.pool.pieces(SAME)
    device.take_out("unwanted", view, [0, 1, 2, 3, 4, 5])
    device.take_out("wanted", view, [6])
    device.stager.drop(lambda name: name == "unwanted")
    assert [done.what for done in drain(device)] == ["wanted"]
    device.take_out("next", view, [7, 8, 9, 10])
    assert [done.what for done in drain(device)] == ["next"]


def test_what_is_dropped_after_its_copy_is_over_is_not_named_either() -> None:
    device = Device()
    view = device.pool.pieces(SAME)
    device.take_out("unwanted", view, [0])
    device.driver.run()
    device.stager.drop(lambda name: name == "unwanted")
    assert device.stager.poll() == []
    assert device.stager.poll_interval_s is None


@pytest.mark.parametrize("is_read", [True, False])
def test_c46_no_copy_is_left_queued_of_what_is_refused(is_read: bool) -> None:
    device = Device()
    device.driver.room = 1
    view = device.pool.pieces(SAME)
    if is_read:
        device.take_out("refused", view, [0, 2])
    else:
        pieces = [np.zeros(BLOCK_NBYTES, np.uint8)] * 2
        device.stager.put_in("refused", view, [0, 2], pieces, has_checksums=True)
    assert not device.driver.queued
    [done] = device.stager.poll()
    assert done.error is not None
    assert "out of memory" in done.error
    device.driver.room = None
    device.take_out("next", view, [5])
    assert [(done.what, done.error) for done in drain(device)] == [("next", None)]


def test_a_device_that_is_lost_ends_everything_with_its_reason() -> None:
    device = Device()
    view = device.pool.pieces(SAME)
    device.take_out("out", view, [0, 1, 2, 3, 4, 5, 6])
    device.driver.failure = "an illegal address was encountered (700)"
    done = [*device.stager.poll(), *device.stager.poll(), *device.stager.poll()]
    assert [(staged.what, staged.error) for staged in done] == [("out", device.driver.failure)]
    assert device.stager.poll_interval_s is None
    device.stager.close()


def test_closing_ends_the_copies_and_gives_the_buffers_back() -> None:
    device = Device()
    device.take_out("out", device.pool.pieces(SAME), [0, 1, 2, 3, 4, 5])
    device.stager.close()
    assert not device.driver.queued
    assert not device.host.pinned
    assert not device.driver.streams
