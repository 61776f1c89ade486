"""The tests that are there for a GPU: kernels over many shapes, and whatever else is marked `gpu`."""

import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.gpu.report import Row
from benchmarks.gpu.setting import Emit, Setting

PART = "kernels"
ROOT = Path(__file__).parents[2]
FEW = "tests/kernels/test_many_shapes.py"
NUM_PROCESSES = 8
ENDS = (0, 1, 5)
"""Of pytest: all passed, some did not (they are counted), none were chosen."""
MISSING = re.compile(r"ModuleNotFoundError: No module named '(\w+)")
NUM_SHOWN = 12
"""Failures that get a row of their own."""


@dataclass(frozen=True, slots=True)
class Counts:
    """What came of a run of pytest."""

    passed: int
    failed: int
    skipped: int
    failures: tuple[tuple[str, str], ...]
    """Test and message."""
    missing: frozenset[str]
    """Packages for want of which files were not even collected."""


def run(setting: Setting, emit: Emit) -> None:
    # Only what lies with the kernel tests is loaded: the other tests' conftest wants packages that they need.
    of_kernels = ["tests/kernels", "--confcutdir=tests/kernels", "--shapes=many"]
    if setting.is_dry:
        of_kernels = [FEW, "--confcutdir=tests/kernels", "--shapes=few", "-k", "silu_mul"]
    elif importlib.util.find_spec("xdist") is not None:
        of_kernels += ["-n", str(NUM_PROCESSES)]  # most of the time kernels are compiled
    for row in _rows(setting, "kernels, beside their references", of_kernels, may_be_empty=False):
        emit(row)
    marked = _marked_files()
    if setting.is_dry:
        emit(Row(PART, "tests marked gpu", f"{len(marked)} files", "not run: there is no GPU"))
        return
    for row in _rows(setting, "tests marked gpu", ["-m", "gpu", *marked], may_be_empty=True):
        emit(row)


def _rows(setting: Setting, title: str, arguments: Sequence[str], *, may_be_empty: bool) -> Iterator[Row]:
    counts, code, tail = _pytest(setting, arguments)
    notes = [f"some need {', '.join(sorted(counts.missing))}"] if counts.missing else []
    notes += [] if code == 0 else [f"pytest ended with {code}: {tail}"]
    is_empty = counts.passed == 0 and not may_be_empty
    yield Row(
        PART,
        title,
        f"{counts.passed} passed, {counts.failed} failed, {counts.skipped} skipped",
        "; ".join(notes),
        is_failed=bool(counts.failed) or code not in ENDS or is_empty,
        figures={"passed": counts.passed, "failed": counts.failed, "skipped": counts.skipped},
    )
    for test, message in counts.failures[:NUM_SHOWN]:
        yield Row(PART, test, "failed", message, is_failed=True)


def _pytest(setting: Setting, arguments: Sequence[str]) -> tuple[Counts, int, str]:
    report = setting.folder / "pytest.xml"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
    command += ["--continue-on-collection-errors"]
    # Versions that are newer or older than the pinned ones may warn: here that is no failure.
    done = subprocess.run(
        [*command, "-W", "default", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if setting.out is not None:
        setting.out.mkdir(parents=True, exist_ok=True)
        name = re.sub(r"\W+", "-", arguments[0]).strip("-")
        (setting.out / f"pytest-{name}.log").write_text(done.stdout + done.stderr)
    tail = (done.stdout + done.stderr).strip().splitlines()[-1:]
    return _counts(report), done.returncode, " ".join(tail)


def _counts(report: Path) -> Counts:
    if not report.exists():
        return Counts(0, 0, 0, (), frozenset())
    passed, skipped, failures, missing = 0, 0, [], set()
    for case in ElementTree.parse(report).iter("testcase"):
        failure, error = case.find("failure"), case.find("error")
        bad = error if failure is None else failure
        if case.find("skipped") is not None:
            skipped += 1
        elif bad is None:
            passed += 1
        elif error is not None and (package := MISSING.search(error.text or "")):
            missing.add(package[1])
        else:
            message = (bad.get("message") or "").splitlines()
            failures.append((case.get("name") or "", message[0][:160] if message else ""))
    return Counts(passed, len(failures), skipped, tuple(failures), frozenset(missing))


def _marked_files() -> list[str]:
    """Of the other tests: only these are collected, since others may need packages that are not there."""
    paths = [path for path in sorted((ROOT / "tests").rglob("test_*.py")) if path.parent.name != "kernels"]
    return [str(path.relative_to(ROOT)) for path in paths if "mark.gpu" in path.read_text()]
