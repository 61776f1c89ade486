"""How fast KV moves: whole hand-overs between two processes, beside memcpy and a raw TCP socket pair in the same run.

    python -m benchmarks.kv_transfer [--transports NAME ...] [--blocks KIB ...] [--sizes MIB ...] [--json FILE]

Both processes run the real connector: its thread, its protocol, its transport. The producer's blocks are all computed.
The clock runs in the consumer, from its order to load until it hears that everything has arrived, so asking, agreeing
on a transport, every acknowledgement and the end are in it. Beside it, alternating, the same blocks to the same places:

    memcpy      a copy of the producer's pool through one mapping, block by block, all pages touched before
    socket      sendmsg straight from the producer's pool over TCP, recv_into straight into the consumer's

A row's ratio is the median over the rounds of the ratio to what it is to be held against: memcpy where memory is read,
the socket where bytes are sent. `nixl` is there if it is installed.
"""

import argparse
import json
import os
import platform
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.kv_transfer_ends import Consumer, Setup, Transport, start_producer
from kv_transfer.transport.nixl_agent import nixl_is_available

MIB = 2**20
TRANSPORTS: tuple[Transport, ...] = ("shared_memory", "zmq_tcp", "zmq_tcp+checksum", "zmq_tcp+curve", "nixl")
SENT = ("zmq_tcp", "zmq_tcp+checksum", "zmq_tcp+curve")


@dataclass(frozen=True, slots=True)
class Row:
    """Medians for one transport, block size and transfer size."""

    transport: Transport
    block_kib: int
    transfer_mib: int
    hand_over_ms: float
    gb_per_s: float
    memcpy_gb_per_s: float
    socket_gb_per_s: float
    ratio: float
    """To memcpy or to the socket; see above."""


def measure(setup: Setup, sizes: Sequence[int], num_rounds: int) -> list[Row]:
    """Alternates the three, round by round; the first round only warms up."""
    rows = []
    with ExitStack() as stack:
        producer = stack.enter_context(start_producer(setup))
        consumer = stack.enter_context(Consumer(setup, producer))
        for transfer_mib in sizes:
            num_blocks = max(1, transfer_mib * MIB // setup.block_nbytes)
            nbytes = num_blocks * setup.block_nbytes
            sides: dict[str, Callable[[int], float]] = {
                "hand_over": consumer.hand_over,
                "memcpy": consumer.memcpy,
                "socket": consumer.receive_raw,
            }
            seconds: dict[str, list[float]] = {name: [] for name in sides}
            for number in range(num_rounds + 1):
                for name in sides if number % 2 else reversed(sides):
                    elapsed = sides[name](num_blocks)
                    if number > 0:
                        seconds[name].append(elapsed)
            held_against = seconds["socket" if setup.transport in SENT else "memcpy"]
            pairs = zip(held_against, seconds["hand_over"], strict=True)
            gb_per_s = {name: nbytes / median(times) / 1e9 for name, times in seconds.items()}
            rows.append(
                Row(
                    transport=setup.transport,
                    block_kib=setup.block_nbytes // 1024,
                    transfer_mib=nbytes // MIB,
                    hand_over_ms=median(seconds["hand_over"]) * 1e3,
                    gb_per_s=gb_per_s["hand_over"],
                    memcpy_gb_per_s=gb_per_s["memcpy"],
                    socket_gb_per_s=gb_per_s["socket"],
                    ratio=median(theirs / ours for theirs, ours in pairs),
                )
            )
    return rows


def checksum_gb_per_s(block_nbytes: int) -> float:
    """What comparing a block's checksum costs, on one core, over memory that is in no cache."""
    import xxhash

    pool = np.ones((max(2, 256 * MIB // block_nbytes), block_nbytes), np.uint8)
    began = time.perf_counter()
    for block in pool:
        xxhash.xxh3_64_intdigest(block.data)
    return pool.nbytes / (time.perf_counter() - began) / 1e9


def show(rows: Sequence[Row], console: Console) -> None:
    table = Table(title="KV transfer between two processes of one host, medians", title_justify="left")
    for name in ("transport", "block", "transfer", "hand-over", "GB/s", "memcpy", "socket", "ratio"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            row.transport,
            f"{row.block_kib} KiB",
            f"{row.transfer_mib} MiB",
            f"{row.hand_over_ms:.2f} ms",
            f"{row.gb_per_s:.2f}",
            f"{row.memcpy_gb_per_s:.2f}",
            f"{row.socket_gb_per_s:.2f}",
            f"{row.ratio:.2f} of {'socket' if row.transport in SENT else 'memcpy'}",
        )
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description="How fast KV moves.")
    parser.add_argument("--transports", nargs="+", choices=TRANSPORTS, default=None)
    parser.add_argument("--blocks", type=int, nargs="+", default=[64, 256, 1024, 4096], help="KiB")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 16, 128, 1024], help="MiB")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write the figures here too")
    options = parser.parse_args()
    transports = options.transports or [name for name in TRANSPORTS if name != "nixl" or nixl_is_available()]
    rows: list[Row] = []
    for transport in transports:
        for block_kib in options.blocks:
            setup = Setup(transport, block_kib * 1024, max(options.sizes) * MIB)
            rows += measure(setup, options.sizes, options.rounds)
    show(rows, Console(width=120))
    checksums = {block_kib: checksum_gb_per_s(block_kib * 1024) for block_kib in options.blocks}
    print("xxh3, GB/s by block size in KiB:", {size: round(rate, 1) for size, rate in checksums.items()})
    if options.json:
        machine = f"{os.cpu_count()} cores, {platform.machine()}"
        figures = {"machine": machine, "rounds": options.rounds, "xxh3_gb_per_s": checksums}
        options.json.write_text(
            json.dumps({**figures, "results": [asdict(r) for r in rows]}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
