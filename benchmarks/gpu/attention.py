"""Runs the attention kernel's tests several times. An error that appears in some runs only is a race.

A wrong formula fails in every run. Run this with either assembler (TRITON_PTXAS_PATH): the second product of
prefill has its left operand in registers, and old assemblers may reuse these registers too early.
"""

import importlib.util

from benchmarks.gpu.pytest_run import run_pytest
from benchmarks.gpu.report import Row
from benchmarks.gpu.setting import Emit, Setting

PART = "attention"
NUM_RUNS = 3
NUM_PROCESSES = 6


def run(setting: Setting, emit: Emit) -> None:
    arguments = ["tests/kernels/test_paged_attention.py", "--confcutdir=tests/kernels"]
    if setting.is_dry:
        arguments += ["-k", "tiles or graph"]
    elif importlib.util.find_spec("xdist") is not None:
        arguments += ["-n", str(NUM_PROCESSES)]
    failures = []
    for number in range(1 if setting.is_dry else NUM_RUNS):
        rows = list(run_pytest(setting, PART, f"attention, run {number + 1}", arguments))
        failures.append({row.name for row in rows if row.value == "failed"})
        for row in rows:
            emit(row)
    emit(compare(failures))


def compare(failures: list[set[str]]) -> Row:
    """Compares the failures of the runs. If a test failed in some runs only, the cause is a race."""
    always = failures[0].intersection(*failures)
    moving = sorted({name for run in failures for name in run} - always)
    return Row(
        PART,
        f"{len(failures)} runs",
        "differ" if moving else "alike",
        f"only at times: {', '.join(moving)}: a race" if moving else "",
        is_failed=bool(moving),
        figures={"moving": moving},
    )
