"""Two processes and one device: the bytes that move between them, and the effects of the end of one process.

Every test runs on a pretended device as well, whose processes are threads, unless it is about PyTorch.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection

import numpy as np
import pytest
import torch

from baton.clock import SystemClock
from baton.config import KVTransferConfig
from baton.kv import KVFingerprint, KVTransferParams, TransferRole, WorkerRef
from baton.request import FirstToken
from baton.step import KVConnectorOutput
from engine.kv_cache import KVBlockShape, KVPool
from kv_transfer import KVConnectorMetadata
from kv_transfer.commands import BeginLoad, BeginSend, FinishSend, LoadBlocks, SendBlocks
from kv_transfer.connector.worker import KVConnectorWorker
from kv_transfer.cuda.copy_kernel import CHUNK_NBYTES, MAX_RUNS
from kv_transfer.cuda.memory import CudaMemory
from kv_transfer.cuda.staging import Staged, Stager
from kv_transfer.pool import DeviceBlocks, DeviceKVBytes
from kv_transfer.protocol.geometry import RankLayout
from kv_transfer.transport.base import Bytes, Runs, TransportError
from kv_transfer.transport.cuda_ipc import CudaIpcReader
from tests.factories.devices import PATIENCE_S, Device, PretendedDevice, Process, RealDevice
from tests.factories.pool_readers import finish, make_runs, pattern

NUM_BLOCKS = 24
FINGERPRINT = KVFingerprint(2, "model", "float16", "LKHTD", 4, 8, 16, 16, 1)
BLOCK_NBYTES = 4 * 2 * 8 * 16 * 16 * 2
NBYTES = NUM_BLOCKS * BLOCK_NBYTES
NUM_TOKENS = 10 * 16 + 5
TOKEN = FirstToken(7, None)


@pytest.fixture(params=["pretended", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Device:
    return RealDevice() if request.param == "cuda" else PretendedDevice()


def own(device: Device, pipe: Connection) -> None:
    """Owns a pool until it receives something."""
    memory = device.allocate(NBYTES)
    device.write(memory, pattern(NBYTES, seed=1))
    pipe.send(CudaIpcReader(memory).describe())
    pipe.recv()


@pytest.fixture
def owner(device: Device) -> Iterator[tuple[Process, bytes]]:
    process = device.start(own)
    yield process, process.answer()
    with suppress(BrokenPipeError):  # the test has killed it
        process.pipe.send(None)
    process.kill()


def read(reader: CudaIpcReader, description: bytes, runs: Runs) -> str | None:
    pool = reader.open(description)
    number = pool.read(runs)
    error = finish(reader, [number])[number]
    pool.close()
    return error


@pytest.mark.parametrize(
    "runs",
    [
        make_runs(*((a * 4096, b * 4096, 4096) for a, b in [(3, 7), (4, 8), (23, 0), (9, 20)])),
        make_runs(*((row * 512, 64 + row * 1536, 256) for row in range(40))),
        make_runs(*((row * 3, 100 + row * 5, 2) for row in range(2 * MAX_RUNS + 1))),
        make_runs((1, 0, 5 * CHUNK_NBYTES), (NBYTES // 2, NBYTES // 2 + 16, 33 * CHUNK_NBYTES + 16)),
        make_runs((7, 9, 0), (16, 32, 16 * 31), (4096, 8192, 4096 + 8)),
    ],
    ids=["blocks", "rows", "several launches", "many chunks", "odd lengths"],
)
def test_the_right_bytes_arrive_and_no_others_change(
    device: Device, owner: tuple[Process, bytes], runs: Runs
) -> None:
    memory = device.allocate(NBYTES)
    reader = CudaIpcReader(memory)
    assert read(reader, owner[1], runs) is None
    expected, source = np.zeros(NBYTES, np.uint8), pattern(NBYTES, seed=1)
    for there, here, length in zip(runs.remote, runs.local, runs.lengths, strict=True):
        expected[here : here + length] = source[there : there + length]
    assert np.array_equal(device.read(memory), expected)
    reader.close()
    memory.free()


def test_an_owner_that_was_killed_cannot_be_opened_and_harms_nothing(
    device: Device, owner: tuple[Process, bytes]
) -> None:
    process, description = owner
    process.kill()
    memory = device.allocate(NBYTES)
    reader = CudaIpcReader(memory)
    with pytest.raises(TransportError):
        reader.open(description)
    device.write(memory, pattern(NBYTES, seed=2))
    assert np.array_equal(device.read(memory), pattern(NBYTES, seed=2))
    reader.close()
    memory.free()


def read_on(device: Device, pipe: Connection) -> None:
    """Reads half of a pool repeatedly, once more after its owner has ended, and reports the outcome."""
    memory = device.allocate(NBYTES)
    reader = CudaIpcReader(memory)
    pool, half = reader.open(pipe.recv()), make_runs((0, 0, NBYTES // 2))
    numbers = [pool.read(half) for _ in range(20)]
    pipe.send("reading")
    pipe.recv()
    try:
        errors = list(finish(reader, [*numbers, pool.read(half)]).values())
        pool.close()
        held = device.read(memory)
    except Exception as error:  # whatever PyTorch raises where the context is lost
        errors, held = [str(error)], np.zeros(0, np.uint8)
    pipe.send((errors, held))


def test_reads_end_though_the_owner_is_killed_and_write_nothing_but_its_bytes(
    device: Device, owner: tuple[Process, bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    """When the owner ends, opened memory may stay, or reads of it may fail. CUDA does not define this, so the test
    reports what happened. The reader is a process of its own: if the reader loses its context, the other tests keep
    theirs.
    """
    process, description = owner
    consumer = device.start(read_on)
    consumer.pipe.send(description)
    assert consumer.answer() == "reading"
    process.kill()
    consumer.pipe.send("killed")
    errors, held = consumer.answer()
    consumer.end()
    if set(errors) == {None}:
        half = NBYTES // 2
        assert np.array_equal(held[:half], pattern(NBYTES, seed=1)[:half])
        assert not held[half:].any()
    with capsys.disabled():
        print(f" reads of a killed owner: {sorted(set(map(str, errors)))}", end="")


def staged(stager: Stager[str]) -> Staged[str]:
    """The next job that has ended."""
    clock = SystemClock()
    deadline = clock.now() + 30.0
    while not (done := stager.poll()):
        assert clock.now() < deadline, "a copy does not end"
    return done[0]


@pytest.mark.parametrize("theirs", [RankLayout(16, 1), RankLayout(8, 2, 1)], ids=["alike", "unlike"])
def test_staging_moves_the_right_bytes_both_ways(device: Device, theirs: RankLayout) -> None:
    memory = device.allocate(NBYTES)
    before = pattern(NBYTES, seed=3)
    device.write(memory, before)
    pool = DeviceKVBytes(DeviceBlocks(memory, BLOCK_NBYTES), FINGERPRINT)
    view = pool.pieces(theirs)
    stager: Stager[str] = Stager(memory, 2 * BLOCK_NBYTES)
    sources, targets = [5, 0, 7, 2, 8], [11, 12, 13, 20, 17]
    stager.take_out("out", view, sources, has_bytes=True, has_checksums=True)
    out = staged(stager)
    assert out.error is None
    pieces = np.concatenate(out.spans).reshape(len(sources), view.nbytes)
    stager.put_in("in", view, targets, list(pieces), has_checksums=True)
    put = staged(stager)
    assert (put.error, put.checksums) == (None, out.checksums)
    expected = before.copy()
    for source, target in zip(sources, targets, strict=True):
        there, here = view.runs_of([source]), view.runs_of([target])
        for a, b, length in zip(there.local, here.local, there.lengths, strict=True):
            expected[b : b + length] = before[a : a + length]
    assert np.array_equal(device.read(memory), expected)
    stager.close()
    memory.free()


class Connector:
    """A real connector over a device's memory, and its outputs."""

    def __init__(self, memory: CudaMemory, name: str, config: KVTransferConfig, block_size: int) -> None:
        self._has_output = threading.Event()
        fingerprint = replace(FINGERPRINT, block_size=block_size)
        self._connector = KVConnectorWorker(
            config,
            "127.0.0.1",
            None,
            f"{name}-incarnation",
            SystemClock(),
            DeviceBlocks(memory, BLOCK_NBYTES * block_size // 16),
            fingerprint,
            self._has_output.set,
        )
        self._connector.start()
        self.ref = WorkerRef(name, f"{name}-incarnation", (self._connector.kv_address,), block_size)

    def obey(self, metadata: KVConnectorMetadata) -> None:
        self._connector.send_commands(metadata)
        self._connector.start_load_kv(metadata)
        self._connector.save_kv_blocks(metadata, set())

    def until(self, has_come: Callable[[KVConnectorOutput], object]) -> KVConnectorOutput:
        news = KVConnectorOutput()
        while not has_come(news):
            assert self._has_output.wait(30.0), f"only {news}"
            self._has_output.clear()
            news += self._connector.get_finished()
        return news

    def stop(self) -> None:
        self._connector.shutdown()


def give(device: Device, pipe: Connection) -> None:
    """A prefill worker that hands over one prompt, in blocks 3, 4, 5 ..., and ends when it receives something."""
    config: KVTransferConfig = pipe.recv()
    memory = device.allocate(NBYTES)
    connector = Connector(memory, "p0", config, block_size=16)
    pipe.send(connector.ref)
    to_decode = KVTransferParams(TransferRole.PRODUCER, "t", 0, pipe.recv())
    connector.obey(KVConnectorMetadata((BeginSend("r", to_decode, NUM_TOKENS),), (), ()))
    device.write(memory, pattern(NBYTES, seed=4))
    blocks = tuple(range(3, 14))
    connector.obey(KVConnectorMetadata((), (), (SendBlocks("r", 0, blocks[:6]),)))
    connector.obey(KVConnectorMetadata((), (), (SendBlocks("r", 6, blocks[6:]),)))
    connector.obey(KVConnectorMetadata((FinishSend("r", len(blocks), (), TOKEN),), (), ()))
    connector.until(lambda news: news.finished_sending)
    pipe.send("given")
    pipe.recv()
    connector.stop()
    memory.free()


def cells(memory: Bytes, blocks: range, block_size: int) -> Bytes:
    """The KV of the prompt's tokens: [planes and heads, tokens, bytes]."""
    parts = memory.reshape(-1, 4 * 2 * 8, block_size, 32)[blocks.start : blocks.stop]
    return np.concatenate(list(parts), axis=1)[:, :NUM_TOKENS]


@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize("transport", ["cuda_ipc", "zmq_tcp"])
@pytest.mark.parametrize("checksum", ["on", "off"])
def test_a_whole_prompt_is_handed_over(
    device: Device, transport: str, checksum: str, block_size: int
) -> None:
    config = KVTransferConfig().with_values("test", transport=transport, checksum=checksum)
    prefill = device.start(give)
    prefill.pipe.send(config)
    memory = device.allocate(NBYTES)
    connector = Connector(memory, "d0", config, block_size)
    peer = prefill.answer()
    blocks = range(1, 1 + -(-NUM_TOKENS // block_size))
    to_prefill = KVTransferParams(TransferRole.CONSUMER, "t", 0, peer)
    begin, load = BeginLoad("r", to_prefill, NUM_TOKENS), LoadBlocks("r", 0, tuple(blocks))
    connector.obey(KVConnectorMetadata((begin,), (load,), ()))
    prefill.pipe.send(connector.ref)
    news = connector.until(lambda news: news.finished_recving or news.failed_recving)
    assert not news.failed_recving
    [received] = news.finished_recving
    assert (received.first_token, received.transport) == (TOKEN, transport)
    expected = cells(pattern(NBYTES, seed=4), range(3, 14), 16)
    assert np.array_equal(cells(device.read(memory), blocks, block_size), expected)
    assert prefill.answer() == "given"
    prefill.pipe.send(None)
    prefill.end()
    connector.stop()
    memory.free()


@pytest.mark.gpu
def test_a_pool_lives_in_memory_that_others_may_read() -> None:
    shape = KVBlockShape(4, 8, 16, 16, torch.float16)
    memory = CudaMemory(NBYTES, 0)
    pool = KVPool(NUM_BLOCKS, shape, torch.device("cuda", 0), memory)
    assert pool.block_bytes() == DeviceBlocks(memory, BLOCK_NBYTES)
    assert pool.blocks_NLKHTD.data_ptr() == memory.address
    assert not pool.blocks_NLKHTD.any()
    pool.blocks_NLKHTD[3] = 1.0
    expected = torch.zeros(NUM_BLOCKS, *shape.dimensions, dtype=torch.float16)
    expected[3] = 1.0
    assert np.array_equal(RealDevice().read(memory), expected.view(torch.uint8).flatten().numpy())


@pytest.mark.gpu
def test_a_graph_can_be_captured_while_another_thread_moves_kv() -> None:
    """The driver ends a capture when another thread makes certain calls, unless that thread says that it may."""
    memory = CudaMemory(NBYTES, 0)
    reader = CudaIpcReader(memory)
    pool = reader.open(reader.describe() or b"")
    stager: Stager[str] = Stager(memory, 2 * BLOCK_NBYTES)
    view = DeviceKVBytes(DeviceBlocks(memory, BLOCK_NBYTES), FINGERPRINT).pieces(RankLayout(16, 1))
    errors: list[str | None] = []

    def move() -> None:
        try:
            errors.extend(finish(reader, [pool.read(make_runs((0, NBYTES // 2, 4096)))]).values())
            stager.take_out("out", view, [1, 2, 3], has_bytes=True, has_checksums=True)
            errors.append(staged(stager).error)
        except TransportError as error:
            errors.append(str(error))

    ones, graph = torch.ones(8, device="cuda:0"), torch.cuda.CUDAGraph()
    assert (ones + 1).sum().item() == 16.0, (
        "kernels are loaded when they are first used, which no capture allows"
    )
    with torch.cuda.graph(graph):
        twos = ones + 1
        thread = threading.Thread(target=move)
        thread.start()
        thread.join(PATIENCE_S)
        threes = twos + 1
    graph.replay()
    assert threes.sum().item() == 24.0
    assert errors == [None, None]
    stager.close()
    reader.close()
    memory.free()
