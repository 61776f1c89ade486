"""Instruction sets that the kernels are compiled for, and which of them this machine has."""

import ctypes
import platform
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True, slots=True)
class InstructionSet:
    """The instructions of one build of the kernels. Flags have their names in Linux' /proc/cpuinfo."""

    name: str
    machine: str
    """The value of `platform.machine()`."""
    needs: frozenset[str]
    """The CPU flags that `compiler_flags` require, except those that all machines have."""
    compiler_flags: tuple[str, ...]


_AVX2 = frozenset({"avx2", "fma", "f16c", "bmi1", "bmi2", "abm", "movbe"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd"}
_VNNI, _BF16 = frozenset({"avx512_vnni"}), frozenset({"avx512_bf16"})

INSTRUCTION_SETS = (
    InstructionSet(
        "avx512-amx",
        "x86_64",
        _AVX512 | _VNNI | _BF16 | {"amx_tile", "amx_bf16", "amx_int8"},
        ("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16", "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
    ),
    InstructionSet(
        "avx512-vnni-bf16",
        "x86_64",
        _AVX512 | _VNNI | _BF16,
        ("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16"),
    ),
    InstructionSet("avx512-vnni", "x86_64", _AVX512 | _VNNI, ("-march=x86-64-v4", "-mavx512vnni")),
    InstructionSet("avx512", "x86_64", _AVX512, ("-march=x86-64-v4",)),
    InstructionSet("avx2", "x86_64", _AVX2, ("-march=x86-64-v3",)),
    InstructionSet(
        "neon-dotprod",
        "aarch64",
        frozenset({"asimd", "asimddp", "fphp", "asimdhp", "atomics"}),
        ("-march=armv8.2-a+dotprod+fp16",),
    ),
    InstructionSet("neon", "aarch64", frozenset({"asimd"}), ("-march=armv8-a",)),
)
"""The instruction sets for which kernels can be compiled, the best first."""


def machine_instructions() -> InstructionSet | None:
    """The best set that this machine has; None if it has none of them."""
    return next(iter(machine_instruction_sets()), None)


def lacking_instructions() -> str:
    """Why this machine has none of the instruction sets."""
    known = [instructions for instructions in INSTRUCTION_SETS if instructions.machine == platform.machine()]
    if not known:
        return f"Baton has no kernels for processors of type {platform.machine()}"
    if not cpu_flags():
        return "the instructions of this CPU are unknown: no flags in /proc/cpuinfo"
    return f"this CPU lacks {', '.join(sorted(known[-1].needs - cpu_flags()))} (see /proc/cpuinfo)"


@cache
def machine_instruction_sets() -> tuple[InstructionSet, ...]:
    """All sets that this machine has, the best first."""
    flags = cpu_flags()
    return tuple(
        instructions
        for instructions in INSTRUCTION_SETS
        if instructions.machine == platform.machine()
        and instructions.needs <= flags
        and ("amx_tile" not in instructions.needs or _may_use_matrix_units())
    )


def _may_use_matrix_units() -> bool:
    """Asks Linux for the use of AMX's registers; returns whether this process may use them."""
    arch_prctl, arch_req_xcomp_perm, tile_data = 158, 0x1023, 18
    error: int = ctypes.CDLL(None).syscall(arch_prctl, arch_req_xcomp_perm, tile_data)
    return error == 0


@cache
def cpu_flags() -> frozenset[str]:
    """The flags of the first processor, as Linux reports them; empty on other systems."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return frozenset()
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()
