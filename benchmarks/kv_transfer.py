"""How fast KV blocks move: whole hand-overs between two processes, compared with memcpy and a plain socket pair.

    python -m benchmarks.kv_transfer [--transports NAME ...] [--blocks KIB ...] [--sizes MIB ...] [--adjacent]

There are two processes. Each has the real connector worker: its thread, endpoint, protocol and transport. The
time of a hand-over begins when the producer is commanded to send all blocks of a complete prompt. It ends
when the consumer reports that it has received them. Two baselines run in turn with the hand-overs, in the
same processes and pools, with blocks of the same size:

    memcpy    np.copyto, block by block, out of the other process's pool through one mapping; its pages are
              warm
    socket    one TCP connection over loopback: sendmsg straight from the pool, recv_into straight into the
              pool

The blocks are scattered in both pools (in order with `--adjacent`). Each measurement uses other blocks than the
measurement before, so only transfers as large as the pool find bytes in a cache. Figures are medians over rounds.
`share` is the median over rounds of this quotient: the baseline's time divided by the hand-over's time. `cpu` is the
CPU time of both processes in nanoseconds a byte. Other processes of the machine hardly change it.
"""

import argparse
import mmap
import multiprocessing
import os
import platform
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import xxhash
from rich.console import Console
from rich.table import Table

from baton.config import KVTransferConfig
from baton.kv import WorkerRef
from benchmarks.connector_end import PATIENCE_S, Announce, ConnectorEnd, Give, Given
from benchmarks.json_file import save_json
from benchmarks.kv_transfer_producer import (
    Connect,
    GiveRaw,
    Memory,
    Way,
    connector_end,
    run_producer,
)
from engine.allocator import keep_freed_memory
from kv_transfer.transport.base import Bytes
from kv_transfer.transport.nixl_agent import nixl_is_available

KIB, MIB = 2**10, 2**20
MIN_POOL_NBYTES = 256 * MIB
ROUNDS_NBYTES = 1024 * MIB
"""Every figure comes from at least this many bytes, or from MAX_ROUNDS rounds."""
MIN_ROUNDS, MAX_ROUNDS = 5, 25

WAYS = {
    "shared_memory": Way(KVTransferConfig(transport="shared_memory"), "memcpy"),
    "zmq_tcp": Way(KVTransferConfig(transport="zmq_tcp", checksum="off"), "socket"),
    "zmq_tcp+xxh3": Way(KVTransferConfig(transport="zmq_tcp", checksum="on"), "socket"),
    "zmq_tcp+curve": Way(KVTransferConfig(transport="zmq_tcp", checksum="off"), "socket", is_secured=True),
    "nixl": Way(KVTransferConfig(transport="nixl", checksum="off"), "memcpy"),
}


@dataclass(frozen=True, slots=True)
class Row:
    """Medians for one transport, block size and transfer size."""

    transport: str
    block_kib: int
    transfer_mib: int
    us: float
    gb_per_s: float
    cpu_ns_per_byte: float
    baseline: str
    baseline_gb_per_s: float
    baseline_cpu_ns_per_byte: float
    share: float


@dataclass(frozen=True, slots=True)
class Sample:
    """The times of one measurement."""

    seconds: float
    cpu_s: float
    """CPU time of both processes."""


class Consumer:
    """The consumer's process: measures hand-overs and baselines."""

    def __init__(self, pipe: Connection, raw: socket.socket, memory: Memory, is_scattered: bool) -> None:
        self._pipe = pipe
        self._raw = raw
        self._memory = memory
        self._is_scattered = is_scattered
        self._num_requests = 0
        pid, fd = _answer(pipe)
        with open(f"/proc/{pid}/fd/{fd}", "rb") as file:
            self._theirs: Bytes = np.frombuffer(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ), np.uint8)
        self._theirs[:: mmap.PAGESIZE].max()  # from now on every page is mapped
        self._ends: list[ConnectorEnd] = []
        self._peers: list[WorkerRef] = []

    def connect(self, ways: Sequence[Way], block_nbytes: int) -> None:
        """Makes connectors for blocks of this size. The first hand-over of each way warms its pages."""
        self.stop()
        self._block_nbytes = block_nbytes
        self._pipe.send(Connect(tuple(ways), block_nbytes))
        self._peers = _answer(self._pipe)
        self._ends = [connector_end("consumer", way, self._memory, block_nbytes) for way in ways]
        self._order = self._memory.order(block_nbytes, self._is_scattered)
        self._next = 0
        for way in range(len(ways)):
            self.hand_over(way, len(self._order))

    def hand_over(self, way: int, num_blocks: int) -> Sample:
        self._num_requests += 1
        request_id, end = f"r{self._num_requests}", self._ends[way]
        theirs, ours = self._pick(num_blocks)
        self._pipe.send(Announce(way, request_id, end.ref, num_blocks))
        _answer(self._pipe)
        end.load(request_id, self._peers[way], ours)
        cpu_s = time.process_time()
        self._pipe.send(Give(way, request_id, theirs))
        end.wait_until_loaded()
        return self._sample(cpu_s)

    def memcpy(self, num_blocks: int) -> Sample:
        theirs, ours = self._pick(num_blocks)
        source, target = self._theirs.reshape(-1, self._block_nbytes), self._blocks()
        pairs = [(target[a], source[b]) for a, b in zip(ours, theirs, strict=True)]
        begun_at, cpu_s = time.perf_counter(), time.process_time()
        for to, of in pairs:
            np.copyto(to, of)
        return Sample(time.perf_counter() - begun_at, time.process_time() - cpu_s)

    def socket(self, num_blocks: int) -> Sample:
        theirs, ours = self._pick(num_blocks)
        blocks = self._blocks()
        spans = [blocks[block_id].data for block_id in ours]
        cpu_s = time.process_time()
        self._pipe.send(GiveRaw(self._block_nbytes, theirs))
        for span in spans:
            rest = span
            while rest:
                rest = rest[self._raw.recv_into(rest, 0, socket.MSG_WAITALL) :]
        return self._sample(cpu_s)

    def checksum(self, num_blocks: int) -> float:
        """Computes the checksums of blocks, as one end does; returns the seconds that it took."""
        ours, blocks = self._pick(num_blocks)[1], self._blocks()
        begun_at = time.perf_counter()
        for block_id in ours:
            xxhash.xxh3_64_intdigest(blocks[block_id].data)
        return time.perf_counter() - begun_at

    def stop(self) -> None:
        for end in self._ends:
            end.stop()

    def _sample(self, cpu_s: float) -> Sample:
        """The time from the producer's start to now. All processes of a host share this clock."""
        ended_at, cpu_s = time.perf_counter(), time.process_time() - cpu_s
        given: Given = _answer(self._pipe)
        return Sample(ended_at - given.begun_at, cpu_s + given.cpu_s)

    def _blocks(self) -> Bytes:
        return self._memory.blocks(self._block_nbytes)

    def _pick(self, num_blocks: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The next block ids, in the producer's pool and in our pool."""
        if self._next + num_blocks > len(self._order):
            self._next = 0
        ours = self._order[self._next : self._next + num_blocks]
        self._next += num_blocks
        last = len(self._order) - 1
        theirs = [last - block_id for block_id in ours] if self._is_scattered else ours
        return tuple(theirs), tuple(ours)


Rounds = dict[str, list[Sample]]


def measure(
    consumer: Consumer,
    ways: Mapping[str, Way],
    block_nbytes: int,
    transfers: Sequence[int],
    num_rounds: int | None,
) -> list[Row]:
    """Measures every way and every baseline in each round. Their order changes from round to round."""
    consumer.connect(list(ways.values()), block_nbytes)
    rows = []
    for transfer_nbytes in transfers:
        num_blocks = transfer_nbytes // block_nbytes
        sides: dict[str, Callable[[int], Sample]] = {
            name: partial(consumer.hand_over, number) for number, name in enumerate(ways)
        }
        baselines = {"memcpy": consumer.memcpy, "socket": consumer.socket}
        sides |= {name: baselines[name] for name in sorted({way.baseline for way in ways.values()})}
        samples: Rounds = {name: [] for name in sides}
        names = list(sides)
        for number in range(num_rounds or min(MAX_ROUNDS, max(MIN_ROUNDS, ROUNDS_NBYTES // transfer_nbytes))):
            for name in names[number % len(names) :] + names[: number % len(names)]:
                samples[name].append(sides[name](num_blocks))
        rows += [_row(name, way, block_nbytes, transfer_nbytes, samples) for name, way in ways.items()]
    return rows


def _row(name: str, way: Way, block_nbytes: int, transfer_nbytes: int, samples: Rounds) -> Row:
    ours, baseline = samples[name], samples[way.baseline]
    ours_s, baseline_s = _seconds(ours), _seconds(baseline)
    return Row(
        name,
        block_nbytes // KIB,
        transfer_nbytes // MIB,
        us=ours_s * 1e6,
        gb_per_s=transfer_nbytes / ours_s / 1e9,
        cpu_ns_per_byte=_cpu_s(ours) * 1e9 / transfer_nbytes,
        baseline=way.baseline,
        baseline_gb_per_s=transfer_nbytes / baseline_s / 1e9,
        baseline_cpu_ns_per_byte=_cpu_s(baseline) * 1e9 / transfer_nbytes,
        share=median(theirs.seconds / its.seconds for its, theirs in zip(ours, baseline, strict=True)),
    )


def _seconds(samples: Sequence[Sample]) -> float:
    return median(sample.seconds for sample in samples)


def _cpu_s(samples: Sequence[Sample]) -> float:
    return median(sample.cpu_s for sample in samples)


@contextmanager
def two_processes(pool_nbytes: int, is_scattered: bool) -> Iterator[Consumer]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        producer = context.Process(target=run_producer, args=(theirs, pool_nbytes, port))
        producer.start()
        server.settimeout(PATIENCE_S)
        raw, _ = server.accept()
    with raw:
        consumer = Consumer(ours, raw, Memory(pool_nbytes, seed=2), is_scattered)
        try:
            yield consumer
        finally:
            consumer.stop()
            ours.send(None)
            producer.join(PATIENCE_S)


def _answer(pipe: Connection) -> Any:
    assert pipe.poll(PATIENCE_S), "the producing process does not answer"
    return pipe.recv()


def transfers_that_fit(wanted: Sequence[int]) -> list[int]:
    """The transfers for which half of the free memory is enough.

    Each needs two pools, and the same space again for copies that are under way.
    """
    free = os.sysconf("SC_AVPHYS_PAGES") * mmap.PAGESIZE
    return [nbytes for nbytes in wanted if 4 * nbytes < free // 2]


def show(rows: Sequence[Row], checksums: Mapping[int, float], console: Console) -> None:
    table = Table(title="KV hand-overs between two processes, medians", title_justify="left")
    for name in (
        "transport",
        "block",
        "transfer",
        "latency",
        "speed",
        "cpu",
        "baseline",
        "speed",
        "cpu",
        "share",
    ):
        table.add_column(name, justify="left" if name == "transport" else "right")
    for row in sorted(rows, key=lambda row: row.transport):
        table.add_row(
            row.transport,
            f"{row.block_kib} KiB",
            f"{row.transfer_mib} MiB",
            f"{row.us:.0f} us",
            f"{row.gb_per_s:.2f} GB/s",
            f"{row.cpu_ns_per_byte:.2f}",
            row.baseline,
            f"{row.baseline_gb_per_s:.2f} GB/s",
            f"{row.baseline_cpu_ns_per_byte:.2f}",
            f"{row.share:.2f}",
        )
    console.print(table)
    for block_kib, gb_per_s in checksums.items():
        console.print(f"xxh3 of blocks of {block_kib} KiB: {gb_per_s:.1f} GB/s a core")


def main() -> None:
    options = _options()
    keep_freed_memory()  # as a worker does
    ways = {name: WAYS[name] for name in options.transports}
    blocks = [kib * KIB for kib in options.blocks]
    transfers = transfers_that_fit([mib * MIB for mib in options.sizes])
    rows, checksums = [], {}
    pool_nbytes = max(MIN_POOL_NBYTES, *transfers)
    with two_processes(pool_nbytes, not options.adjacent) as consumer:
        for block_nbytes in blocks:
            fitting = [nbytes for nbytes in transfers if nbytes >= block_nbytes]
            rows += measure(consumer, ways, block_nbytes, fitting, options.rounds)
            num_blocks = min(MIN_POOL_NBYTES, pool_nbytes) // block_nbytes
            seconds = median(consumer.checksum(num_blocks) for _ in range(MIN_ROUNDS))
            checksums[block_nbytes // KIB] = num_blocks * block_nbytes / seconds / 1e9
    show(rows, checksums, Console(width=110))
    if options.json:
        figures = {
            "machine": f"{os.cpu_count()} cores, {platform.machine()}",
            "order": "adjacent" if options.adjacent else "scattered",
            "results": [asdict(row) for row in rows],
            "xxh3_gb_per_s_by_block_kib": checksums,
        }
        save_json(options.json, figures)


def _options() -> argparse.Namespace:
    here = [name for name in WAYS if name != "nixl" or nixl_is_available()]
    parser = argparse.ArgumentParser(description="How fast KV blocks move between two processes.")
    parser.add_argument(
        "--transports", nargs="+", choices=list(WAYS), default=here, help="default: all that are here"
    )
    parser.add_argument("--blocks", type=int, nargs="+", default=[64, 256, 1024, 4096], help="KiB")
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=[1, 4, 16, 64, 256, 1024], help="MiB, of transfers"
    )
    parser.add_argument("--adjacent", action="store_true", help="blocks that lie side by side in both pools")
    parser.add_argument("--rounds", type=int, help="default: by the size of the transfer")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    return parser.parse_args()


if __name__ == "__main__":
    main()
