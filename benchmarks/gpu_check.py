"""Everything that needs a GPU, in one command: tests, tokens, speed beside the hardware's own and beside transformers.

    python -m benchmarks.gpu_check [--parts NAME ...] [--minutes 60] [--json FILE] [--out FOLDER]
    python -m benchmarks.gpu_check --dry-run

Each part runs in a process of its own, so that a fault on the device ends that part only. Rows are printed as soon as
they are there, and saved after each part, so that a time limit loses only the rest. `--dry-run` needs no GPU: the same
commands on tiny shapes, with kernels in Triton's interpreter. It proves that they run; nothing is kept of its figures.

    kernels    kernels beside their references, over many shapes; tests marked gpu
    tokens     the GPU engine's tokens beside the CPU engine's
    handover   P and D as two processes on one device; blocks over cuda_ipc beside a plain copy
    decode     steps beside the bytes they must move, and what the device does not compute of them
    overlap    decode steps while a hand-over's blocks arrive; a trace
    prefill    prompts beside the matrix units' speed; sizes of chunks
    peer       transformers' continuous batching and compiled generation, with the same weights
    sweep      launch parameters beside those chosen (only if asked for)
"""

import argparse
import importlib
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from benchmarks.gpu.report import Row, line, save, table
from benchmarks.gpu.setting import Setting, describe

RESULTS = Path(__file__).parent / "results"
PARTS = ("kernels", "tokens", "handover", "decode", "overlap", "prefill", "peer", "sweep")
DEFAULT_PARTS = PARTS[:-1]
PATIENCE_S = 30.0
"""For a process that has nothing left to do."""
PROCESSES = multiprocessing.get_context("fork")
"""What was imported need not be imported again; nothing touches the device before."""


def main() -> int:
    arguments = _arguments()
    if arguments.dry_run:
        os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is declared, so before any is imported
    environment, *_ = run_part("environment", arguments, Path(), time.monotonic() + 120)
    if environment.is_failed:
        print(f"gpu-check: skipped, {environment.note}")
        return 0
    print(f"gpu-check: {environment.value}", flush=True)
    end = time.monotonic() + 60 * arguments.minutes
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for part in arguments.parts or (PARTS if arguments.dry_run else DEFAULT_PARTS):
            for row in run_part(part, arguments, Path(folder), end):
                rows.append(row)
                print(line(row), flush=True)
                if not arguments.dry_run:
                    save(_json_path(arguments, environment), environment.figures, rows)
    print(f"\n{table(rows)}")
    num_failed = sum(row.is_failed for row in rows)
    print(f"\ngpu-check: {len(rows)} rows, {num_failed} failed")
    return 1 if num_failed else 0


def run_part(part: str, arguments: argparse.Namespace, folder: Path, end: float) -> Iterator[Row]:
    """Runs a part in a process of its own until `end`; its rows, and one more if it did not end well."""
    reader, writer = PROCESSES.Pipe(duplex=False)
    process = PROCESSES.Process(target=_work, args=(part, arguments, folder, writer))
    process.start()
    writer.close()
    try:
        while reader.poll(max(0.0, end - time.monotonic())):
            yield reader.recv()
        yield Row(part, "the rest of it", "out of time", "run this part alone: --parts")
        process.terminate()
    except EOFError:  # it closed its end
        process.join(PATIENCE_S)
        if process.exitcode != 0:
            yield Row(part, "the process", f"ended with {process.exitcode}", is_failed=True)
    process.join(PATIENCE_S)
    process.kill()  # nothing, if it has ended
    process.join()


def _work(part: str, arguments: argparse.Namespace, folder: Path, writer: "Connection[Row, None]") -> None:
    if part == "environment":
        writer.send(_environment(arguments))
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that what it started ends with it
    out = None if arguments.dry_run else arguments.out
    if arguments.dry_run:
        torch.set_num_threads(1)  # there is next to nothing to compute
    try:
        module = importlib.import_module(f"benchmarks.gpu.{part}")
        module.run(Setting(arguments.dry_run, folder, out), writer.send)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] in OURS:
            raise
        writer.send(Row(part, "all of it", "skipped", f"needs {error.name}, which is not installed"))
    except Exception as error:  # the edge of a part: the others go on
        traceback.print_exc()
        writer.send(
            Row(part, "the rest of it", "failed", f"{type(error).__name__}: {error}"[:300], is_failed=True)
        )


OURS = {"baton", "benchmarks", "cluster", "engine", "gateway", "kv_transfer", "scheduler", "tests"}


def _environment(arguments: argparse.Namespace) -> Row:
    if not arguments.dry_run and not torch.cuda.is_available():
        note = f"torch {torch.__version__} sees no CUDA device"
        return Row("environment", "device", "none", note, is_failed=True)
    figures = describe(arguments.dry_run)
    text = ", ".join(f"{name} {value}" for name, value in figures.items())
    return Row("environment", "device", "dry run, " + text if arguments.dry_run else text, figures=figures)


def _json_path(arguments: argparse.Namespace, environment: Row) -> Path:
    if arguments.json is not None:
        return Path(arguments.json)
    name = str(environment.figures["device"]).lower().replace(" ", "-")
    return RESULTS / f"gpu-{name}.json"


def _arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", type=lambda text: text.split(","), help=f"of {','.join(PARTS)}")
    parser.add_argument("--dry-run", action="store_true", help="without a GPU: tiny shapes, nothing is kept")
    parser.add_argument("--minutes", type=float, default=60.0, help="no part goes on after this long")
    parser.add_argument("--json", type=Path, help="where the figures go instead of benchmarks/results")
    parser.add_argument("--out", type=Path, help="a folder for traces and logs of tests")
    arguments = parser.parse_args(given)
    unknown = set(arguments.parts or ()) - set(PARTS)
    if unknown:
        parser.error(f"--parts: no such part: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
