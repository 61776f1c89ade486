"""The tests of the kernels: each beside its reference, over a few shapes or over those of real models."""

import importlib.util

from benchmarks.gpu.pytest_run import run_pytest
from benchmarks.gpu.setting import Emit, Setting

PART = "kernels"
NUM_PROCESSES = 6
"""Most of the time kernels are compiled. Each has a context on the device, and inputs of some GiB at most."""


def run(setting: Setting, emit: Emit) -> None:
    # Only what lies with these tests is loaded: the other tests' conftest wants packages that they need.
    arguments = ["tests/kernels", "--confcutdir=tests/kernels", f"--shapes={setting.shapes}"]
    # Compiles everything for three generations, which needs no device and takes long.
    arguments += ["--ignore=tests/kernels/test_compile.py"]
    if setting.is_dry:
        arguments += ["-k", "test_many_shapes and silu_mul"]  # all files are collected
    elif importlib.util.find_spec("xdist") is not None:
        arguments += ["-n", str(NUM_PROCESSES)]
    for row in run_pytest(setting, PART, f"kernels, {setting.shapes} shapes", arguments):
        emit(row)
