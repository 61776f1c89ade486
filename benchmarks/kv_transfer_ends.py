"""Both ends of the KV transfer benchmark: a process that owns a pool full of KV, and a consumer that takes it."""

import multiprocessing
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Literal, Self

import numpy as np

from baton.clock import SystemClock
from baton.config import KVTransferConfig
from baton.curve import ClusterSecret, derive_keys
from baton.kv import KVFingerprint, KVTransferParams, TransferRole, WorkerRef
from baton.request import FirstToken
from kv_transfer import KVConnectorMetadata, KVConnectorWorker, SharedMemory
from kv_transfer.orders import BeginLoad, BeginSend, FinishSend, LoadBlocks, OrderAtOnce, SendBlocks
from kv_transfer.transport.shared_memory import SharedMemoryReader

Transport = Literal["shared_memory", "zmq_tcp", "zmq_tcp+checksum", "zmq_tcp+curve", "nixl"]

BLOCK_SIZE = 16
TIMEOUT_S = 120.0
SOCKET_BUFFER = 4 * 2**20


@dataclass(frozen=True, slots=True)
class Setup:
    """What is measured: pools of `pool_nbytes` in blocks of `block_nbytes`."""

    transport: Transport
    block_nbytes: int
    pool_nbytes: int

    @property
    def num_blocks(self) -> int:
        return max(1, self.pool_nbytes // self.block_nbytes)

    @property
    def fingerprint(self) -> KVFingerprint:
        """One layer of one head, whose tokens make the block as large as it is to be."""
        head_dim = self.block_nbytes // (2 * BLOCK_SIZE)
        return KVFingerprint(2, "benchmark", "uint8", "LKHTD", 1, 1, head_dim, BLOCK_SIZE, 1)


class End:
    """One worker's connector over a pool of touched pages."""

    def __init__(self, setup: Setup, name: str) -> None:
        self.setup = setup
        self.memory = SharedMemory(setup.num_blocks * setup.block_nbytes)
        self.pool = self.memory.array.reshape(setup.num_blocks, setup.block_nbytes)
        self.pool[:] = 1
        transport, _, option = setup.transport.partition("+")
        config = KVTransferConfig.model_validate(
            {"transport": transport, "checksum": "on" if option == "checksum" else "auto"}
        )
        keys = derive_keys(ClusterSecret("known to a benchmark only") if option == "curve" else None)
        self.has_news = threading.Event()
        self.connector = KVConnectorWorker(
            config,
            "127.0.0.1",
            keys.kv,
            f"{name}-life",
            SystemClock(),
            self.pool,
            setup.fingerprint,
            self.has_news.set,
            memory=self.memory,
        )
        self.connector.start()
        self.ref = WorkerRef(name, f"{name}-life", (self.connector.kv_address,), BLOCK_SIZE)

    def order(self, *orders: OrderAtOnce) -> None:
        self.connector.send_orders(KVConnectorMetadata(orders, (), ()))


class Producer:
    """What happens in the other process, one command after the other."""

    def __init__(self, setup: Setup) -> None:
        self._end = End(setup, "p0")
        self._end.pool[:] = np.arange(setup.num_blocks, dtype=np.uint64)[:, None].astype(np.uint8)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER)
        self._stream: socket.socket | None = None

    def describe(self) -> tuple[WorkerRef, bytes, int]:
        """Its name, its memory for whoever maps it by hand, and the port of its raw socket."""
        description = SharedMemoryReader(self._end.pool, self._end.memory).describe()
        assert description is not None
        return self._end.ref, description, self._listener.getsockname()[1]

    def prepare(self, request_id: str, consumer: WorkerRef, num_blocks: int) -> None:
        """A prompt of `num_blocks` blocks is computed, and waits for its consumer."""
        transfer = KVTransferParams(TransferRole.PRODUCER, request_id, 0, consumer)
        self._end.order(BeginSend(request_id, transfer, num_blocks * BLOCK_SIZE))
        filled = SendBlocks(request_id, 0, tuple(range(num_blocks)))
        self._end.connector.save_kv_blocks(KVConnectorMetadata((), (), (filled,)), set())
        self._end.order(FinishSend(request_id, num_blocks, (), FirstToken(7, None)))

    def send_raw(self, num_blocks: int) -> None:
        """The same blocks over the raw socket."""
        if self._stream is None:
            self._stream, _ = self._listener.accept()
        for block in self._end.pool[:num_blocks]:
            self._stream.sendall(block.data)

    def until_freed(self) -> None:
        while not self._end.connector.get_finished().finished_sending:
            assert self._end.has_news.wait(TIMEOUT_S)
            self._end.has_news.clear()


def run_producer(setup: Setup, pipe: Connection) -> None:
    """The other process."""
    producer = Producer(setup)
    pipe.send(producer.describe())
    while True:
        match pipe.recv():
            case ("prepare", request_id, consumer, num_blocks):
                producer.prepare(request_id, consumer, num_blocks)
                pipe.send("ready")
                producer.until_freed()
                pipe.send("freed")
            case ("send", num_blocks):
                producer.send_raw(num_blocks)
            case _:
                return


@contextmanager
def start_producer(setup: Setup) -> Iterator[Connection]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=run_producer, args=(setup, theirs), daemon=True)
    process.start()
    try:
        yield ours
    finally:
        process.kill()
        process.join()


class Consumer:
    """The end that the clock runs in."""

    def __init__(self, setup: Setup, producer: Connection) -> None:
        self._end = End(setup, "d0")
        self._producer = producer
        assert producer.poll(TIMEOUT_S), "the producer does not start"
        self._peer, description, port = producer.recv()
        reader = SharedMemoryReader(self._end.pool, None)
        self._mapped = reader.open(description)
        assert self._mapped._source is not None
        self._source = self._mapped._source.reshape(self._end.pool.shape)
        self._source.sum()  # maps every page
        self._stream = socket.create_connection(("127.0.0.1", port))
        self._stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BUFFER)
        self._num_hand_overs = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()
        self._end.connector.shutdown()

    def hand_over(self, num_blocks: int) -> float:
        """Seconds from the order to load to the news that everything is here."""
        self._num_hand_overs += 1
        request_id = f"r{self._num_hand_overs}"
        self._producer.send(("prepare", request_id, self._end.ref, num_blocks))
        assert self._producer.recv() == "ready"
        self._end.pool[:num_blocks] = 0
        transfer = KVTransferParams(TransferRole.CONSUMER, request_id, 0, self._peer)
        load = LoadBlocks(request_id, 0, tuple(range(num_blocks)))
        began = time.perf_counter()
        self._end.order(BeginLoad(request_id, transfer, num_blocks * BLOCK_SIZE))
        self._end.connector.start_load_kv(KVConnectorMetadata((), (load,), ()))
        while not (news := self._end.connector.get_finished()):
            assert self._end.has_news.wait(TIMEOUT_S)
            self._end.has_news.clear()
        elapsed = time.perf_counter() - began
        assert [received.request_id for received in news.finished_recving] == [request_id], news
        assert (self._end.pool[:num_blocks] == self._source[:num_blocks]).all(), "wrong bytes"
        assert self._producer.recv() == "freed"
        return elapsed

    def memcpy(self, num_blocks: int) -> float:
        """Seconds that copying the same blocks takes."""
        self._end.pool[:num_blocks] = 0
        began = time.perf_counter()
        for index in range(num_blocks):
            self._end.pool[index] = self._source[index]
        return time.perf_counter() - began

    def receive_raw(self, num_blocks: int) -> float:
        """Seconds that the same blocks take over a plain TCP connection."""
        self._end.pool[:num_blocks] = 0
        began = time.perf_counter()
        self._producer.send(("send", num_blocks))
        for block in self._end.pool[:num_blocks]:
            left = memoryview(block.data)
            while left:
                left = left[self._stream.recv_into(left, len(left), socket.MSG_WAITALL) :]
        return time.perf_counter() - began
