"""Runs the tests of the kernels.

They compare each kernel with its reference, on a few shapes or on those of real models.
"""

import importlib.util

from benchmarks.gpu.pytest_run import run_pytest
from benchmarks.gpu.setting import Emit, Setting

PART = "kernels"
NUM_PROCESSES = 6
"""Processes of the tests, which spend most of their time compiling kernels. Each has a context on the device
and at most some GiB of inputs."""


def run(setting: Setting, emit: Emit) -> None:
    # Loads only the conftest of these tests: the other tests' conftest imports packages that may be missing.
    arguments = ["tests/kernels", "--confcutdir=tests/kernels", f"--shapes={setting.shapes}"]
    # This file compiles everything for three generations of GPUs. That needs no device and takes long.
    arguments += ["--ignore=tests/kernels/test_compile.py"]
    if setting.is_dry:
        arguments += ["-k", "test_many_shapes and gate_mul"]  # pytest still collects all files
    elif importlib.util.find_spec("xdist") is not None:
        arguments += ["-n", str(NUM_PROCESSES)]
    for row in run_pytest(setting, PART, f"kernels, {setting.shapes} shapes", arguments):
        emit(row)
