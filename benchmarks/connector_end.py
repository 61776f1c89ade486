"""ConnectorEnd: a real connector without an engine, for benchmarks of hand-overs; measures nothing."""

import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from baton.clock import SystemClock
from baton.config import KVTransferConfig
from baton.kv import PROTOCOL_VERSION, KVFingerprint, KVTransferParams, TransferRole, WorkerRef
from baton.request import FirstToken
from baton.step import KVConnectorOutput
from baton.system.curve import PlaneKeys
from kv_transfer import DeviceBlocks, KVConnectorMetadata, SharedMemory
from kv_transfer.commands import (
    BeginLoad,
    BeginSend,
    FinishSend,
    ImmediateCommand,
    LoadBlocks,
    SendBlocks,
)
from kv_transfer.connector.worker import KVConnectorWorker
from kv_transfer.transport.base import Bytes

BLOCK_SIZE = 16
LAYER_NBYTES = 2 * 8 * BLOCK_SIZE * 64 * 2
"""Bytes of one layer in one block: keys and values, 8 heads of 64 numbers in bfloat16."""
PATIENCE_S = 60.0
SETTLE_S = 0.01
"""Pause between the consumer's request and the moment when the blocks are ready. A prefill takes longer than
the first messages of a hand-over."""


@dataclass(frozen=True, slots=True)
class Announce:
    """Tells a producer to announce a prompt with its `number`-th connector. The answer is None."""

    number: int
    request_id: str
    peer: WorkerRef
    num_blocks: int


@dataclass(frozen=True, slots=True)
class Give:
    """Tells a producer that all blocks of the prompt are ready.

    The answer is a Given, sent once the blocks are free.
    """

    number: int
    request_id: str
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Given:
    """When the transfer began, and the CPU time that it cost this process."""

    begun_at: float
    cpu_s: float


class ConnectorEnd:
    """A real connector over blocks of memory, and what the connector reports."""

    def __init__(
        self,
        name: str,
        config: KVTransferConfig,
        blocks: Bytes | DeviceBlocks,
        block_nbytes: int,
        keys: PlaneKeys | None = None,
        memory: SharedMemory | None = None,
    ) -> None:
        """`memory`: the memory of `blocks`, if other processes may map it."""
        self._has_output = threading.Event()
        incarnation = f"{name}-{secrets.token_hex(8)}"
        num_layers = block_nbytes // LAYER_NBYTES
        fingerprint = KVFingerprint(
            PROTOCOL_VERSION, "benchmark", "bfloat16", "LKHTD", num_layers, 8, 64, BLOCK_SIZE, 1
        )
        self._connector = KVConnectorWorker(
            config,
            "127.0.0.1",
            keys,
            incarnation,
            SystemClock(),
            blocks,
            fingerprint,
            self._has_output.set,
            memory=memory,
        )
        self._connector.start()
        self.ref = WorkerRef(name, incarnation, (self._connector.kv_address,), BLOCK_SIZE)

    def answer(self, command: Announce | Give) -> Given | None:
        """Carries out a command to a producer."""
        if isinstance(command, Announce):
            transfer = KVTransferParams(TransferRole.PRODUCER, command.request_id, 0, command.peer)
            self._execute(BeginSend(command.request_id, transfer, command.num_blocks * BLOCK_SIZE))
            return None
        finish = FinishSend(command.request_id, len(command.block_ids), (), FirstToken(7, None))
        begun_at, cpu_s = time.perf_counter(), time.process_time()
        self._execute(finish, after=(SendBlocks(command.request_id, 0, command.block_ids),))
        self._wait_until(lambda news: news.finished_sending)
        return Given(begun_at, time.process_time() - cpu_s)

    def load(self, request_id: str, peer: WorkerRef, block_ids: tuple[int, ...]) -> None:
        """Requests the blocks of a prompt that the peer has announced, and pauses for SETTLE_S."""
        transfer = KVTransferParams(TransferRole.CONSUMER, request_id, 0, peer)
        begin = BeginLoad(request_id, transfer, len(block_ids) * BLOCK_SIZE)
        self._execute(begin, loads=(LoadBlocks(request_id, 0, block_ids),))
        time.sleep(SETTLE_S)

    def wait_until_loaded(self) -> None:
        self._wait_until(lambda news: news.finished_recving)

    def stop(self) -> None:
        self._connector.shutdown()

    def _execute(
        self,
        at_once: ImmediateCommand,
        loads: tuple[LoadBlocks, ...] = (),
        after: tuple[SendBlocks, ...] = (),
    ) -> None:
        metadata = KVConnectorMetadata((at_once,), loads, after)
        self._connector.save_kv_blocks(metadata, set())
        self._connector.send_commands(metadata)
        self._connector.start_load_kv(metadata)

    def _wait_until(self, has_come: Callable[[KVConnectorOutput], object]) -> None:
        news = KVConnectorOutput()
        while not has_come(news):
            assert self._has_output.wait(PATIENCE_S), "a hand-over did not end"
            self._has_output.clear()
            news = self._connector.get_finished()
            assert not news.failed_recving, news.failed_recving
