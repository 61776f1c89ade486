"""Compiles every kernel without a GPU, and prints what the compiler made of it.

    python -m tests.kernels.compile_only [--arch 90] [--first-for 80 100 [--first-of NAME ...]] [--usual] [--json FILE]
                                         [NAME ...]

Each module `tests/kernels/test_X.py` names real launches in `LAUNCHES`; they are run on CPU tensors with launching
replaced by compiling, so that what is compiled is what a GPU would get: the same specializations and the same options.
If the module has `RARE`, these launches differ from others only in their numbers, or combine options of others;
`--usual` leaves them out. `--first-for` compiles the first launch of each module. Launches with "float8" in their name
are left out for GPUs before sm_89, which have no such numbers. Do not run it with TRITON_INTERPRET set.
"""

import argparse
import importlib
import json
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from tests.kernels.disassembly import instructions, resource_usage

triton.knobs.language.default_fp_fusion = True  # as engine/gpu/device_parts.py says it

FIRST_WITH_FLOAT8 = 89


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
    for path in sorted(Path(__file__).parent.glob("test_*.py")):
        if "LAUNCHES = " in path.read_text():  # others take seconds to import
            module = importlib.import_module(f"tests.kernels.{path.stem}")
            rare = () if with_rare else getattr(module, "RARE", ())
            for name, launch in module.LAUNCHES.items():
                if name not in rare:
                    found[f"{path.stem.removeprefix('test_')}: {name}"] = launch
    return found


def compile_launches(launches_by_name: Mapping[str, Callable[[], object]], arch: int) -> list[Compiled]:
    """Compiles every kernel of every launch."""
    made: list[tuple[str, Any, float]] = []
    for name, launch in launches_by_name.items():
        began = time.perf_counter()
        with compiling_for(arch) as kernels:
            launch()
        seconds = time.perf_counter() - began
        assert kernels, f"{name} launched nothing"
        made += [(name, kernel, seconds / len(kernels)) for kernel in kernels]
    usages = [resource_usage(kernel.asm["cubin"]) for _, kernel, _ in made]
    to_read = [
        kernel.asm["cubin"]
        for (_, kernel, _), usage in zip(made, usages, strict=True)
        if usage["STACK"] or _waits(kernel)
    ]
    names_by_cubin = dict(zip(to_read, instructions(to_read, arch), strict=True))
    return [
        _describe(name, kernel, arch, seconds, usage, names_by_cubin.get(kernel.asm["cubin"], []))
        for (name, kernel, seconds), usage in zip(made, usages, strict=True)
    ]


def _waits(kernel: Any) -> bool:
    return "griddepcontrol.wait" in kernel.asm["ptx"]


def _describe(
    launch: str, kernel: Any, arch: int, seconds: float, usage: Mapping[str, int], names: Sequence[str]
) -> Compiled:
    """`names`: the names of the kernel's instructions, if it spills or waits."""
    ptx: str = kernel.asm["ptx"]
    return Compiled(
        launch=launch,
        kernel=kernel.metadata.name,
        arch=arch,
        seconds=round(seconds, 2),
        registers=usage["REG"],
        stack_bytes=usage["STACK"],
        spills_in_loop=_spills_in_loop(names) if usage["STACK"] else 0,
        shared_bytes=kernel.metadata.shared,
        num_warps=kernel.metadata.num_warps,
        has_wgmma="wgmma.mma_async" in ptx,
        has_mma="wgmma.mma_async" in ptx or "mma.sync" in ptx or "tcgen05.mma" in ptx,
        has_tma="cp.async.bulk.tensor" in ptx,
        before_wait=_before_wait(names) if _waits(kernel) else None,
    )


def _spills_in_loop(names: Sequence[str]) -> int:
    products = [index for index, name in enumerate(names) if name.endswith("MMA")]
    loop = names[products[0] : products[-1]] if products else names
    return sum(name in ("LDL", "STL") for name in loop)


def _before_wait(names: Sequence[str]) -> list[str]:
    assert "ACQBULK" in names, "griddepcontrol.wait has another name"
    is_access = re.compile("LDG|STG|UTMA|UBLK|ATOM|RED|CCTL|EXIT")
    return [name for name in names[: names.index("ACQBULK")] if is_access.match(name)]


def chosen(names: Sequence[str], *, only_first: bool, only_usual: bool) -> dict[str, Callable[[], object]]:
    """Launches whose names begin with one of `names`; all launches if `names` is empty. Either the first of each
    module, or the usual ones, or every one."""
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
    parser.add_argument(
        "--first-of", nargs="*", default=(), help="beginnings of names of those first launches; all without"
    )
    parser.add_argument("--usual", action="store_true", help="without the rare launches of each module")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    all_compiled = []
    wanted = [(arch, False) for arch in options.arch] + [(arch, True) for arch in options.first_for]
    for arch, only_first in wanted:
        launches_by_name = chosen(
            options.first_of if only_first and options.first_of else options.names,
            only_first=only_first,
            only_usual=options.usual and not only_first,
        )
        if arch < FIRST_WITH_FLOAT8:
            launches_by_name = {name: each for name, each in launches_by_name.items() if "float8" not in name}
        for compiled in compile_launches(launches_by_name, arch):
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
