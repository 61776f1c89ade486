"""compilers: finds installed C++ compilers, and whether kernels are possible; imports no torch."""

import logging
import shlex
import shutil
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec

from baton.system.module_command import module_command
from engine.native.instructions import machine_instructions

logger = logging.getLogger(__name__)

NATIVE_KERNELS_VARIABLE = "BATON_NATIVE_KERNELS"
"""A folder of compiled kernels, or `off`."""


def compilers(environment: Mapping[str, str]) -> list[list[str]]:
    """The commands of installed compilers, in the order in which they are tried."""
    commands = [_words(environment.get("CXX", "")), ["c++"], ["g++"], ["clang++"]]
    found = [command for command in commands if command and shutil.which(command[0])]
    return [*found, module_command("ziglang", "c++")] if find_spec("ziglang") else found


@cache
def _words(cxx: str) -> list[str]:
    """The words of CXX; none, with one warning, if a shell could not read it, or the program is not installed."""
    try:
        words = shlex.split(cxx)
        if words and shutil.which(words[0]) is None:
            raise ValueError(f"program {words[0]} not found")
    except ValueError as error:
        logger.warning("CXX=%s is ignored: %s; correct or unset it", cxx, error)
        return []
    return words


def may_have_kernels(environment: Mapping[str, str]) -> bool:
    """Whether workers on this machine will have kernels, unless a compiler fails or a file is missing."""
    given = environment.get(NATIVE_KERNELS_VARIABLE)
    return given != "off" and machine_instructions() is not None and bool(given or compilers(environment))
