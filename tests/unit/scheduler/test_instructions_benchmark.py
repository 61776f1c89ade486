"""benchmarks.scheduler_instructions divides the difference of two runs by the steps between them."""

import sys
from pathlib import Path

import pytest

from benchmarks.baton_side import BatonSide
from benchmarks.scheduler_instructions import (
    FEW_STEPS,
    MANY_STEPS,
    instructions_in,
    main,
    step_instructions,
)

VALGRIND = f"""#!{sys.executable}
import runpy, sys
module = sys.argv.index("-m") + 1
is_async, steps = "--asynchronous" in sys.argv, int(sys.argv[sys.argv.index("--steps") + 1])
sys.argv = sys.argv[module:]
if steps == {FEW_STEPS}:
    runpy.run_module(sys.argv[0], run_name="__main__")
print(f"==7== I   refs:      {{5_000_000 + (2_000 + is_async) * steps:,}}", file=sys.stderr)
"""


def test_the_start_of_a_process_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    valgrind = tmp_path / "valgrind"
    valgrind.write_text(VALGRIND)
    valgrind.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert step_instructions(is_async=False) == 2_000
    assert step_instructions(is_async=True) == 2_001


def test_a_run_without_a_figure_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="no instructions: command not"):
        instructions_in("command not found")
    valgrind = tmp_path / "valgrind"
    valgrind.write_text(f"#!{sys.executable}\nraise SystemExit('broken')\n")
    valgrind.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match="valgrind ended with code 1: broken"):
        step_instructions(is_async=False)


def test_few_steps_and_many_fit_into_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise requests end, and the longer run has smaller steps."""
    sizes = []
    monkeypatch.setattr(sys, "argv", ["it", "--steps", str(MANY_STEPS)])
    step = BatonSide.request_ids

    def note(self: BatonSide, plan: object) -> list[str]:
        ids = step(self, plan)
        sizes.append(len(ids))
        return ids

    monkeypatch.setattr(BatonSide, "request_ids", note)
    main()
    assert sizes == [256] * (3 + MANY_STEPS)
