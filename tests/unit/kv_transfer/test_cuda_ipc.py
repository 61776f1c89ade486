"""CUDA IPC without a device: what is queued, when a read is over, and how a peer's values are checked."""

import msgpack
import pytest

from kv_transfer.cuda import copy_kernel
from kv_transfer.cuda.driver import CudaError
from kv_transfer.cuda.memory import CudaMemory
from kv_transfer.transport.base import ReadDone, TransportError
from kv_transfer.transport.cuda_ipc import (
    EARLY_POLL_INTERVAL_S,
    FORMAT,
    NUM_EARLY_POLLS,
    POLL_INTERVAL_S,
    CudaIpcReader,
)
from tests.factories.fake_cuda import FakeDriver, FakeHost
from tests.factories.pool_readers import make_runs

NBYTES = 1024


class Process:
    """A worker's driver, memory and reader."""

    def __init__(self, host: FakeHost, fill: int = 0) -> None:
        self.driver = FakeDriver(host)
        self.memory = CudaMemory(NBYTES, 0, self.driver)
        self.bytes = host.memories[self.memory.address]
        self.bytes[:] = bytes([fill]) * NBYTES
        self.reader = CudaIpcReader(self.memory)


@pytest.fixture
def host() -> FakeHost:
    return FakeHost()


def description_of(process: Process) -> bytes:
    description = process.reader.describe()
    assert description is not None
    return description


def test_a_read_is_over_when_the_device_says_so(host: FakeHost) -> None:
    producer, consumer = Process(host, fill=7), Process(host)
    consumer.driver.is_slow = True
    pool = consumer.reader.open(description_of(producer))
    first = pool.read(make_runs((0, 512, 64), (64, 576, 64), (256, 0, 16)))
    (copies,) = consumer.driver.queued
    assert [copy.row_nbytes for copy in copies] == [128, 16], "neighbours are one run"
    assert consumer.reader.poll() == []
    consumer.driver.run()
    second = pool.read(make_runs((0, 1000, 24)))
    assert consumer.reader.poll() == [ReadDone(first, None)]
    consumer.driver.run()
    assert consumer.reader.poll() == [ReadDone(second, None)]
    assert consumer.bytes[512:640] == bytes([7]) * 128
    assert consumer.bytes[:16] == bytes([7]) * 16
    assert not any(consumer.bytes[16:512])


def test_a_read_is_polled_often_at_first(host: FakeHost) -> None:
    producer, consumer = Process(host, fill=7), Process(host)
    consumer.driver.is_slow = True
    pool = consumer.reader.open(description_of(producer))
    for _ in range(2):
        pool.read(make_runs((0, 0, 64)))
        for _ in range(NUM_EARLY_POLLS):
            assert consumer.reader.poll_interval_s == EARLY_POLL_INTERVAL_S
            consumer.reader.poll()
        assert consumer.reader.poll_interval_s == POLL_INTERVAL_S
    consumer.driver.run()
    assert len(consumer.reader.poll()) == 2


def test_a_closed_reader_leaves_nothing_on_the_device(host: FakeHost) -> None:
    worker = Process(host)
    worker.reader.close()
    assert not worker.driver.streams
    assert not worker.driver.kernels


def test_closing_a_pool_waits_for_its_reads_and_unmaps_it(host: FakeHost) -> None:
    producer, consumer = Process(host, fill=7), Process(host)
    consumer.driver.is_slow = True
    pool = consumer.reader.open(description_of(producer))
    number = pool.read(make_runs((0, 0, NBYTES)))
    pool.close()
    assert consumer.reader.poll() == [ReadDone(number, None)]
    assert consumer.driver.opened == []
    with pytest.raises(TransportError, match="closed"):
        pool.read(make_runs((0, 0, 1)))
    consumer.reader.close()


def test_a_device_that_fails_ends_every_read_with_its_reason(host: FakeHost) -> None:
    producer, consumer = Process(host), Process(host)
    consumer.driver.is_slow = True
    pool = consumer.reader.open(description_of(producer))
    numbers = [pool.read(make_runs((0, 0, 8))) for _ in range(2)]
    consumer.driver.failure = "an illegal address was encountered (700)"
    assert consumer.reader.poll() == [ReadDone(number, consumer.driver.failure) for number in numbers]


def test_a_worker_can_read_its_own_pool(host: FakeHost) -> None:
    worker = Process(host, fill=3)
    pool = worker.reader.open(description_of(worker))
    worker.bytes[:8] = b"original"
    assert pool.read(make_runs((0, 100, 8))) == 1
    assert worker.bytes[100:108] == b"original"


@pytest.mark.parametrize(
    "description",
    [
        b"",
        b"\xc1",
        b"nonsense",
        msgpack.packb([1, 2]),
        msgpack.packb([9, 1, b"\0" * 64, 8]),
        msgpack.packb([FORMAT, 1, b"\0" * 63, 8]),
        msgpack.packb([FORMAT, 1, b"\0" * 64, -1]),
        msgpack.packb(None),
    ],
)
def test_what_is_no_description_is_refused(host: FakeHost, description: bytes) -> None:
    with pytest.raises(TransportError, match="is not one of device memory"):
        Process(host).reader.open(description)


def test_memory_that_is_gone_or_smaller_than_said_is_refused(host: FakeHost) -> None:
    producer, consumer = Process(host), Process(host)
    _, pid, handle, _ = msgpack.unpackb(description_of(producer))
    with pytest.raises(TransportError, match="2048 bytes, but the device memory has 1024"):
        consumer.reader.open(msgpack.packb([1, pid, handle, 2 * NBYTES]))
    assert consumer.driver.opened == []
    description = description_of(producer)
    producer.memory.free()
    with pytest.raises(TransportError, match="invalid resource handle"):
        consumer.reader.open(description)


def test_nothing_outside_either_pool_is_touched(host: FakeHost) -> None:
    producer, consumer = Process(host), Process(host)
    pool = consumer.reader.open(description_of(producer))
    for run in ((NBYTES, 0, 1), (0, NBYTES - 1, 2), (-1, 0, 1), (2**62, 0, 2**62)):
        with pytest.raises(TransportError, match="outside"):
            pool.read(make_runs(run))
    assert consumer.driver.num_queued == 0


@pytest.mark.parametrize("room", [0, 1, 2])
def test_c46_a_read_of_which_only_a_part_can_be_queued_is_over_when_it_is_refused(
    host: FakeHost, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copy_kernel, "MAX_RUNS", 1)  # a launch for each run
    producer, consumer = Process(host, fill=7), Process(host)
    consumer.driver.is_slow = True
    consumer.driver.room = room
    pool = consumer.reader.open(description_of(producer))
    with pytest.raises(TransportError, match="out of memory"):
        pool.read(make_runs((0, 0, 16), (32, 48, 16), (96, 128, 16)))
    assert consumer.reader.poll() == []
    consumer.bytes[:] = b"\x2a" * NBYTES  # another request's
    consumer.driver.run()
    assert consumer.bytes == b"\x2a" * NBYTES


def test_c46_a_read_whose_end_cannot_be_marked_is_over_when_it_is_refused(
    host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_stream: int) -> int:
        raise CudaError("cuEventCreate: out of memory (2)")

    producer, consumer = Process(host, fill=7), Process(host)
    consumer.driver.is_slow = True
    monkeypatch.setattr(consumer.driver, "record", refuse)
    pool = consumer.reader.open(description_of(producer))
    with pytest.raises(TransportError, match="cuEventCreate"):
        pool.read(make_runs((0, 0, 16)))
    assert not consumer.driver.queued


def test_a_device_that_is_lost_refuses_reads_and_lets_its_reader_be_closed(host: FakeHost) -> None:
    producer, consumer = Process(host), Process(host)
    consumer.driver.is_slow = True
    pool = consumer.reader.open(description_of(producer))
    number = pool.read(make_runs((0, 0, 8)))
    consumer.driver.failure = "an illegal address was encountered (700)"
    with pytest.raises(TransportError, match="700"):
        pool.read(make_runs((0, 0, 8)))
    pool.close()
    assert consumer.reader.poll() == [ReadDone(number, consumer.driver.failure)]
    with pytest.raises(TransportError, match="700"):
        consumer.reader.close()


def test_a_pool_that_cannot_be_measured_is_not_left_open(
    host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_address: int) -> int:
        raise CudaError("cuMemGetAddressRange_v2: invalid argument (1)")

    producer, consumer = Process(host), Process(host)
    monkeypatch.setattr(consumer.driver, "size_of", refuse)
    with pytest.raises(TransportError, match="invalid argument"):
        consumer.reader.open(description_of(producer))
    assert consumer.driver.opened == []
