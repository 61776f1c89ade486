"""`make gpu-check --dry-run`: every line that a GPU will run, without one; and what the check does with its rows."""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu_check
from benchmarks.gpu.overlap import merged, shared, spans
from benchmarks.gpu.report import Row, save, table
from benchmarks.gpu.setting import Emit, Setting
from benchmarks.gpu_check import PARTS

ROOT = Path(__file__).parents[2]


HALVES = (("kernels", "sweep"), ("decode", "prefill"))
COSTLY = (("tokens", "overlap"), ("peer", "handover"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "halves", [HALVES, pytest.param(COSTLY, marks=pytest.mark.by_hand)], ids=["", "costly"]
)
def test_a_dry_run_goes_through_every_part(tmp_path: Path, halves: tuple[tuple[str, ...], ...]) -> None:
    """In two processes, since most of it computes on one core."""
    results = ROOT / "benchmarks" / "results"
    before = {path: path.stat().st_mtime_ns for path in results.iterdir()}
    runs = [_start("--dry-run", "--parts", ",".join(half), "--out", str(tmp_path / "out")) for half in halves]
    outputs = [run.communicate(timeout=400)[0] for run in runs]
    for half, run, output in zip(halves, runs, outputs, strict=True):
        assert run.returncode == 0, output
        last_table = output.rsplit("\n\n", 2)[1]
        assert {line.split()[0] for line in last_table.splitlines()} == set(half), output
        for word in ("FAIL", "out of time", "not installed"):
            assert word not in last_table, output
    assert {path: path.stat().st_mtime_ns for path in results.iterdir()} == before
    assert not (tmp_path / "out").exists(), "a dry run keeps nothing"


def test_no_part_is_left_out() -> None:
    assert {part for half in HALVES + COSTLY for part in half} == set(PARTS)


def _start(*arguments: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "benchmarks.gpu_check", *arguments]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_a_part_that_was_not_there_is_refused() -> None:
    run = _start("--parts", "kernel")
    output, _ = run.communicate(timeout=120)
    assert run.returncode == 2
    assert "no such part: kernel" in output


def test_parts_of_another_run_stay_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "results" / "gpu.json"
    save(path, {"torch": "1"}, [Row("decode", "a", "1"), Row("tokens", "b", "2")])
    save(path, {"torch": "2"}, [Row("decode", "c", "3", figures={"x": 4.0})])
    parts = json.loads(path.read_text())["parts"]
    assert parts["tokens"]["environment"] == {"torch": "1"}
    assert parts["decode"]["environment"] == {"torch": "2"}
    assert [row["name"] for row in parts["decode"]["rows"]] == ["c"]
    assert parts["decode"]["rows"][0]["figures"] == {"x": 4.0}


def test_the_table_is_aligned_and_marks_what_failed() -> None:
    text = table(
        [Row("a", "short", "1", "note"), Row("kernels", "a longer name", "22", "wrong", is_failed=True)]
    )
    first, second = text.splitlines()
    assert first.index("note") == second.index("wrong")
    assert second.startswith("FAIL")
    assert not first.startswith("FAIL")


def test_copies_count_as_hidden_while_kernels_run() -> None:
    """Two kernels that overlap, from 0 to 30 us; copies at 10 to 15, 25 to 45, and one that a host began."""
    events: list[dict[str, Any]] = [
        {"cat": "kernel", "name": "a", "ts": 0, "dur": 20},
        {"cat": "kernel", "name": "b", "ts": 10, "dur": 20},
        {"cat": "gpu_memcpy", "name": "Memcpy DtoD (Device -> Device)", "ts": 10, "dur": 5},
        {"cat": "gpu_memcpy", "name": "Memcpy DtoD (Device -> Device)", "ts": 25, "dur": 20},
        {"cat": "gpu_memcpy", "name": "Memcpy HtoD (Pinned -> Device)", "ts": 0, "dur": 30},
        {"cat": "cpu_op", "name": "c", "ts": 0, "dur": 100},
        {"name": "metadata"},
    ]
    kernels, moves = spans(events)
    assert merged(kernels) == [(0.0, 30.0)]
    assert shared(merged(kernels), merged(moves)) == 5.0 + 5.0


class FakePart:
    """A part that has one row, and then does what a test wants."""

    def __init__(self, then: Callable[[], None]) -> None:
        self._then = then

    def run(self, setting: Setting, emit: Emit) -> None:
        emit(Row("fake", "before", "1"))
        self._then()
        emit(Row("fake", "after", "2"))


def _needs_a_package() -> None:
    raise ModuleNotFoundError("No module named 'absent'", name="absent")


@pytest.mark.parametrize(
    ("then", "name", "value", "is_failed"),
    [
        (lambda: None, "after", "2", False),
        (lambda: 1 // 0, "the rest of it", "failed", True),
        (lambda: os._exit(9), "the process", "ended with 9", True),
        (lambda: time.sleep(60), "the rest of it", "out of time", False),
        (_needs_a_package, "all of it", "skipped", False),
    ],
    ids=["to its end", "it raises", "its process dies", "it takes too long", "a package is missing"],
)
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_rows_of_a_part_are_there_however_it_ends(
    then: Callable[[], None],
    name: str,
    value: str,
    is_failed: bool,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """The process is a fork of this one, and so finds the fake."""
    monkeypatch.setattr("benchmarks.gpu_check.importlib.import_module", lambda _: FakePart(then))
    arguments = argparse.Namespace(dry_run=True, out=None)
    first, last = gpu_check.run_part("fake", arguments, tmp_path, time.monotonic() + 3.0)
    assert first.name == "before"
    assert (last.name, last.value, last.is_failed) == (name, value, is_failed)
