"""Which assembler and which cache folder Triton uses for kernels; checked before anything is compiled."""

import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import triton
from triton.backends.nvidia.compiler import get_ptxas

from baton.errors import ConfigError

PTXAS_VARIABLES = ("TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH")
"""Triton 3.6 reads the second variable from compute capability 10.0 on, Triton 3.9 from 9.0 on. For other GPUs, both
versions read the first variable."""
FIXED_PTXAS = (13, 3)
"""The first version without a fault: earlier ones may reuse registers that an asynchronous WGMMA still reads (Triton,
issue 11781)."""
HOPPER = 9
"""Major compute capability of the GPUs that have WGMMA."""
TIMEOUT_S = 30.0
FAULTS = ("CUDA error", "Triton Error [CUDA]")
"""The first words of the errors that PyTorch and Triton raise after a kernel has failed."""


@dataclass(frozen=True, slots=True)
class Compiler:
    """The assembler and the cache for one GPU."""

    ptxas: str
    """The assembler's path."""
    version: str
    """The assembler's version, such as 13.5.37."""
    cache_dir: str
    """Where compiled kernels are kept."""
    is_suspect: bool
    """Whether the assembler is known to produce wrong code for some kernels on this GPU."""

    @property
    def advice(self) -> str:
        """The end of a message about wrong kernels."""
        return (
            f"They were assembled by ptxas {self.version} ({self.ptxas}); set TRITON_PTXAS_PATH to a ptxas of CUDA "
            f"13.3 or later (docs/gpu.md)"
        )


@contextmanager
def naming_assembler(compiler: Compiler, device: torch.device) -> Iterator[None]:
    """A context for the first launches of all kernels. If one of them fails, ConfigError names the assembler.

    With ptxas 12.8, float32 prefill ended with an illegal memory access on an H200.
    """
    try:
        yield
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except RuntimeError as error:
        what = str(error).partition("\n")[0]
        if not what.startswith(FAULTS) or "out of memory" in what:
            raise
        raise ConfigError(f"a Triton kernel failed on this GPU: {what}. {compiler.advice}") from error


def find_compiler(capability: tuple[int, int]) -> Compiler:
    """The compiler for a GPU of this compute capability.

    TRITON_PTXAS_PATH applies to every GPU, unless TRITON_PTXAS_BLACKWELL_PATH is set, too. Which of the two
    variables Triton reads depends on the GPU and on Triton's version. ConfigError names a variable whose path
    is no ptxas; Triton itself would silently use its bundled assembler.
    """
    for variable in PTXAS_VARIABLES:
        if path := os.environ.get(variable):
            _version(path, f"{variable}: got '{path}'")
    if path := os.environ.get(PTXAS_VARIABLES[0]):
        os.environ.setdefault(PTXAS_VARIABLES[1], path)
    major, minor = capability
    ptxas = str(get_ptxas(10 * major + minor).path)
    version = _version(ptxas, f"Triton {triton.__version__} uses '{ptxas}' to assemble kernels")
    is_fixed = tuple(map(int, version.split(".")[:2])) >= FIXED_PTXAS
    return Compiler(ptxas, version, _cache_dir(), is_suspect=major == HOPPER and not is_fixed)


def _version(path: str, what: str) -> str:
    """The version of a ptxas; if the program does not work as one, ConfigError, whose text begins with `what`."""
    try:
        done = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(f"{what}, which does not run as ptxas: {error}") from error
    found = re.search(r"release \d+\.\d+, V(\d+(?:\.\d+)+)", done.stdout)
    if found is None:
        raise ConfigError(f"{what}, which is not ptxas: `{path} --version` names no release of CUDA")
    return found.group(1)


def _cache_dir() -> str:
    """Triton's cache folder; ConfigError if it is not writable."""
    folder = str(triton.knobs.cache.dir)
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ConfigError(
            f"compiled kernels cannot be kept in '{folder}': {error}; set TRITON_CACHE_DIR to a folder that only this "
            "user may write"
        ) from error
    return folder
