"""Tests as rows of the GPU check: what ended, failed, was left out or could not be collected, and why."""

import time
from pathlib import Path

import pytest

from benchmarks.gpu.attention import compare
from benchmarks.gpu.pytest_run import SPARE_S, Outcome, read_rows, run_pytest
from benchmarks.gpu.report import Row
from benchmarks.gpu.setting import Setting

TESTS = """
import pytest

def test_passes(): pass
def test_fails(): assert 1 + 1 == 3
def test_breaks(): raise ValueError("broken")
@pytest.fixture
def bad(): raise OSError("no device")
def test_errs(bad): pass
def test_needs_two(): pytest.skip("needs 2 GPUs")
def test_needs_more(): pytest.skip("needs patience")
def test_needs_a_package(): pytest.importorskip("absent_package")
"""


def run(folder: Path, *arguments: str, is_dry: bool = False, ends_at: float | None = None) -> dict[str, Row]:
    """Rows by name, of the tests in the folder."""
    setting = Setting(is_dry, folder, folder / "out", ends_at or time.monotonic() + 300)
    rows = run_pytest(setting, "part", "title", [str(folder), f"--confcutdir={folder}", *arguments])
    return {f"{row.name}: {row.note}" if "skipped" in row.name else row.name: row for row in rows}


@pytest.mark.parametrize("processes", [(), ("-n", "2")], ids=["one process", "two"])
def test_every_outcome_is_a_row(tmp_path: Path, processes: tuple[str, ...]) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "test_gone.py").write_text("import absent_package")
    (tmp_path / "test_shy.py").write_text("import pytest; pytest.importorskip('absent_package')")
    rows = run(tmp_path, *processes)
    assert rows["title"].value == "1 passed, 3 failed, 3 skipped"
    assert rows["title"].is_failed
    failed = {name: row.note for name, row in rows.items() if row.value == "failed"}
    assert failed == {
        "test_fails": "assert (1 + 1) == 3",
        "test_breaks": "ValueError: broken",
        "test_errs": "OSError: no device",
    }
    uncollected = {name.rpartition("/")[2] for name, row in rows.items() if row.value == "not collected"}
    assert uncollected == {"test_gone.py", "test_shy.py"}
    left_out = {row.note: row.is_skipped for name, row in rows.items() if name.startswith("title: skipped")}
    assert left_out.pop("needs 2 GPUs") is False, "so is this device"
    assert left_out.pop("needs patience") is True
    assert list(left_out.values()) == [True]
    assert "absent_package" in next(iter(left_out))
    assert "test_fails" in (tmp_path / "out" / "pytest-title.log").read_text()


def test_a_run_that_is_ended_counts_for_what_it_did(tmp_path: Path) -> None:
    (tmp_path / "test_slow.py").write_text("import time\ndef test_a(): pass\ndef test_b(): time.sleep(100)\n")
    begun_at = time.monotonic()
    rows = run(tmp_path, ends_at=begun_at + SPARE_S + 20)
    assert time.monotonic() < begun_at + 80
    assert rows["title"].value == "1 passed, 0 failed, 0 skipped"
    assert not rows["title"].is_failed


def test_nothing_that_passed_is_a_failure(tmp_path: Path) -> None:
    (tmp_path / "test_none.py").write_text("def test_a(): pass\n")
    assert run(tmp_path, "-k", "absent")["title"].is_failed


def test_a_line_that_was_cut_off_does_not_count(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    path.write_text('{"test": "a", "outcome": "passed", "message": ""}\n{"test": "b", "outc')
    assert read_rows(path) == [Outcome("a", "passed", "")]
    assert read_rows(tmp_path / "absent") == []


def test_an_error_that_moves_is_a_race() -> None:
    assert not compare([{"a"}, {"a"}, {"a"}]).is_failed
    assert not compare([set()]).is_failed
    row = compare([{"a"}, {"a", "b"}, {"a"}])
    assert row.is_failed
    assert row.figures == {"moving": ["b"]}
