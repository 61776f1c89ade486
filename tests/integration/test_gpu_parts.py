"""Parts of the GPU check: a smoke test that leaves no kernel out and sees what is wrong; compiling ahead; traces."""

import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from benchmarks.gpu.precompile import precompile
from benchmarks.gpu.setting import Setting
from benchmarks.gpu.smoke import _check, error_of, makers, same_bits
from benchmarks.gpu.smoke_case import Shapes, SmokeCase
from benchmarks.gpu.sweep import _sweep
from benchmarks.gpu.sweep_case import CHOSEN, Launch, SweepCase
from benchmarks.gpu.trace import sum_kernels

KERNELS = Path(__file__).parents[2] / "engine" / "kernels"
DRY = Setting(True, Path("unused"), None)


def test_the_smoke_test_leaves_no_kernel_out() -> None:
    """It leaves out no function that kernels call, either. All its cases have different names, so none
    replaces another one."""
    compiled = {path.stem for path in KERNELS.glob("*.py") if "@triton.jit" in path.read_text()}
    assert len(compiled) >= 18
    cases = [case for maker in makers(Shapes.of(DRY)) for case in maker()]
    assert {file for case in cases for file in case.files} == compiled
    assert len({case.name for case in cases}) == len(cases)


@pytest.mark.parametrize(
    ("first", "later", "want", "is_failed"),
    [
        ([1.0, 2.0], [1.0, 2.0], [1.0, 2.0], False),
        ([1.0, 2.0], [1.0, 2.0], [1.0, 2.1], True),
        ([1.0, float("nan")], [1.0, float("nan")], [1.0, 2.0], True),
        ([1.0, 2.0], [1.0, 2.0001], [1.0, 2.0], True),
    ],
    ids=["right", "wrong", "NaN", "other bits at times"],
)
def test_what_is_wrong_or_moves_fails(
    first: list[float], later: list[float], want: list[float], is_failed: bool
) -> None:
    results = iter([torch.tensor(first), torch.tensor(later), torch.tensor(first)])
    case = SmokeCase("a", (), lambda: (next(results),), lambda: (torch.tensor(want),), 1e-3)
    cuda_like = Setting(False, Path("unused"), None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("benchmarks.gpu.smoke.synchronize", lambda _: None)
        (row,) = _check(cuda_like, case)
    assert row.is_failed == is_failed


def test_errors_are_of_floats_by_norm_and_of_integers_by_number() -> None:
    assert error_of(torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0])) == pytest.approx(0.1)
    assert error_of(torch.tensor([1, 2, 3, 4]), torch.tensor([1, 2, 3, 5])) == 0.25
    assert error_of(torch.zeros(2), torch.zeros(2)) == 0.0
    assert same_bits((torch.tensor([torch.nan]),), (torch.tensor([torch.nan]),))
    assert not same_bits((torch.tensor([0.0]),), (torch.tensor([-0.0]),))


def refuses(_copy: int) -> Launch:
    raise RuntimeError("no such head size")


def gives(value: float) -> Callable[[int], Launch]:
    return lambda _copy: lambda: torch.tensor([value])


@pytest.mark.parametrize(
    ("librarys", "note", "is_failed"),
    [
        (gives(1.0), r"; \d+\.\d\d x the library's time$", False),
        (gives(2.0), r"1 candidates; wrong: \[\"the library's: 1.0e\+00 off\"\]$", True),
        (refuses, r"; the library's is not here: no such head size$", False),
    ],
    ids=["ours beside it", "it differs", "it refuses"],
)
def test_a_sweep_says_how_a_library_does(
    librarys: Callable[[int], Launch], note: str, is_failed: bool
) -> None:
    candidates = {CHOSEN: gives(1.0), "the library's": librarys}
    (row,) = _sweep(DRY, SweepCase("a case", 2, 8, 1e-2, lambda: candidates, "the library's"))
    assert re.search(note, row.note)
    assert row.is_failed == is_failed
    assert row.figures["best"] == CHOSEN, "launch parameters are chosen among our own"
    assert (row.figures["times_yardstick"] is None) == ("x the" not in row.note)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_work_is_done_in_other_processes_and_may_fail(tmp_path: Path) -> None:
    def write(number: int) -> None:
        if number == 1:
            raise ValueError("does not compile")
        (tmp_path / str(number)).write_text(str(os.getpid()))

    precompile(DRY, [lambda number=number: write(number) for number in range(4)], time.monotonic() + 60)  # type: ignore[misc]
    written = {path.name: int(path.read_text()) for path in tmp_path.iterdir()}
    assert written.keys() == {"0", "2", "3"}
    assert os.getpid() not in written.values()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_work_that_takes_too_long_is_ended() -> None:
    begun_at = time.monotonic()
    precompile(DRY, [lambda: time.sleep(60)], begun_at + 0.5)
    assert time.monotonic() < begun_at + 20


def test_kernels_of_a_trace_are_summed_up() -> None:
    """Two kernels overlap, since the second launch need not wait for the first. A gap of 10 us follows."""
    events: list[dict[str, Any]] = [
        {"cat": "kernel", "name": "a", "ts": 100, "dur": 20},
        {"cat": "kernel", "name": "b", "ts": 110, "dur": 20},
        {"cat": "kernel", "name": "a", "ts": 140, "dur": 5},
        {"cat": "cpu_op", "name": "c", "ts": 0, "dur": 500},
    ]
    sums = sum_kernels(events)
    assert (sums.num_launches, sums.kernels_us, sums.gaps_us, sums.span_us) == (3, 45.0, 10.0, 45.0)
    assert sums.by_name == {"a": (2, 25.0), "b": (1, 20.0)}
    assert sum_kernels([]).span_us == 0.0
