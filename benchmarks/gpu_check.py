"""Runs everything that needs a GPU, in one command: tests, tokens, and speed compared with other implementations.

    python -m benchmarks.gpu_check [--parts NAME,...] [--strict] [--minutes 60] [--json FILE] [--out FOLDER]
    python -m benchmarks.gpu_check --dry-run [--strict]

Each part runs in its own process, so that a fault on the device ends only that part. Each part also has its
own time limit. Rows are printed and saved as soon as they exist, so that a time limit loses only the
remaining rows. If the environment variable OUT names a folder, figures and logs go there. With `--strict`,
tests that were left out because a package or time was missing count as failed. `--dry-run` needs no GPU. It
runs the same commands on tiny shapes, with kernels in Triton's interpreter. It proves that the commands work,
and keeps no figures.

    smoke      each kernel compared with its reference, one graph, one sampled step; finds a broken machine in a
               minute
    kernels    the tests of the kernels (--shapes few, many)
    attention  the attention kernel's tests three times: an error that appears in some runs only is a race
    marked     the other tests marked gpu
    tokens     the GPU engine's tokens compared with the CPU engine's
    handover   P and D as two processes on one device; blocks over cuda_ipc and by a plain copy; a killed
               producer
    served     `baton serve` on a Ray cluster with a real model; killed workers
    throughput many requests through gateway and workers, compared with the engine alone
    decode     steps compared with the bytes they must move, and the time in which the device does not compute; a
               trace
    overlap    decode steps while a hand-over's blocks arrive; a trace
    prefill    prompts compared with the matrix units' speed; sizes of chunks
    peer       transformers' continuous batching and compiled generation, with the same weights
    sweep      launch parameters compared with those chosen (only if requested, or in a dry run; --cases)
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
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from benchmarks.gpu.limits import PART_LIMITS_S
from benchmarks.gpu.report import Row, line, save, table
from benchmarks.gpu.setting import Setting, describe
from benchmarks.gpu.shapes import LARGE
from engine.kernels.switches import SWITCHES_VARIABLE, KernelSwitches, set_kernel_switches

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PARTS = tuple(PART_LIMITS_S)
DEFAULT_PARTS = PARTS[:-1]
PATIENCE_S = 30.0
"""How long a process that has finished its work may take to end."""
DRY_FACTOR = 5
"""Factor for the time limits of dry runs: a machine without a GPU may be small, and busy with other tests."""
PROCESSES = multiprocessing.get_context("fork")
"""Forked processes do not import everything again. Nothing uses the device before the fork."""


def main() -> int:
    arguments = _arguments()
    if arguments.dry_run:
        os.environ["TRITON_INTERPRET"] = "1"  # kernels read it when they are declared
    let_processes_import_baton()
    environment, *_ = run_part("environment", arguments, Path(), time.monotonic() + 120)
    if environment.is_failed:
        print(f"gpu-check: skipped, {environment.note}")
        return 1 if arguments.strict else 0
    print(f"gpu-check: {environment.value}", flush=True)
    end = time.monotonic() + 60 * arguments.minutes
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for part in arguments.parts or (PARTS if arguments.dry_run else DEFAULT_PARTS):
            for row in run_part(part, arguments, Path(folder), end):
                rows.append(judged(row, arguments.strict))
                print(line(rows[-1]), flush=True)
                if not arguments.dry_run:
                    save(json_path(arguments, environment), environment.figures, rows)
    print(f"\n{table(rows)}")
    num_failed = sum(row.is_failed for row in rows)
    num_skipped = sum(row.is_skipped for row in rows)
    print(f"\ngpu-check: {len(rows)} rows, {num_failed} failed, {num_skipped} skipped")
    return 1 if num_failed else 0


def let_processes_import_baton() -> None:
    """Adds Baton's folder to the PYTHONPATH of child processes. Workers import nothing from the current folder
    (`module_command`), and Baton need not be installed on a GPU machine."""
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)


def judged(row: Row, is_strict: bool) -> Row:
    """Returns the row as strict mode judges it: in strict mode, a test that was left out counts as failed."""
    return replace(row, is_failed=True) if is_strict and row.is_skipped else row


def run_part(part: str, arguments: argparse.Namespace, folder: Path, end: float) -> Iterator[Row]:
    """Runs a part in its own process until its limit or `end`.

    Yields the part's rows, and one more row if the part did not end normally.
    """
    limit_s = PART_LIMITS_S.get(part, PATIENCE_S) * (DRY_FACTOR if arguments.dry_run else 1)
    end = min(end, time.monotonic() + limit_s)
    reader, writer = PROCESSES.Pipe(duplex=False)
    process = PROCESSES.Process(target=_work, args=(part, arguments, folder, end, writer))
    process.start()
    writer.close()
    try:
        while reader.poll(max(0.0, end - time.monotonic())):
            yield reader.recv()
        yield Row(part, "the rest of it", "out of time", "run this part alone: --parts", is_skipped=True)
        process.terminate()
    except EOFError:  # the process closed its end of the pipe
        process.join(PATIENCE_S)
        if process.exitcode != 0:
            yield Row(part, "the process", f"ended with {process.exitcode}", is_failed=True)
    process.join(PATIENCE_S)
    process.kill()  # no effect if it has ended
    process.join()


def _work(
    part: str, arguments: argparse.Namespace, folder: Path, end: float, writer: "Connection[Row, None]"
) -> None:
    if part == "environment":
        writer.send(_environment(arguments))
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the processes that it started end with it
    if arguments.dry_run:
        torch.set_num_threads(1)  # there is almost nothing to compute
    try:
        set_kernel_switches(KernelSwitches.parse(os.environ.get(SWITCHES_VARIABLE, "")))
        module = importlib.import_module(f"benchmarks.gpu.{part}")
        module.run(_setting(arguments, folder, end), writer.send)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] in OURS:
            raise
        note = f"needs {error.name}, which is not installed"
        writer.send(Row(part, "all of it", "skipped", note, is_skipped=True))
    except Exception as error:  # a part's outermost function: other parts continue
        traceback.print_exc()
        writer.send(
            Row(part, "the rest of it", "failed", f"{type(error).__name__}: {error}"[:300], is_failed=True)
        )


OURS = {
    "baton",
    "benchmarks",
    "cli",
    "cluster",
    "decode_worker",
    "engine",
    "gateway",
    "kv_transfer",
    "prefill_worker",
    "scheduler",
    "tests",
    "worker",
}


def _setting(arguments: argparse.Namespace, folder: Path, end: float) -> Setting:
    return Setting(
        is_dry=arguments.dry_run,
        folder=folder,
        out=None if arguments.dry_run else arguments.out,
        ends_at=end,
        shapes=arguments.shapes or ("few" if arguments.dry_run else "many"),
        cases=arguments.cases,
        models=tuple(arguments.models),
        quantization=arguments.quantization,
    )


def _environment(arguments: argparse.Namespace) -> Row:
    if not arguments.dry_run and not torch.cuda.is_available():
        note = f"torch {torch.__version__} sees no CUDA device"
        return Row("environment", "device", "none", note, is_failed=True)
    figures = describe(arguments.dry_run)
    text = ", ".join(f"{name} {value}" for name, value in figures.items())
    return Row("environment", "device", "dry run, " + text if arguments.dry_run else text, figures=figures)


def json_path(arguments: argparse.Namespace, environment: Row) -> Path:
    if arguments.json is not None:
        return Path(arguments.json)
    name = str(environment.figures["device"]).lower().replace(" ", "-")
    return (arguments.out or RESULTS) / f"gpu-{name}.json"


def parse(given: Sequence[str] | None = None, out: str | None = None) -> argparse.Namespace:
    """Parses the flags. `out` is the folder for figures and logs if the command line names none."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", type=_names, help=f"of {','.join(PARTS)}")
    parser.add_argument("--dry-run", action="store_true", help="without a GPU: tiny shapes, nothing is kept")
    parser.add_argument("--strict", action="store_true", help="what is skipped, or out of time, has failed")
    parser.add_argument("--minutes", type=float, default=60.0, help="no part goes on after this long")
    parser.add_argument(
        "--json", type=Path, help="for the figures; default: in --out, else benchmarks/results"
    )
    parser.add_argument(
        "--out", type=Path, default=out and Path(out), help="a folder for traces and logs; default: $OUT"
    )
    parser.add_argument(
        "--shapes", choices=("few", "many"), help="of kernels; default: many, and few in a dry run"
    )
    parser.add_argument("--cases", default="", help="of the sweep: those with this in their names")
    parser.add_argument("--models", type=_names, default=[], help=f"of {','.join(LARGE)}; default: all")
    parser.add_argument(
        "--quantization", choices=("auto", "fp8"), default="auto", help="of the models of decode and prefill"
    )
    arguments = parser.parse_args(given)
    for option, known in (("parts", PARTS), ("models", tuple(LARGE))):
        unknown = set(getattr(arguments, option) or ()) - set(known)
        if unknown:
            parser.error(
                f"--{option}: no such {option.removesuffix('s')}: {', '.join(sorted(unknown))}; "
                f"there are {', '.join(known)}"
            )
    if arguments.dry_run and (arguments.models or arguments.shapes == "many"):
        parser.error("--models and --shapes many are for a GPU; a dry run has one tiny model and few shapes")
    default_parts = PARTS if arguments.dry_run else DEFAULT_PARTS
    if arguments.cases and "sweep" not in (arguments.parts or default_parts):
        parser.error("--cases chooses among those of the sweep: add sweep to --parts")
    return arguments


def _names(text: str) -> list[str]:
    return text.split(",")


def _arguments() -> argparse.Namespace:
    return parse(out=os.environ.get("OUT"))


if __name__ == "__main__":
    sys.exit(main())
