"""The plan of docs/gpu.md for half an hour with a GPU: commands that can be pasted, with options that exist."""

import os
import re
import shlex
from pathlib import Path

import pytest

from benchmarks import cuda_ipc_killed, gpu_check

ROOT = Path(__file__).parents[2]
MAX_CHARACTERS = 2000
PREFIX = "python3 -m "
KNOWN = {"benchmarks.gpu_check", "benchmarks.cuda_ipc_killed", "pip"}


def commands() -> list[str]:
    """Blocks of the plan."""
    text = (ROOT / "docs" / "gpu.md").read_text()
    plan = text.split("\n## Half an hour with a GPU\n")[1].split("\n## ")[0]
    return re.findall(r"```sh\n(.*?)```", plan, re.DOTALL)


def modules(command: str) -> list[tuple[str, list[str]]]:
    """What a block runs by `python3 -m`, and with which arguments."""
    lines = [line for line in command.splitlines() if line.startswith(PREFIX)]
    words = [shlex.split(line.removeprefix(PREFIX).split(" || ")[0]) for line in lines]
    return [(module, arguments) for module, *arguments in words]


def test_each_stage_fits_a_command() -> None:
    assert len(commands()) == 6
    assert all(len(command) < MAX_CHARACTERS for command in commands())


@pytest.mark.parametrize("number", range(6))
def test_options_are_those_of_the_programs(number: int) -> None:
    minutes = 0.0
    for module, arguments in modules(commands()[number]):
        assert module in KNOWN
        if module == "benchmarks.gpu_check":
            minutes += gpu_check.parse(arguments, out="out").minutes
        elif module == "benchmarks.cuda_ipc_killed":
            minutes += cuda_ipc_killed.parser().parse_args(arguments).wait / 60
    assert 1 < minutes < 9, "a command has ten minutes"


def test_the_plan_fits_half_an_hour_and_has_all_parts_but_those_for_the_rest() -> None:
    given = [
        gpu_check.parse(arguments, out="out")
        for command in commands()
        for module, arguments in modules(command)
        if module == "benchmarks.gpu_check"
    ]
    assert sum(arguments.minutes for arguments in given) <= 33
    parts = {part for arguments in given for part in arguments.parts}
    assert parts == set(gpu_check.PARTS) - {"peer", "throughput"}


@pytest.mark.parametrize("name", ["gpu-machine.txt", "gpu-wheels.txt", "gpu-ray.txt"])
def test_packages_are_pinned(name: str) -> None:
    locks = "\n".join((ROOT / "requirements" / lock).read_text() for lock in ("cpu.lock", "kernels.lock"))
    lines = (ROOT / "requirements" / name).read_text().splitlines()
    packages = [line for line in lines if not line.startswith("#")]
    assert packages
    assert [package for package in packages if f"\n{package.lower()}==" not in f"\n{locks}".lower()] == []


def test_scripts_can_be_run() -> None:
    for name in ("gpu_check.sh", "gpu_wheels.sh"):
        assert os.access(ROOT / "scripts" / name, os.X_OK)
