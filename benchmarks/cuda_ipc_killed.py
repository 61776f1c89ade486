"""Checks whether a GPU gets back the memory of a killed producer whose pool a consumer had mapped, and how soon.

    python -m benchmarks.cuda_ipc_killed [--mib 4096] [--wait 45] [--json FILE] [--dry-run]

A producer and a consumer run as in benchmarks/cuda_ipc.py. One hand-over makes the consumer map the producer's pool.
Then `kill -9` ends the producer. The benchmark reads the device's free memory before the producer starts and after the
hand-over. After the kill it reads until the bytes of the producer's pool are free again (SLACK is the tolerance), since
a restarted worker waits for this. It reads once more after the consumer has closed its connector. The benchmark
fails if the memory did not come back while the consumer was running. `--dry-run` uses a pretended device, whose memory
belongs to its owner until the owner is killed.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks.cuda_ipc import MIB, Connect, Consumer, run_producer
from benchmarks.json_file import save_json
from tests.factories.devices import Device, PretendedDevice, RealDevice

BLOCK_BYTES = MIB
NUM_BLOCKS_HANDED_OVER = 8
SLACK = 0.05
"""Tolerance as a share of the pool's size: free memory may also change for other reasons."""
POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Freed:
    """The result: free bytes of the device at several moments, and the seconds until the memory came back."""

    pool_bytes: int
    free_before: int
    free_during: int
    """After the hand-over, when both pools and the producer's context exist."""
    free_after_kill: int
    """At the end of the wait that follows the kill, while the consumer still runs."""
    back_after_s: float | None
    """None: the memory did not come back while the consumer was running."""
    free_after_close: int


def measure(device: Device, pool_bytes: int, wait_s: float) -> Freed:
    """Hands over a few blocks, kills the producer, and reads the free memory."""
    free = free_bytes(device)
    free_before = free()
    producer = device.start(run_producer)
    consumer = Consumer(device, producer, Connect(pool_bytes // BLOCK_BYTES, BLOCK_BYTES))
    try:
        consumer.hand_over(NUM_BLOCKS_HANDED_OVER)
        free_during = free()
        producer.kill()
        killed_at = time.monotonic()
        wanted = free_during + (1 - SLACK) * pool_bytes
        while (free_after_kill := free()) < wanted and time.monotonic() < killed_at + wait_s:
            time.sleep(POLL_S)
        back_after_s = time.monotonic() - killed_at if free_after_kill >= wanted else None
    finally:
        producer.kill()
        consumer.stop()
        with suppress(OSError):  # only a pretended process still exists
            producer.pipe.send(None)
        producer.end()
    return Freed(pool_bytes, free_before, free_during, free_after_kill, back_after_s, free())


def free_bytes(device: Device) -> Callable[[], int]:
    """A function that reads the free bytes of a device.

    A real device's driver reports them. A pretended device has no size: its used bytes count as negative free
    bytes.
    """
    if isinstance(device, PretendedDevice):
        host = device.host
        return lambda: -sum(len(memory) for at, memory in host.memories.items() if at not in host.gone)
    return lambda: torch.cuda.mem_get_info(0)[0]


def report(freed: Freed) -> str:
    gib = 1024**3
    taken = (freed.free_before - freed.free_during) / gib
    back = (freed.free_after_kill - freed.free_during) / gib
    closed = (freed.free_after_close - freed.free_during) / gib
    after = (
        "not while the consumer ran" if freed.back_after_s is None else f"after {freed.back_after_s:.2f} s"
    )
    return (
        f"a pool of {freed.pool_bytes / gib:.2f} GiB, {taken:.2f} GiB taken in all; by the kill {back:.2f} came back, "
        f"{after}; {closed:.2f} GiB when the consumer had closed"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    device: Device = PretendedDevice() if options.dry_run else RealDevice()
    mib = options.mib or (16 if options.dry_run else 4096)
    freed = measure(device, mib * MIB, options.wait)
    print(report(freed))
    if options.json:
        save_json(options.json, asdict(freed))
    return 0 if freed.back_after_s is not None else 1


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Whether the memory of a killed producer comes back.")
    parser.add_argument("--mib", type=int, help="of the producer's pool; default: 4096")
    parser.add_argument("--wait", type=float, default=45.0, help="seconds for it to come back; default: 45")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    parser.add_argument("--dry-run", action="store_true", help="a pretended device, and 16 MiB")
    return parser


if __name__ == "__main__":
    sys.exit(main())
