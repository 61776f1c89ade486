"""How fast weights reach a device: files in the page cache, through the reader threads, to host or GPU memory.

    python -m benchmarks.weight_loading [--device cuda] [--gib 8] [--readers 1 2 4 8] [--folder DIR] [--json PATH]

Writes files of at most 4 GiB to a temporary folder, in tensors as large as those of an 8B model; reads them whole and
as the slices that one of four ranks takes along the inner dimension: once to warm up, then `--rounds` times for each
number of threads. The best round counts, since a busy machine only ever adds time. `mapped` is what one thread gets by
copying out of a memory map, to the device at once.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from engine.loading.weight_stream import Copies, CudaCopies, FilePart, HostCopies, WeightStream

ROWS, ROW_BYTES = 14336, 4096 * 2
"""A gate or up projection of Llama-3.1-8B in bfloat16."""
TENSOR_BYTES = ROWS * ROW_BYTES
NUM_RANKS = 4


@dataclass(frozen=True, slots=True)
class Row:
    """One way to read; `gb_per_s` counts the bytes that arrive."""

    workload: str
    readers: int
    gb_per_s: float


def main() -> None:
    """Writes, reads, prints a table, and writes JSON if asked to."""
    arguments = _arguments()
    device = torch.device(arguments.device)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        parts = _write(Path(folder), int(arguments.gib * 2**30))
        shards = [_shard(part) for part in parts]
        rows = [_measure("mapped", 1, parts, arguments.rounds, partial(_read_mapped, parts, device))]
        rows += [
            _measure(name, readers, wanted, arguments.rounds, partial(_stream, wanted, device, readers))
            for name, wanted in (("whole tensors", parts), ("inner slices", shards))
            for readers in arguments.readers
        ]
    for row in rows:
        print(f"{row.workload:16}{row.readers:>3} threads{row.gb_per_s:>8.1f} GB/s")
    if arguments.json is not None:
        result = {"device": arguments.device, "gib": arguments.gib, "rows": [asdict(row) for row in rows]}
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


def _write(folder: Path, num_bytes: int) -> list[FilePart]:
    """Files of random bytes, and the tensors in them."""
    noise = np.random.default_rng(0).integers(0, 256, TENSOR_BYTES, dtype=np.uint8).tobytes()
    parts = []
    per_file = max(1, 4 * 2**30 // TENSOR_BYTES)
    for index in range(max(1, num_bytes // TENSOR_BYTES)):
        file = folder / f"{index // per_file}"
        with file.open("ab") as stream:
            stream.write(noise)
        parts.append(FilePart(file, index % per_file * TENSOR_BYTES, TENSOR_BYTES))
    return parts


def _shard(part: FilePart) -> FilePart:
    """The second of four slices of every row."""
    run_bytes = ROW_BYTES // NUM_RANKS
    return FilePart(part.file, part.offset + run_bytes, run_bytes, ROWS, ROW_BYTES)


def _measure(
    workload: str, readers: int, parts: list[FilePart], rounds: int, read: Callable[[], None]
) -> Row:
    num_bytes = sum(part.num_bytes for part in parts)
    seconds = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        read()
        seconds.append(time.perf_counter() - start)
    return Row(workload, readers, num_bytes / min(seconds[1:]) / 1e9)


def _stream(parts: list[FilePart], device: torch.device, readers: int) -> None:
    copies: Copies = CudaCopies(device) if device.type == "cuda" else HostCopies()
    stream = WeightStream(parts, copies, num_readers=readers)
    for _ in parts:
        stream.take()
    stream.close()
    _wait(device)


def _read_mapped(parts: list[FilePart], device: torch.device) -> None:
    for part in parts:
        mapped = torch.from_file(
            str(part.file), shared=False, size=part.offset + part.num_bytes, dtype=torch.uint8
        )
        mapped[part.offset :].to(device, copy=True)
    _wait(device)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    parser.add_argument("--gib", type=float, default=8.0, help="what is written and read")
    parser.add_argument("--readers", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--folder", type=Path, help="where to write; the system's temporary folder if not given"
    )
    parser.add_argument("--json", type=Path, help="write the result here")
    return parser.parse_args()


if __name__ == "__main__":
    main()
