"""native_library: finds a compiler, compiles the kernels once, and loads them.

The compiled library is in Baton's cache folder; its name contains a digest of source and flags. A container
image may already contain it: `python -m engine.native.library FOLDER` compiles every instruction set of this
kind of machine, and BATON_NATIVE_KERNELS names that folder. With the value `off`, torch computes everything.
"""

import contextlib
import ctypes
import errno
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
from pathlib import Path

from engine.loading.pretrained import default_cache_dir
from engine.native.compilers import NATIVE_KERNELS_VARIABLE, compilers
from engine.native.instructions import (
    INSTRUCTION_SETS,
    InstructionSet,
    lacking_instructions,
    machine_instructions,
)

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent
FLAGS = ("-std=c++17", "-O3", "-fno-math-errno", "-fno-exceptions", "-fno-rtti", "-fPIC")
COMPILE_TIMEOUT_S = 300.0
_ROOM_BYTES = 16 * 2**20
"""How much free space must be there to compile. Compiling uses a fifth of it."""

_PARTIAL = ".partial"
"""Prefix of the folders with work in progress, beside the library."""


@cache
def native_library() -> ctypes.CDLL | None:
    """The kernels for this machine; None, with the reason in the log, if there are none.

    The first process compiles, which takes about 20 s on two cores; other processes wait for it.
    """
    if os.environ.get(NATIVE_KERNELS_VARIABLE) == "off":
        logger.info("torch computes everything: %s is off", NATIVE_KERNELS_VARIABLE)
        return None
    try:
        return _load(os.environ)
    except (_NotAvailableError, OSError) as error:
        logger.warning(
            "there are no native kernels, so torch computes everything, which takes longer: %s", error
        )
        return None


class _NotAvailableError(Exception):
    """There are no kernels; the text says why."""


def _load(environment: Mapping[str, str]) -> ctypes.CDLL:
    instructions = machine_instructions()
    if instructions is None:
        raise _NotAvailableError(lacking_instructions())
    if prebuilt := environment.get(NATIVE_KERNELS_VARIABLE):
        library = Path(prebuilt) / _file_name(instructions)
        if not library.is_file():
            raise _NotAvailableError(
                f"{NATIVE_KERNELS_VARIABLE} names the folder {prebuilt!r}, but it has no {library.name}"
            )
        return _loaded(library)
    folder = default_cache_dir(environment) / "native"
    try:
        return _loaded(_kept_in(folder, instructions))
    except OSError as error:  # the folder is read-only, full or forbids execution; or its file is damaged
        logger.warning(
            "native kernels are compiled at every start, since %s is not usable (XDG_CACHE_HOME moves it): %s",
            folder,
            error,
        )
    with tempfile.TemporaryDirectory(dir=_scratch_folder()) as scratch:
        library = Path(scratch) / _file_name(instructions)
        compile_kernels(instructions, library)
        return _loaded(library)


def _loaded(library: Path) -> ctypes.CDLL:
    kernels = ctypes.CDLL(str(library))
    logger.info("native kernels: %s", library.name)
    return kernels


def _kept_in(folder: Path, instructions: InstructionSet) -> Path:
    """The library in the cache folder, which the first process compiles. OSError if it cannot be kept there."""
    library = folder / _file_name(instructions)
    if library.is_file():
        return library
    folder.mkdir(parents=True, exist_ok=True)
    if not _has_room(folder):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.is_file():
            for leftover in folder.glob(f"{_PARTIAL}*"):  # its process was killed
                shutil.rmtree(leftover, ignore_errors=True)
            logger.info("compiling the native kernels for %s", instructions.name)
            compile_kernels(instructions, library)
    return library


def _scratch_folder() -> str:
    """The usual folder for temporary files; a folder in memory if the usual one is full or missing."""
    with contextlib.suppress(OSError):
        if _has_room(folder := tempfile.gettempdir()):
            return folder
    return "/dev/shm"


def _has_room(folder: str | Path) -> bool:
    return shutil.disk_usage(folder).free >= _ROOM_BYTES


def compile_kernels(instructions: InstructionSet, library: Path, pattern: str = "*.cpp") -> None:
    """Compiles matching sources to `library` with the first compiler that works; leaves no partial file."""
    errors = []
    for compiler in compilers(os.environ):
        try:
            _compile(compiler, instructions, library, pattern)
        except _NotAvailableError as error:
            errors.append(str(error))
        else:
            if errors:
                logger.warning(
                    "the native kernels were compiled by %s, because %s",
                    " ".join(compiler),
                    "; ".join(errors),
                )
            return
    raise _NotAvailableError(
        "; ".join(errors) or "there is no C++ compiler; install one (apt install g++, or pip install ziglang)"
    )


def _compile(compiler: list[str], instructions: InstructionSet, library: Path, pattern: str) -> None:
    flags = instructions.compiler_flags
    if "ziglang" in compiler:
        flags = tuple(flag.replace("=x86-64-v", "=x86_64_v") for flag in flags)
    command = [*compiler, *FLAGS, *flags]
    with (
        tempfile.TemporaryDirectory(prefix=_PARTIAL, dir=library.parent) as scratch,
        ThreadPoolExecutor() as threads,
    ):

        def compile_one(source: Path) -> str:
            output = f"{scratch}/{source.stem}.o"
            _run([*command, "-c", str(source), "-o", output], scratch)
            return output

        objects = threads.map(compile_one, sorted(SOURCES.glob(pattern)))
        output = Path(scratch) / library.name
        _run([*command, "-shared", "-pthread", *objects, "-o", str(output)], scratch)
        output.replace(library)


def _run(command: list[str], scratch: str) -> None:
    environment = {**os.environ, "TMPDIR": scratch}
    try:
        subprocess.run(
            command, check=True, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, env=environment
        )
    except subprocess.CalledProcessError as error:
        lines = error.stderr.splitlines() or [f"exit status {error.returncode}"]
        reason = next((line for line in lines if "error" in line), lines[-1])
        raise _NotAvailableError(f"{command[0]} failed: {reason[:500]}") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _NotAvailableError(f"{command[0]} failed: {error}") from None


def _file_name(instructions: InstructionSet) -> str:
    digest = hashlib.sha256(repr((FLAGS, instructions.compiler_flags)).encode())
    for path in sorted([*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h")]):
        digest.update(path.read_bytes())
    return f"baton-{instructions.name}-{digest.hexdigest()[:16]}.so"


def main(folder: Path) -> None:
    """Compiles all instruction sets of this kind of machine."""
    folder.mkdir(parents=True, exist_ok=True)
    for instructions in INSTRUCTION_SETS:
        if instructions.machine == platform.machine():
            compile_kernels(instructions, folder / _file_name(instructions))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
