"""A pytest run as rows. Its log is written at once, and its results count even if the run is ended early."""

import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu.report import Row
from benchmarks.gpu.setting import Setting

ROOT = Path(__file__).parents[2]
THREADS = "2"
"""PyTorch threads per process: references on the CPU are small, and several processes share the cores."""
SPARE_S = 15.0
"""Time at the end of a part that is reserved for ending pytest and reading its results."""
PROGRESS_S = 15.0
ENDS = (0, 1)
"""Exit codes of pytest after a complete run: all tests passed, or some failed (these are counted)."""
NUM_SHOWN = 12
"""How many failures get their own row."""
EXCUSES = re.compile(r"needs (two|\d+) GPUs|compute capability|on a GPU here|interpret their kernels")
"""Reasons for which a test may be skipped on a GPU. A test that is skipped for another reason counts as left out."""
DRY_EXCUSES = re.compile(r"interpreter|needs a GPU|no CUDA device")


@dataclass(frozen=True, slots=True)
class Outcome:
    """One test's result, as pytest_rows.py wrote it."""

    test: str
    outcome: str
    message: str


def run_pytest(setting: Setting, part: str, title: str, arguments: Sequence[str]) -> Iterator[Row]:
    """Yields a summary, then a row for each file that pytest could not read, for each reason of skips, and for each of
    the first failures. If time ran out, a row before the summary says so."""
    name = re.sub(r"\W+", "-", title).strip("-")
    log, rows_file = setting.folder_for_files() / f"pytest-{name}.log", setting.folder / f"{name}.jsonl"
    rows_file.unlink(missing_ok=True)
    begun_at = time.monotonic()
    code = _pytest(setting, [f"--rows={rows_file}", *arguments], log, rows_file)
    tests = read_rows(rows_file)
    counts = Counter(row.outcome for row in tests)
    if code is None:
        note = f"ended after {time.monotonic() - begun_at:.0f} s; {log.name} has the rest"
        yield Row(part, title, "out of time", note, is_skipped=True)
    notes = [] if code in (0, None) else [f"pytest ended with {code}: {_last_line(log)}"]
    yield Row(
        part,
        title,
        f"{counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped",
        "; ".join(notes),
        is_failed=bool(counts["failed"]) or code not in (*ENDS, None) or not counts["passed"],
        figures=dict(counts),
    )
    excuses = DRY_EXCUSES if setting.is_dry else EXCUSES
    for row in tests:
        if row.outcome == "uncollected":
            is_skipped = not excuses.search(row.message)
            yield Row(part, row.test, "not collected", row.message, is_skipped=is_skipped)
    reasons = Counter(row.message for row in tests if row.outcome == "skipped")
    for reason, number in reasons.most_common():
        yield Row(
            part, f"{title}: skipped", f"{number} left out", reason, is_skipped=not excuses.search(reason)
        )
    for row in [row for row in tests if row.outcome == "failed"][:NUM_SHOWN]:
        yield Row(part, row.test.rpartition("::")[2], "failed", row.message, is_failed=True)


def read_rows(path: Path) -> list[Outcome]:
    """The results so far. An incomplete last line is ignored."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [Outcome(**json.loads(line)) for line in lines if line.endswith("\n")]


def _pytest(setting: Setting, arguments: Sequence[str], log: Path, rows_file: Path) -> int | None:
    """Runs pytest, and returns its exit code. None: pytest was ended because the part's time was nearly over."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-v",
        "-p",
        "no:cacheprovider",
        "-p",
        "benchmarks.gpu.pytest_rows",
    ]
    # Versions other than the pinned ones may print warnings. Here these are not failures.
    command += ["-W", "default", "--continue-on-collection-errors", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": THREADS, "PYTHONUNBUFFERED": "1"}
    deadline = time.monotonic() + max(0.0, setting.remaining_s - SPARE_S)
    with log.open("w") as file:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT)
        try:
            while (remaining_s := deadline - time.monotonic()) > 0:
                try:
                    return process.wait(min(remaining_s, PROGRESS_S))
                except subprocess.TimeoutExpired:
                    counts = Counter(row.outcome for row in read_rows(rows_file))
                    print("  " + ", ".join(f"{number} {name}" for name, number in counts.items()), flush=True)
            return None
        finally:
            process.terminate()  # no effect if it has ended; its workers end with it
            try:
                process.wait(SPARE_S / 2)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _last_line(log: Path) -> str:
    return next(iter(log.read_text().strip().splitlines()[-1:]), "")
