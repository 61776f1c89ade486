"""The producer's process of benchmarks/kv_transfer.py, and what both processes share. Measures nothing.

Commands arrive through a pipe, and are answered one by one. Times are those of the clock that all processes
of a host share.
"""

import os
import random
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from baton.clock import SystemClock
from baton.config import KVTransferConfig
from baton.kv import PROTOCOL_VERSION, KVFingerprint, KVTransferParams, TransferRole, WorkerRef
from baton.request import FirstToken
from baton.step import KVConnectorOutput
from baton.system.curve import ClusterSecret, PlaneKeys, derive_keys
from engine.allocator import keep_freed_memory
from kv_transfer import KVConnectorMetadata, SharedMemory
from kv_transfer.commands import BeginSend, FinishSend, ImmediateCommand, LoadBlocks, SendBlocks
from kv_transfer.connector.worker import KVConnectorWorker

BLOCK_SIZE = 16
LAYER_NBYTES = 2 * 8 * BLOCK_SIZE * 64 * 2
"""Bytes of one layer in one block: keys and values, 8 heads of 64 numbers in bfloat16."""
PATIENCE_S = 60.0
MAX_SPANS = 256
"""Most spans in one sendmsg; the system accepts 1024."""

Bytes = npt.NDArray[np.uint8]
T = TypeVar("T")


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
class Announce:
    """Announces a prompt to the `number`-th connector. The answer is None."""

    number: int
    request_id: str
    peer: WorkerRef
    num_blocks: int


@dataclass(frozen=True, slots=True)
class Give:
    """Reports that all blocks of the prompt are ready.

    The answer is a Given, sent once the blocks are free.
    """

    number: int
    request_id: str
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GiveRaw:
    """Sends the same blocks through a plain socket. The answer is a Given."""

    block_nbytes: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Given:
    """When the transfer began, and the CPU time that it cost this process."""

    begun_at: float
    cpu_s: float


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


class ConnectorEnd:
    """A real connector over the memory, and what the connector reports."""

    def __init__(self, name: str, way: Way, memory: Memory, block_nbytes: int) -> None:
        self._has_output = threading.Event()
        incarnation = f"{name}-{secrets.token_hex(8)}"
        num_layers = block_nbytes // LAYER_NBYTES
        fingerprint = KVFingerprint(
            PROTOCOL_VERSION, "benchmark", "bfloat16", "LKHTD", num_layers, 8, 64, BLOCK_SIZE, 1
        )
        self._connector = KVConnectorWorker(
            way.config,
            "127.0.0.1",
            way.keys,
            incarnation,
            SystemClock(),
            memory.blocks(block_nbytes),
            fingerprint,
            self._has_output.set,
            memory=memory.shared,
        )
        self._connector.start()
        self.ref = WorkerRef(name, incarnation, (self._connector.kv_address,), BLOCK_SIZE)

    def execute(
        self,
        *at_once: ImmediateCommand,
        loads: tuple[LoadBlocks, ...] = (),
        after: tuple[SendBlocks, ...] = (),
    ) -> None:
        metadata = KVConnectorMetadata(at_once, loads, after)
        self._connector.save_kv_blocks(metadata, set())
        self._connector.send_commands(metadata)
        self._connector.start_load_kv(metadata)

    def wait_until(self, pick: Callable[[KVConnectorOutput], Sequence[T]]) -> T:
        """Waits for a report in which `pick` finds something, and returns the first piece."""
        while True:
            assert self._has_output.wait(PATIENCE_S), "a hand-over did not end"
            self._has_output.clear()
            news = self._connector.get_finished()
            assert not news.failed_recving, news.failed_recving
            if found := pick(news):
                return found[0]

    def stop(self) -> None:
        self._connector.shutdown()


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
                    ends = [ConnectorEnd("producer", way, memory, block_nbytes) for way in ways]
                    pipe.send([end.ref for end in ends])
                case Announce(number, request_id, peer, num_blocks):
                    transfer = KVTransferParams(TransferRole.PRODUCER, request_id, 0, peer)
                    ends[number].execute(BeginSend(request_id, transfer, num_blocks * BLOCK_SIZE))
                    pipe.send(None)
                case Give():
                    pipe.send(_give(ends[command.number], command))
                case GiveRaw(block_nbytes, block_ids):
                    blocks = memory.blocks(block_nbytes)
                    pipe.send(_give_raw(raw, [blocks[block_id].data for block_id in block_ids]))
        for end in ends:
            end.stop()


def _give(end: ConnectorEnd, command: Give) -> Given:
    finish = FinishSend(command.request_id, len(command.block_ids), (), FirstToken(7, None))
    begun_at, cpu_s = time.perf_counter(), time.process_time()
    end.execute(finish, after=(SendBlocks(command.request_id, 0, command.block_ids),))
    end.wait_until(lambda news: news.finished_sending)
    return Given(begun_at, time.process_time() - cpu_s)


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
