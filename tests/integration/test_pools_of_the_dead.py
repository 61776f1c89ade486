"""A prefill worker that is killed: the decode worker that maps its pool closes it, though it is idle otherwise."""

import multiprocessing
import os
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

from baton.clock import SystemClock
from baton.config import KVTransferConfig
from baton.kv import KVFingerprint, KVTransferParams, TransferRole, WorkerRef
from baton.request import FirstToken
from kv_transfer import KVConnectorMetadata, SharedMemory
from kv_transfer.commands import BeginLoad, BeginSend, FinishSend, LoadBlocks, SendBlocks
from kv_transfer.connector.worker import KVConnectorWorker

NUM_BLOCKS, BLOCK_BYTES, NUM_TOKENS = 64, 4096, 32
FINGERPRINT = KVFingerprint(2, "model", "uint8", "LKHTD", 1, 2, 64, 16, 1)
CONFIG = KVTransferConfig().with_values("test", transport="shared_memory")
PATIENCE_S = 30.0
AT_ONCE_S = 5.0
"""It takes milliseconds, on a busy machine more, but far less than the time after which an idle pool is closed."""


class Worker:
    """A real connector over shared memory, with its thread and its socket."""

    def __init__(self, name: str) -> None:
        memory = SharedMemory(NUM_BLOCKS * BLOCK_BYTES)
        self.inode = os.fstat(memory.fd).st_ino
        self.has_news = threading.Event()
        self.connector = KVConnectorWorker(
            CONFIG,
            "127.0.0.1",
            None,
            f"{name}-incarnation",
            SystemClock(),
            memory.array.reshape(NUM_BLOCKS, BLOCK_BYTES),
            FINGERPRINT,
            self.has_news.set,
            memory=memory,
        )
        self.connector.start()
        self.ref = WorkerRef(name, f"{name}-incarnation", (self.connector.kv_address,), 16)

    def obey(self, metadata: KVConnectorMetadata) -> None:
        self.connector.send_commands(metadata)
        self.connector.start_load_kv(metadata)
        self.connector.save_kv_blocks(metadata, frozenset())


def give(pipe: Connection) -> None:
    """A prefill worker that hands over one prompt, and then runs until it is killed."""
    worker = Worker("p0")
    pipe.send((worker.ref, worker.inode))
    peer: WorkerRef = pipe.recv()
    transfer = KVTransferParams(TransferRole.PRODUCER, "r", 0, peer)
    worker.obey(
        KVConnectorMetadata((BeginSend("r", transfer, NUM_TOKENS),), (), (SendBlocks("r", 0, (1, 2)),))
    )
    worker.obey(KVConnectorMetadata((FinishSend("r", 2, (), FirstToken(7, None)),), (), ()))
    pipe.recv()


def is_mapped(inode: int) -> bool:
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    return any(line[1] == "r--s" and line[4] == str(inode) for line in lines)


def test_a_killed_prefill_workers_pool_is_unmapped_at_once() -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    prefill = context.Process(target=give, args=(theirs,), daemon=True)
    prefill.start()
    decode = Worker("d0")
    try:
        assert ours.poll(PATIENCE_S), "the prefill worker does not start"
        peer, inode = ours.recv()
        transfer = KVTransferParams(TransferRole.CONSUMER, "r", 0, peer)
        begin, load = BeginLoad("r", transfer, NUM_TOKENS), LoadBlocks("r", 0, (3, 4))
        decode.obey(KVConnectorMetadata((begin,), (load,), ()))
        ours.send(decode.ref)
        assert decode.has_news.wait(PATIENCE_S), "the prompt does not arrive"
        assert decode.connector.get_finished().finished_recving
        assert is_mapped(inode), "its pool was read, and is open for the next prompt"
        prefill.kill()
        prefill.join()
        end = time.monotonic() + AT_ONCE_S
        while is_mapped(inode):
            assert time.monotonic() < end, "the memory of the dead is still mapped"
            time.sleep(0.01)
    finally:
        prefill.kill()
        decode.connector.shutdown()
