"""The process' memory: keeps freed buffers for reuse, and reads the available memory; knows no tensor."""

import ctypes
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from baton.system.cgroups import cgroups

_ROOT = Path("/")

# <malloc.h>
_M_TRIM_THRESHOLD = -1
_M_TOP_PAD = -2
_M_MMAP_THRESHOLD = -3

_KEEP_BYTES = 2**30
_GROW_BYTES = 64 * 2**20

RETURN_EVERY_BYTES = 64 * 2**20
"""How much a model's loading reads between two returns of freed memory: so much may be held in vain."""


def keep_freed_memory() -> bool:
    """Makes glibc reuse large buffers instead of returning them to the system; returns False without glibc.

    By default, glibc maps new memory for every buffer of more than about 100 KiB. The page faults of a step's
    activations took a quarter of a decode step at batch 32 (84 ms instead of 62 ms; SmolLM2 in bfloat16, two
    cores).
    """
    if not sys.platform.startswith("linux"):
        return False
    libc = ctypes.CDLL(None)
    try:
        mallopt = libc.mallopt
    except AttributeError:  # musl
        return False
    settings = {_M_MMAP_THRESHOLD: _KEEP_BYTES, _M_TRIM_THRESHOLD: _KEEP_BYTES, _M_TOP_PAD: _GROW_BYTES}
    return all(mallopt(parameter, value) == 1 for parameter, value in settings.items())


def return_freed_memory() -> None:
    """Returns the buffers that are free now to the system; does nothing without glibc.

    While a model is loaded, matrices are converted and packed. The buffers for this work may have as many bytes as all
    weights, and no step needs them again.
    """
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None)
    try:
        trim = libc.malloc_trim
    except AttributeError:  # musl
        return
    trim(ctypes.c_size_t(0))


def returning_freed_memory(on_loaded: Callable[[int, int], None]) -> Callable[[int, int], None]:
    """A callback for the progress of loading, in bytes. It calls `on_loaded`, and `return_freed_memory` each time that
    RETURN_EVERY_BYTES more are loaded.

    glibc cannot use a freed buffer again for an aligned one of the same size. So without this, the buffers of all
    layers would add up until the model is loaded.
    """
    returned_at = 0

    def on_progress(loaded_bytes: int, total_bytes: int) -> None:
        nonlocal returned_at
        if loaded_bytes - returned_at >= RETURN_EVERY_BYTES:
            returned_at = loaded_bytes
            return_freed_memory()
        on_loaded(loaded_bytes, total_bytes)

    return on_progress


def available_memory(root: Path = _ROOT) -> int:
    """Bytes that can be allocated without swapping: Linux' estimate, or less if the cgroups of this process allow
    less.

    Linux kills a process that exceeds its cgroup's limit, such as a container's, even if the machine has more memory.
    """
    return min(
        [_of_machine(root), *(room for folder in cgroups("memory", root) for room in _room_in(folder))]
    )


def _of_machine(root: Path) -> int:
    for line in (root / "proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return sys.maxsize  # Linux kernels from before 2014 have no such line


def _room_in(folder: Path) -> Iterator[int]:
    """Yields the bytes that one cgroup may still allocate; nothing if the cgroup has no limit. Cached pages of files
    count as free, since Linux can reclaim them."""
    try:
        is_version_1 = (folder / "memory.limit_in_bytes").exists()  # version 1 of cgroups
        limit, usage, prefix = (
            ("limit_in_bytes", "usage_in_bytes", "total_") if is_version_1 else ("max", "current", "")
        )
        most = int((folder / f"memory.{limit}").read_text())
        used = int((folder / f"memory.{usage}").read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        files = sum(int(stat[f"{prefix}{kind}_file"]) for kind in ("active", "inactive"))
    except (OSError, ValueError, KeyError):  # ValueError: "max", which is no limit
        return
    yield max(0, most - used + files)
