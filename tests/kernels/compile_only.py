"""Compiles every kernel without a GPU, and prints what the compiler made of it.

    python -m tests.kernels.compile_only [--arch 90] [--first-for 80 100] [--usual] [--json FILE] [NAME ...]

Each module `tests/kernels/test_X.py` names real launches in `LAUNCHES`; they are run on CPU tensors with launching
replaced by compiling, so that what is compiled is what a GPU would get: the same specialisations and the same options.
Its `RARE`, if it has that, are those that differ from others only in their numbers, or combine what others have;
`--usual` leaves them out. `--first-for` compiles the first launch of each module.
Launches with "float8" in their name are left out for GPUs before sm_89, which have no such numbers.
Do not run it with TRITON_INTERPRET set.
"""

import argparse
import importlib
import json
import pkgutil
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

import tests.kernels

triton.knobs.language.default_fp_fusion = True  # as engine/gpu/device_parts.py says it

FIRST_WITH_FLOAT8 = 89
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@dataclass(frozen=True, slots=True)
class Compiled:
    """One kernel of one launch on one architecture."""

    launch: str
    kernel: str
    arch: int
    seconds: float
    registers: int
    """A thread's."""
    stack_bytes: int
    """A thread's local memory: registers that were spilled, or arrays that are indexed at run time."""
    spills_in_loop: int
    """Loads and stores of local memory between the first and the last instruction of the matrix units."""
    shared_bytes: int
    """A program's."""
    num_warps: int
    has_wgmma: bool
    has_mma: bool
    """Matrix units of any generation."""
    has_tma: bool
    """The bulk tensor copy engine."""
    before_wait: list[str] | None
    """Accesses of global memory, and exits, that a program comes by before it waits for the kernel before it (see
    engine/kernels/dependent_launch.py), by the assembler's names; None: it does not wait."""


class _Target:
    """A driver of a pretended GPU."""

    def __init__(self, arch: int, device: int) -> None:
        self._device = device
        self._target = GPUTarget("cuda", arch, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return self._device

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def compiling_for(arch: int, device: int | None = None) -> Iterator[list[Any]]:
    """Within the context every launch only compiles for `arch`, and the list receives the kernels.

    Triton knows the kernels of each `device`, by default one for each `arch`.
    """
    compiled: list[Any] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        compiled.append(kernel)
        return kernel

    driver.set_active(_Target(arch, arch if device is None else device))
    JITFunction.run = compile_only
    try:
        yield compiled
    finally:
        JITFunction.run = run
        driver._active = None


def launches(*, with_rare: bool) -> dict[str, Callable[[], object]]:
    """The launches of all test modules, by `module: name`."""
    found: dict[str, Callable[[], object]] = {}
    for module_info in pkgutil.iter_modules(tests.kernels.__path__):
        if module_info.name.startswith("test_"):
            module = importlib.import_module(f"tests.kernels.{module_info.name}")
            rare = () if with_rare else getattr(module, "RARE", ())
            for name, launch in getattr(module, "LAUNCHES", {}).items():
                if name not in rare:
                    found[f"{module_info.name.removeprefix('test_')}: {name}"] = launch
    return found


def compile_launch(name: str, launch: Callable[[], object], arch: int) -> list[Compiled]:
    """Compiles every kernel of the launch."""
    began = time.perf_counter()
    with compiling_for(arch) as kernels:
        launch()
    seconds = time.perf_counter() - began
    assert kernels, f"{name} launched nothing"
    return [_describe(name, kernel, arch, seconds / len(kernels)) for kernel in kernels]


def _describe(launch: str, kernel: Any, arch: int, seconds: float) -> Compiled:
    ptx: str = kernel.asm["ptx"]
    usage = _resource_usage(kernel.asm["cubin"])
    return Compiled(
        launch=launch,
        kernel=kernel.metadata.name,
        arch=arch,
        seconds=round(seconds, 2),
        registers=usage["REG"],
        stack_bytes=usage["STACK"],
        spills_in_loop=_spills_in_loop(kernel.asm["cubin"]) if usage["STACK"] else 0,
        shared_bytes=kernel.metadata.shared,
        num_warps=kernel.metadata.num_warps,
        has_wgmma="wgmma.mma_async" in ptx,
        has_mma="wgmma.mma_async" in ptx or "mma.sync" in ptx or "tcgen05.mma" in ptx,
        has_tma="cp.async.bulk.tensor" in ptx,
        before_wait=_before_wait(kernel.asm["cubin"]) if "griddepcontrol.wait" in ptx else None,
    )


def _resource_usage(cubin: bytes) -> dict[str, int]:
    text = _dumped("cuobjdump", "--dump-resource-usage", cubin)
    return {name: int(value) for name, value in re.findall(r"(REG|STACK):(\d+)", text)}


@cache
def _instructions(cubin: bytes) -> list[str]:
    """The assembler's names, in order."""
    text = _dumped("nvdisasm", "--no-dataflow", cubin)
    return re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z]\w+)", text, re.MULTILINE)


def _spills_in_loop(cubin: bytes) -> int:
    names = _instructions(cubin)
    products = [index for index, name in enumerate(names) if name.endswith("MMA")]
    loop = names[products[0] : products[-1]] if products else names
    return sum(name in ("LDL", "STL") for name in loop)


def _before_wait(cubin: bytes) -> list[str]:
    names = _instructions(cubin)
    assert "ACQBULK" in names, "griddepcontrol.wait has another name"
    is_access = re.compile("LDG|STG|UTMA|UBLK|ATOM|RED|CCTL|EXIT")
    return [name for name in names[: names.index("ACQBULK")] if is_access.match(name)]


def _dumped(tool: str, option: str, cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(TOOLS / tool), option, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def chosen(names: Sequence[str], *, only_first: bool, only_usual: bool) -> dict[str, Callable[[], object]]:
    """Launches whose names begin with one of `names` (all, without any): the first of each module, the usual ones or
    every one."""
    found = launches(with_rare=not only_usual)
    found = {name: launch for name, launch in found.items() if name.startswith(tuple(names) or "")}
    if only_first:
        first = {name.partition(":")[0]: name for name in reversed(found)}
        found = {name: found[name] for name in reversed(first.values())}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.kernels.compile_only")
    parser.add_argument("names", nargs="*", help="beginnings of names; all without")
    parser.add_argument("--arch", type=int, nargs="*", default=(90,))
    parser.add_argument(
        "--first-for",
        type=int,
        nargs="*",
        default=(),
        help="architectures for the first launch of each module",
    )
    parser.add_argument("--usual", action="store_true", help="without the rare launches of each module")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    all_compiled = []
    wanted = [(arch, False) for arch in options.arch] + [(arch, True) for arch in options.first_for]
    for arch, only_first in wanted:
        launches_by_name = chosen(
            options.names, only_first=only_first, only_usual=options.usual and not only_first
        )
        for name, launch in launches_by_name.items():
            if "float8" in name and arch < FIRST_WITH_FLOAT8:
                continue
            for compiled in compile_launch(name, launch, arch):
                all_compiled.append(asdict(compiled))
                print(_line(compiled), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(all_compiled, indent=1) + "\n")
    return 0


def _line(compiled: Compiled) -> str:
    units = "wgmma" if compiled.has_wgmma else "mma" if compiled.has_mma else "-"
    return (
        f"{compiled.launch:44} sm_{compiled.arch:<4} {compiled.registers:4} registers {compiled.stack_bytes:5} B stack "
        f"{compiled.spills_in_loop:3} in loop {compiled.shared_bytes / 1024:6.1f} KiB shared  {units:5} "
        f"{'tma' if compiled.has_tma else '-':3} {compiled.seconds:5.1f} s"
    )


if __name__ == "__main__":
    sys.exit(main())
