"""compilers: finds installed C++ compilers, and whether kernels are possible; imports no torch."""

import shlex
import shutil
import sys
from collections.abc import Mapping
from importlib.util import find_spec

from engine.native.instructions import machine_instructions

VARIABLE = "BATON_NATIVE_KERNELS"
"""A folder of compiled kernels, or `off`."""


def compilers(environment: Mapping[str, str]) -> list[list[str]]:
    """The commands of installed compilers, in the order in which they are tried."""
    commands = [shlex.split(environment.get("CXX", "")), ["c++"], ["g++"], ["clang++"]]
    found = [command for command in commands if command and shutil.which(command[0])]
    return [*found, [sys.executable, "-m", "ziglang", "c++"]] if find_spec("ziglang") else found


def may_have_kernels(environment: Mapping[str, str]) -> bool:
    """Whether workers on this machine will have kernels, unless a compiler fails or a file is missing."""
    given = environment.get(VARIABLE)
    return given != "off" and machine_instructions() is not None and bool(given or compilers(environment))
