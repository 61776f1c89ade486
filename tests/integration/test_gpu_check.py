"""`make gpu-check --dry-run`: every line that a GPU will run, without one; and what the check does with its rows."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from baton.system.module_command import module_command
from benchmarks import gpu_check
from benchmarks.gpu.limits import PART_LIMITS_S
from benchmarks.gpu.report import Row, save, table
from benchmarks.gpu.setting import Emit, Setting
from benchmarks.gpu.trace import merged, shared, spans
from benchmarks.gpu_check import PARTS, let_processes_import_baton
from kv_transfer.cuda.copy_kernel import NAME as COPY_KERNEL

ROOT = Path(__file__).parents[2]


HALVES = (
    ("handover", "kernels", "marked", "attention", "decode", "sweep"),
    ("tokens", "peer", "overlap", "prefill", "smoke", "served", "throughput"),
)


@pytest.mark.slow
@pytest.mark.by_hand  # minutes on two cores; `make gpu-dry-run` does the same, and its parts have tests
def test_a_dry_run_goes_through_every_part_with_the_packages_of_a_gpu_machine(tmp_path: Path) -> None:
    """The parts run in two processes, since most of them compute on one core."""
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([sys.executable, "scripts/gpu_venv.py", str(tmp_path / "venv")], cwd=ROOT, check=True)
    results = ROOT / "benchmarks" / "results"
    before = {path: path.stat().st_mtime_ns for path in results.iterdir()}
    options = ("--dry-run", "--strict", "--out", str(tmp_path / "out"))
    runs = [_start(*options, "--parts", ",".join(half), python=str(python)) for half in HALVES]
    outputs = [run.communicate(timeout=600)[0] for run in runs]
    for half, run, output in zip(HALVES, runs, outputs, strict=True):
        assert run.returncode == 0, output
        last_table = output.rsplit("\n\n", 2)[1]
        assert {line.split()[0] for line in last_table.splitlines()} == set(half), output
        for word in ("FAIL", "SKIP", "out of time", "not installed"):
            assert word not in last_table, output
    assert {path: path.stat().st_mtime_ns for path in results.iterdir()} == before
    assert not (tmp_path / "out").exists(), "a dry run keeps nothing"


def test_what_a_gpu_machine_lacks_is_not_there_in_a_dry_run(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "scripts/gpu_venv.py", str(tmp_path)], cwd=ROOT, check=True)
    program = "import importlib.util as u, sys; print([n for n in sys.argv[1:] if u.find_spec(n)])"
    names = ["torch", "triton", "zmq", "pydantic", "ray", "gguf", "opentelemetry.sdk", "openai", "grpc_tools"]
    found = subprocess.run(
        [str(tmp_path / "bin" / "python"), "-c", program, *names],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.strip() == "['torch', 'triton', 'zmq', 'pydantic', 'ray']"


def test_workers_of_a_machine_without_a_baton_package_import_this_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its parts that start processes failed there, since workers import nothing from the current folder."""
    subprocess.run([sys.executable, "scripts/gpu_venv.py", str(tmp_path)], cwd=ROOT, check=True)
    monkeypatch.setenv("PYTHONPATH", "")  # monkeypatch restores only variables that it has set
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    command = module_command("baton.version")
    assert subprocess.run(command, cwd=ROOT, capture_output=True, check=False).returncode == 1
    let_processes_import_baton()
    assert subprocess.run(command, cwd=tmp_path, check=False).returncode == 0


def test_no_part_is_left_out() -> None:
    parts = [part for half in HALVES for part in half]
    assert sorted(parts) == sorted(PARTS)
    assert all((ROOT / "benchmarks" / "gpu" / f"{part}.py").exists() for part in parts)


def test_every_part_fits_a_command_of_ten_minutes() -> None:
    assert all(0 < limit_s <= 570 for limit_s in PART_LIMITS_S.values())


def _start(*arguments: str, python: str = sys.executable) -> "subprocess.Popen[str]":
    command = ["scripts/gpu_check.sh", python, *arguments]
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "OUT")}
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--parts", "kernel"], "no such part: kernel; there are smoke, kernels"),
        (["--models", "Llama"], "no such model: Llama; there are Llama-3.1-8B, Qwen3-8B"),
        (["--dry-run", "--models", "Qwen3-8B"], "--models and --shapes many are for a GPU"),
        (["--dry-run", "--shapes", "many"], "--models and --shapes many are for a GPU"),
        (["--cases", "linear"], "add sweep to --parts"),
    ],
)
def test_what_would_do_nothing_is_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        gpu_check.parse(arguments)
    assert message in capsys.readouterr().err


def test_figures_and_logs_go_where_the_environment_says(tmp_path: Path) -> None:
    environment = Row("environment", "device", "", figures={"device": "NVIDIA H200"})
    assert gpu_check.parse([], out=str(tmp_path)).out == tmp_path
    assert gpu_check.parse(["--out", "here"], out=str(tmp_path)).out == Path("here")
    for arguments, path in [
        (gpu_check.parse([], out=str(tmp_path)), tmp_path / "gpu-nvidia-h200.json"),
        (gpu_check.parse([]), ROOT / "benchmarks" / "results" / "gpu-nvidia-h200.json"),
        (gpu_check.parse(["--json", "x.json"], out=str(tmp_path)), Path("x.json")),
    ]:
        assert gpu_check.json_path(arguments, environment) == path


def test_without_a_gpu_only_a_strict_check_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    for options, code in [((), 0), (("--strict",), 1)]:
        monkeypatch.setattr("sys.argv", ["gpu_check", *options])
        monkeypatch.setattr(
            gpu_check, "run_part", lambda *_: iter([Row("environment", "device", "none", is_failed=True)])
        )
        assert gpu_check.main() == code


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
    """Two kernels that overlap, from 0 to 30 us; a hand-over copies at 10 to 15 and 25 to 45."""
    events: list[dict[str, Any]] = [
        {"cat": "kernel", "name": "a", "ts": 0, "dur": 20},
        {"cat": "kernel", "name": "b", "ts": 10, "dur": 20},
        {"cat": "kernel", "name": COPY_KERNEL, "ts": 10, "dur": 5},
        {"cat": "kernel", "name": COPY_KERNEL, "ts": 25, "dur": 20},
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
    ("then", "name", "value", "is_failed", "is_failed_strictly"),
    [
        (lambda: None, "after", "2", False, False),
        (lambda: 1 // 0, "the rest of it", "failed", True, True),
        (lambda: os._exit(9), "the process", "ended with 9", True, True),
        (lambda: time.sleep(60), "the rest of it", "out of time", False, True),
        (_needs_a_package, "all of it", "skipped", False, True),
    ],
    ids=["to its end", "it raises", "its process dies", "it takes too long", "a package is missing"],
)
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_rows_of_a_part_are_there_however_it_ends(
    then: Callable[[], None],
    name: str,
    value: str,
    is_failed: bool,
    is_failed_strictly: bool,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """The process is a fork of this one, and so finds the fake."""
    monkeypatch.setattr("benchmarks.gpu_check.importlib.import_module", lambda _: FakePart(then))
    arguments = gpu_check.parse(["--dry-run"])
    first, last = gpu_check.run_part("fake", arguments, tmp_path, time.monotonic() + 3.0)
    assert first.name == "before"
    assert (last.name, last.value, last.is_failed) == (name, value, is_failed)
    assert gpu_check.judged(last, is_strict=False) == last
    assert gpu_check.judged(last, is_strict=True).is_failed == is_failed_strictly
    assert not gpu_check.judged(first, is_strict=True).is_failed


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_part_ends_at_its_own_limit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(
        "benchmarks.gpu_check.importlib.import_module", lambda _: FakePart(lambda: time.sleep(60))
    )
    monkeypatch.setitem(PART_LIMITS_S, "fake", 3.0 / gpu_check.DRY_FACTOR)
    rows = list(gpu_check.run_part("fake", gpu_check.parse(["--dry-run"]), tmp_path, time.monotonic() + 1e6))
    assert [row.value for row in rows] == ["1", "out of time"]
