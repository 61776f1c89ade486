"""NativeLibrary: finds a compiler, compiles the kernels once, and loads them.

The compiled library lies in Baton's cache folder, named after its source, flags and compiler. A container image may
hold it already: `python -m engine.native.library FOLDER` compiles every instruction set of this kind of machine, and
BATON_NATIVE_KERNELS names that folder. The value `off` computes with torch alone.
"""

import ctypes
import fcntl
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch

from engine.loading.pretrained import default_cache_dir
from engine.native.instructions import INSTRUCTION_SETS, InstructionSet, machine_instructions

logger = logging.getLogger(__name__)

VARIABLE = "BATON_NATIVE_KERNELS"
SOURCES = Path(__file__).parent
FLAGS = ("-std=c++17", "-O3", "-fno-math-errno", "-fno-exceptions", "-fno-rtti", "-fPIC")
COMPILE_TIMEOUT_S = 300.0


@cache
def native_library() -> ctypes.CDLL | None:
    """The kernels for this machine; None, with the reason in the log, if there are none.

    The first process compiles, which takes some seconds; others wait for it.
    """
    try:
        library = _find(os.environ)
    except _NotAvailableError as error:
        logger.info("no native kernels, so torch computes everything: %s", error)
        return None
    logger.info("native kernels: %s", library.name)
    return ctypes.CDLL(str(library))


class _NotAvailableError(Exception):
    """There are no kernels; its text says why."""


def _find(environment: Mapping[str, str]) -> Path:
    wanted = environment.get(VARIABLE, "")
    instructions = machine_instructions()
    if wanted == "off":
        raise _NotAvailableError(f"{VARIABLE} is off")
    if instructions is None:
        raise _NotAvailableError(f"there are none for this processor ({platform.machine()})")
    if wanted:
        library = Path(wanted) / _file_name(instructions)
        if not library.is_file():
            raise _NotAvailableError(f"{VARIABLE} is {wanted!r}, and {library.name} is not there")
        return library
    folder = default_cache_dir(environment) / "native"
    library = folder / _file_name(instructions)
    if library.is_file():
        return library
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.is_file():
            logger.info("compiling the native kernels for %s", instructions.name)
            compile_kernels(instructions, library)
    return library


def compile_kernels(instructions: InstructionSet, library: Path, pattern: str = "*.cpp") -> None:
    """Makes the file of the sources that match, whole or not at all."""
    compiler = _compiler(os.environ)
    if compiler is None:
        raise _NotAvailableError(
            "there is no C++ compiler; install one (apt install g++, or pip install ziglang)"
        )
    flags = instructions.compiler_flags
    if "ziglang" in compiler:
        flags = tuple(flag.replace("=x86-64-v", "=x86_64_v") for flag in flags)
    command = [*compiler, *FLAGS, *flags]
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch, ThreadPoolExecutor() as threads:

        def compile_one(source: Path) -> str:
            output = f"{scratch}/{source.stem}.o"
            _run([*command, "-c", str(source), "-o", output])
            return output

        objects = threads.map(compile_one, sorted(SOURCES.glob(pattern)))
        output = Path(scratch) / library.name
        _run([*command, "-shared", *objects, "-o", str(output), str(_openmp())])
        output.replace(library)


def _run(command: list[str]) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S)
    except subprocess.CalledProcessError as error:
        raise _NotAvailableError(f"{command[0]} failed: {error.stderr.strip()[-500:]}") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _NotAvailableError(f"{command[0]} failed: {error}") from None


def _file_name(instructions: InstructionSet) -> str:
    digest = hashlib.sha256(repr((FLAGS, instructions.compiler_flags)).encode())
    for path in sorted([*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h")]):
        digest.update(path.read_bytes())
    return f"baton-{instructions.name}-{digest.hexdigest()[:16]}.so"


def _compiler(environment: Mapping[str, str]) -> list[str] | None:
    """Its command."""
    for name in (environment.get("CXX", ""), "c++", "g++", "clang++"):
        if name and (path := shutil.which(name)):
            return [path]
    return [sys.executable, "-m", "ziglang", "c++"] if find_spec("ziglang") else None


def _openmp() -> Path:
    """The OpenMP runtime that torch has loaded."""
    folders = [Path(torch.__file__).parent / "lib", Path(torch.__file__).parent.parent / "torch.libs"]
    for folder in folders:
        for path in sorted(folder.glob("libgomp*.so*")):
            return path
    raise _NotAvailableError(f"PyTorch {torch.__version__} has no libgomp")


def main(folder: Path) -> None:
    """Compiles all instruction sets of this kind of machine."""
    folder.mkdir(parents=True, exist_ok=True)
    for instructions in INSTRUCTION_SETS:
        if instructions.machine == platform.machine():
            compile_kernels(instructions, folder / _file_name(instructions))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
