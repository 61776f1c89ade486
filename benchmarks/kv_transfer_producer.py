"""The producer's process of benchmarks/kv_transfer.py, and what both processes share. Measures nothing.

Commands arrive through a pipe, and are answered one by one. Times are those of the clock that all processes
of a host share.
"""

import os
import random
import socket
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection

import numpy as np

from baton.config import KVTransferConfig
from baton.system.curve import ClusterSecret, PlaneKeys, derive_keys
from benchmarks.connector_end import Announce, ConnectorEnd, Give, Given
from engine.allocator import keep_freed_memory
from kv_transfer import SharedMemory
from kv_transfer.transport.base import Bytes

MAX_SPANS = 256
"""Most spans in one sendmsg; the system accepts 1024."""


@dataclass(frozen=True, slots=True)
class Way:
    """A transport with its configuration, and the baseline that it is compared with."""

    config: KVTransferConfig
    baseline: str
    is_secured: bool = False

    @property
    def keys(self) -> PlaneKeys | None:
        return derive_keys(ClusterSecret("known to a benchmark only")).kv if self.is_secured else None


@dataclass(frozen=True, slots=True)
class Connect:
    """Makes a connector for each way. The answer is a list of their WorkerRefs."""

    ways: tuple[Way, ...]
    block_nbytes: int


@dataclass(frozen=True, slots=True)
class GiveRaw:
    """Sends the same blocks through a plain socket. The answer is a Given."""

    block_nbytes: int
    block_ids: tuple[int, ...]


Command = Connect | Announce | Give | GiveRaw | None


class Memory:
    """Shared memory whose pages are all written, and the order in which its blocks are used.

    The order is scattered, as in a pool that has been used.
    """

    def __init__(self, num_bytes: int, seed: int) -> None:
        self.shared = SharedMemory(num_bytes)
        pattern = np.random.default_rng(seed).integers(0, 256, 2**20, dtype=np.uint8)
        for start in range(0, num_bytes, 2**20):
            self.shared.array[start : start + 2**20] = pattern[: num_bytes - start]
        self._seed = seed

    def blocks(self, block_nbytes: int) -> Bytes:
        return self.shared.array.reshape(-1, block_nbytes)

    def order(self, block_nbytes: int, is_scattered: bool) -> list[int]:
        block_ids = list(range(len(self.shared.array) // block_nbytes))
        if is_scattered:
            random.Random(self._seed).shuffle(block_ids)
        return block_ids


def connector_end(name: str, way: Way, memory: Memory, block_nbytes: int) -> ConnectorEnd:
    """A connector over the memory, in blocks of this size."""
    return ConnectorEnd(name, way.config, memory.blocks(block_nbytes), block_nbytes, way.keys, memory.shared)


def run_producer(pipe: Connection, num_bytes: int, port: int) -> None:
    """The process's main function: answers commands until it gets None."""
    keep_freed_memory()  # as a worker does
    memory = Memory(num_bytes, seed=1)
    with socket.create_connection(("127.0.0.1", port)) as raw:
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        pipe.send((os.getpid(), memory.shared.fd))
        ends: list[ConnectorEnd] = []
        command: Command
        while (command := pipe.recv()) is not None:
            match command:
                case Connect(ways, block_nbytes):
                    for end in ends:
                        end.stop()
                    ends = [connector_end("producer", way, memory, block_nbytes) for way in ways]
                    pipe.send([end.ref for end in ends])
                case Announce() | Give():
                    pipe.send(ends[command.number].answer(command))
                case GiveRaw(block_nbytes, block_ids):
                    blocks = memory.blocks(block_nbytes)
                    pipe.send(_give_raw(raw, [blocks[block_id].data for block_id in block_ids]))
        for end in ends:
            end.stop()


def _give_raw(raw: socket.socket, spans: list[memoryview]) -> Given:
    begun_at, cpu_s = time.perf_counter(), time.process_time()
    first = 0
    while first < len(spans):
        num_sent = raw.sendmsg(spans[first : first + MAX_SPANS])
        while first < len(spans) and num_sent >= len(spans[first]):
            num_sent -= len(spans[first])
            first += 1
        if num_sent:
            spans[first] = spans[first][num_sent:]
    return Given(begun_at, time.process_time() - cpu_s)
