"""Lent CPUs: while a worker computes nothing, other workers of its fleet on this machine compute with its CPUs.

The workers share a small file in memory, with an entry for each CPU (engine/native/lent_cpus.h). Only Baton's own
kernels (engine/native/) borrow CPUs.
"""

import ctypes
import os
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from baton.step import SchedulerOutput
from engine.pipeline import Pipeline, StepResult

FOLDER = Path("/dev/shm")
MOST_CPUS = 1024
"""CPUs with higher numbers are neither lent nor borrowed."""
_FILE_BYTES = 64 * MOST_CPUS
_PREFIX = "baton-cpus-1-"
"""Of the files' names, with the version of their format."""


class LentCpus:
    """What this process lends and borrows; in a process, there may be one at most."""

    def __init__(
        self,
        library: ctypes.CDLL,
        own: Collection[int],
        others: Collection[int],
        fleet: str,
        folder: Path = FOLDER,
    ) -> None:
        """Lends the CPUs `own` whenever no step is under way, from the end of the first step on.

        A step also computes with those of the CPUs `others` that other workers lend then: workers of the same `fleet`
        with the same parent process. OSError if there is no memory to share with them.
        """
        library.baton_borrowed_ns.restype = ctypes.c_int64
        self._library = library
        array, count = ctypes.c_int64 * MOST_CPUS, ctypes.c_int64
        ours, theirs = (sorted(cpu for cpu in cpus if cpu < MOST_CPUS) for cpus in (own, others))
        with open(_open_file(folder, fleet), "rb+") as file:
            error = library.baton_open_lent_cpus(
                count(file.fileno()), array(*ours), count(len(ours)), array(*theirs), count(len(theirs))
            )
        if error:
            raise OSError(error, os.strerror(error))

    def begin_step(self) -> None:
        """Takes back the own CPUs; from now on, lent CPUs of others may help."""
        self._library.baton_begin_step()

    def end_step(self) -> None:
        """Lends the own CPUs, and gives back those of others."""
        self._library.baton_end_step()

    def borrowed_s(self) -> float:
        """How long CPUs of others have computed for this process, summed over these CPUs."""
        return float(self._library.baton_borrowed_ns()) / 1e9


class LendingPipeline:
    """A pipeline that lends the worker's CPUs whenever no step is under way."""

    def __init__(self, inner: Pipeline, cpus: LentCpus) -> None:
        self._inner = inner
        self._cpus = cpus
        self._num_under_way = 0
        cpus.end_step()  # loading is over

    def num_ahead(self, plan: SchedulerOutput) -> int:
        return self._inner.num_ahead(plan)

    def submit(self, plan: SchedulerOutput) -> None:
        if self._num_under_way == 0:
            self._cpus.begin_step()
        self._num_under_way += 1
        self._inner.submit(plan)

    def take_result(self) -> StepResult:
        result = self._inner.take_result()
        self._num_under_way -= 1
        if self._num_under_way == 0:
            self._cpus.end_step()
        return result

    def close(self) -> None:
        self._inner.close()
        self._cpus.end_step()


def _open_file(folder: Path, fleet: str) -> int:
    """Opens the file of this fleet's workers, and makes it if it is missing. Removes files whose fleets have ended.

    Workers of one fleet on one machine have the same parent: a command of Baton, or Ray's process for this node.
    """
    prefix = f"{_PREFIX}{os.geteuid()}-"
    for path in folder.glob(f"{prefix}*"):
        parent = path.name.removeprefix(prefix).partition("-")[0]
        if not Path("/proc", parent).exists():
            with suppress(OSError):  # another user may have made it
                path.unlink()
    path = folder / f"{prefix}{os.getppid()}-{fleet}"
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        if os.fstat(file).st_uid != os.geteuid():
            raise PermissionError(f"{path} belongs to another user")
        os.posix_fallocate(file, 0, _FILE_BYTES)  # so that no write fails later
    except OSError:
        os.close(file)
        raise
    return file
