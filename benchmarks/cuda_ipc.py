"""How fast KV blocks move between two processes on one GPU, compared with a plain copy on the device.

    python -m benchmarks.cuda_ipc [--blocks MIB ...] [--sizes MIB ...] [--rounds N] [--json FILE] [--dry-run]

There are two processes. Each has the real connector worker over a pool in device memory: its thread,
endpoint, protocol and CUDA IPC. The time of a hand-over begins when the producer is commanded to send all
blocks of a complete prompt. It ends when the consumer reports that it has received them.

Hand-overs alternate with a plain copy, which shows what the memory allows: PyTorch copies as many bytes
within the consumer's device, from one span to another. The copy ends when an event reports that the bytes
have arrived. GB/s count each byte once, although a copy reads and writes it.

Blocks are scattered in both pools. Each measurement uses other blocks than the measurement before. Figures
are medians over rounds. `share` is the median over rounds of this quotient: the plain copy's time divided by
the hand-over's time. `--dry-run` tests the benchmark itself on a pretended device with blocks of 64 KiB; its
times mean nothing.

Llama-3.1-8B: a block of 64 tokens has 8 MiB, a prompt of 8,192 tokens 1 GiB.
"""

import argparse
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from baton.config import KVTransferConfig
from baton.kv import WorkerRef
from benchmarks.connector_end import Announce, ConnectorEnd, Give, Given
from benchmarks.json_file import save_json
from kv_transfer import CudaMemory, DeviceBlocks
from tests.factories.devices import Device, PretendedDevice, Process, RealDevice

KIB, MIB = 2**10, 2**20
DRY_MIB = 64 * KIB
"""What counts as a MiB in a dry run."""
CONFIG = KVTransferConfig(transport="cuda_ipc", checksum="off")


@dataclass(frozen=True, slots=True)
class Connect:
    """Makes a pool of blocks of this size, and a connector over the pool. The answer is the connector's WorkerRef."""

    num_blocks: int
    block_nbytes: int


@dataclass(frozen=True, slots=True)
class Row:
    """Medians for one size of blocks and one size of transfers."""

    block_bytes: int
    transfer_bytes: int
    us: float
    gb_per_s: float
    copy_us: float
    copy_gb_per_s: float
    share: float


class DeviceEnd(ConnectorEnd):
    """A connector over its own pool on the device."""

    def __init__(self, name: str, device: Device, wanted: Connect) -> None:
        self.memory = device.allocate(wanted.num_blocks * wanted.block_nbytes)
        super().__init__(name, CONFIG, DeviceBlocks(self.memory, wanted.block_nbytes), wanted.block_nbytes)

    def stop(self) -> None:
        super().stop()
        self.memory.free()


def run_producer(device: Device, pipe: Connection) -> None:
    """The producer's process: answers commands until it gets None."""
    end: DeviceEnd | None = None
    command: Connect | Announce | Give | None
    while (command := pipe.recv()) is not None:
        if isinstance(command, Connect):
            if end is not None:
                end.stop()
            end = DeviceEnd("producer", device, command)
            pipe.send(end.ref)
        else:
            assert end is not None
            pipe.send(end.answer(command))
    if end is not None:
        end.stop()


class Consumer:
    """The consumer's process: measures hand-overs and copies for one size of blocks."""

    def __init__(self, device: Device, producer: Process, wanted: Connect) -> None:
        self._producer = producer
        self._block_nbytes = wanted.block_nbytes
        producer.pipe.send(wanted)
        self._peer: WorkerRef = producer.answer()
        self._end = DeviceEnd("consumer", device, wanted)
        self._scratch = device.allocate(self._end.memory.nbytes)
        self._plain = make_plain_copy(device, self._scratch, self._end.memory)
        self._order = random.Random(wanted.num_blocks).sample(range(wanted.num_blocks), wanted.num_blocks)
        self._num_requests = self._next = 0

    def hand_over(self, num_blocks: int) -> float:
        """Hands over a prompt; returns the seconds that it took."""
        self._num_requests += 1
        request_id, ours = f"{self._block_nbytes}-{self._num_requests}", self._pick(num_blocks)
        theirs = tuple(len(self._order) - 1 - block_id for block_id in ours)
        self._producer.pipe.send(Announce(0, request_id, self._end.ref, num_blocks))
        self._producer.answer()
        self._end.load(request_id, self._peer, ours)
        self._producer.pipe.send(Give(0, request_id, theirs))
        self._end.wait_until_loaded()
        ended_at = time.perf_counter()
        given: Given = self._producer.answer()
        return ended_at - given.begun_at  # all processes of a host share this clock

    def copy(self, num_blocks: int) -> float:
        """Makes the plain copy, of as many bytes as these blocks have; returns the seconds that it took."""
        begun_at = time.perf_counter()
        self._plain(num_blocks * self._block_nbytes)
        return time.perf_counter() - begun_at

    def stop(self) -> None:
        del self._plain
        self._end.stop()
        self._scratch.free()

    def _pick(self, num_blocks: int) -> tuple[int, ...]:
        if self._next + num_blocks > len(self._order):
            self._next = 0
        picked = self._order[self._next : self._next + num_blocks]
        self._next += num_blocks
        return tuple(picked)


def make_plain_copy(device: Device, source: CudaMemory, to: CudaMemory) -> Callable[[int], None]:
    """A function that copies the first bytes within the device, and returns when they have arrived."""
    if isinstance(device, PretendedDevice):
        theirs = np.frombuffer(device.host.memories[source.address], np.uint8)
        ours = np.frombuffer(device.host.memories[to.address], np.uint8)
        return lambda num_bytes: np.copyto(ours[:num_bytes], theirs[:num_bytes])
    source_tensor, to_tensor = (torch.as_tensor(memory, device="cuda:0") for memory in (source, to))
    event = torch.cuda.Event()

    def copy(num_bytes: int) -> None:
        to_tensor[:num_bytes].copy_(source_tensor[:num_bytes])
        event.record()
        event.synchronize()

    return copy


def measure(
    device: Device, producer: Process, block_nbytes: int, transfers: Sequence[int], num_rounds: int
) -> list[Row]:
    """Measures a hand-over and a copy in each round, after two rounds to warm up.

    The order of the two changes from round to round.
    """
    consumer = Consumer(device, producer, Connect(2 * max(transfers) // block_nbytes, block_nbytes))
    rows = []
    for transfer_nbytes in transfers:
        num_blocks = transfer_nbytes // block_nbytes
        ours: list[float] = []
        plain: list[float] = []
        for number in range(num_rounds + 2):
            sides = [(consumer.hand_over, ours), (consumer.copy, plain)]
            for run, seconds in sides if number % 2 else sides[::-1]:
                seconds.append(run(num_blocks))
        rows.append(_row(block_nbytes, transfer_nbytes, ours[2:], plain[2:]))
    consumer.stop()
    return rows


def _row(block_nbytes: int, transfer_nbytes: int, ours: Sequence[float], plain: Sequence[float]) -> Row:
    ours_s, plain_s = median(ours), median(plain)
    return Row(
        block_nbytes,
        transfer_nbytes,
        us=ours_s * 1e6,
        gb_per_s=transfer_nbytes / ours_s / 1e9,
        copy_us=plain_s * 1e6,
        copy_gb_per_s=transfer_nbytes / plain_s / 1e9,
        share=median(theirs / its for its, theirs in zip(ours, plain, strict=True)),
    )


def show(rows: Sequence[Row], console: Console) -> None:
    table = Table(title="KV hand-overs by CUDA IPC on one device, medians", title_justify="left")
    for name in ("block", "transfer", "latency", "speed", "plain copy", "speed", "share"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            f"{row.block_bytes / MIB:g} MiB",
            f"{row.transfer_bytes / MIB:g} MiB",
            f"{row.us:.0f} us",
            f"{row.gb_per_s:.1f} GB/s",
            f"{row.copy_us:.0f} us",
            f"{row.copy_gb_per_s:.1f} GB/s",
            f"{row.share:.2f}",
        )
    console.print(table)


def main(arguments: Sequence[str] | None = None) -> None:
    options = _options(arguments)
    device: Device = PretendedDevice() if options.dry_run else RealDevice()
    unit = DRY_MIB if options.dry_run else MIB
    producer = device.start(run_producer)
    rows: list[Row] = []
    try:
        for block in options.blocks:
            transfers = [size * unit for size in options.sizes if size >= block]
            rows += measure(device, producer, block * unit, transfers, options.rounds)
    finally:
        producer.pipe.send(None)
        producer.end()
    show(rows, Console(width=110))
    if options.json:
        name = "pretended" if options.dry_run else torch.cuda.get_device_name(0)
        figures = {"device": name, "torch": torch.__version__, "results": [asdict(row) for row in rows]}
        save_json(options.json, figures)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="How fast KV blocks move between two processes on one GPU.")
    parser.add_argument("--blocks", type=int, nargs="+", help="MiB; default: 1 4 8 16")
    parser.add_argument("--sizes", type=int, nargs="+", help="MiB, of transfers; default: 64 256 1024")
    parser.add_argument("--rounds", type=int, help="default: 25")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    parser.add_argument("--dry-run", action="store_true", help="a pretended device, and 64 KiB for a MiB")
    options = parser.parse_args(arguments)
    options.blocks = options.blocks or ([1, 2] if options.dry_run else [1, 4, 8, 16])
    options.sizes = options.sizes or ([2, 8] if options.dry_run else [64, 256, 1024])
    options.rounds = options.rounds or (1 if options.dry_run else 25)
    if min(options.blocks) < 1 or max(options.blocks) > min(options.sizes) or options.rounds < 1:
        parser.error("a transfer has at least one block, and a block one MiB")
    return options


if __name__ == "__main__":
    main()
