"""Lent CPUs: while a worker computes nothing, other workers of its fleet on this machine compute with its CPUs.

The workers share a small file in memory, with an entry for each CPU (engine/native/lent_cpus.h). Only Baton's own
kernels (engine/native/) borrow CPUs.
"""

import ctypes
import fcntl
import os
import stat
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from baton.step import SchedulerOutput
from engine.pipeline import Pipeline, StepResult

FOLDER = Path("/dev/shm")
MOST_CPUS = 1024
"""CPUs with this number or a higher one are not borrowed. A worker with such a CPU neither lends nor borrows."""
_FILE_BYTES = 64 * MOST_CPUS
_PREFIX = "baton-cpus-1-"
"""The files' names begin with this prefix, which contains the version of their format."""


def remove_unused_files(folder: Path = FOLDER) -> None:
    """Removes this user's files whose workers all died, for example while they loaded."""
    for path in folder.glob(f"{_PREFIX}{os.geteuid()}-*"):
        with suppress(OSError):
            status = path.lstat()
            if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
                with path.open("rb") as file:
                    _remove_unless_used(path, file.fileno())


class LentCpus:
    """What this process lends and borrows; a process may have at most one LentCpus."""

    def __init__(
        self,
        library: ctypes.CDLL,
        own: Collection[int],
        others: Collection[int],
        fleet: str,
        folder: Path = FOLDER,
    ) -> None:
        """From the first `end_step` on, lends the CPUs `own`, all below MOST_CPUS, whenever no step is under way.

        A step also computes with those of the CPUs `others` that other workers lend at that time. The other workers
        belong to the same `fleet`, and have the same parent process. OSError if there is no memory to share with
        them.
        """
        library.baton_borrowed_ns.restype = ctypes.c_int64
        self._library = library
        array, count = ctypes.c_int64 * MOST_CPUS, ctypes.c_int64
        ours, theirs = sorted(own), sorted(cpu for cpu in others if cpu < MOST_CPUS)
        self._file = _SharedFile(folder, fleet)
        error = library.baton_open_lent_cpus(
            count(self._file.descriptor), array(*ours), count(len(ours)), array(*theirs), count(len(theirs))
        )
        if error:
            self._file.close()
            raise OSError(error, os.strerror(error))

    def begin_step(self) -> None:
        """Takes back this process's own CPUs. From now on, this process may borrow CPUs that other processes lend."""
        self._library.baton_begin_step()

    def end_step(self) -> None:
        """Lends this process's own CPUs, and gives back the CPUs that it borrowed."""
        self._library.baton_end_step()

    def close(self) -> None:
        """Closes the shared file; no step may follow. If this process's CPUs are lent now, they stay lent."""
        self._file.close()

    def borrowed_s(self) -> float:
        """How long CPUs of other processes have computed for this process, summed over these CPUs."""
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


class _SharedFile:
    """The file that a fleet's workers on this machine share. The last worker that closes the file removes it.

    These workers have the same parent: a command of Baton, or Ray's process for this node. Each worker holds a
    shared lock, which the system releases when a process dies.
    """

    def __init__(self, folder: Path, fleet: str) -> None:
        """Opens the file, and makes it if it is missing. Removes files whose workers all died."""
        remove_unused_files(folder)
        self._path = folder / f"{_PREFIX}{os.geteuid()}-{os.getppid()}-{fleet}"
        while not self._open():
            continue

    def _open(self) -> bool:
        """Opens and locks the file; returns False if another worker has just removed it."""
        self.descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            status = os.fstat(self.descriptor)
            if status.st_uid != os.geteuid():
                raise PermissionError(f"{self._path} belongs to another user")
            fcntl.flock(self.descriptor, fcntl.LOCK_SH)
            if os.fstat(self.descriptor).st_nlink > 0:
                os.posix_fallocate(self.descriptor, 0, _FILE_BYTES)  # so that no write fails later
                return True
        except OSError as error:
            os.close(self.descriptor)
            error.filename = error.filename or str(self._path)
            raise
        os.close(self.descriptor)
        return False

    def close(self) -> None:
        _remove_unless_used(self._path, self.descriptor)
        os.close(self.descriptor)


def _remove_unless_used(path: Path, file: int) -> None:
    """Removes the file if no other process has locked it; keeps the lock."""
    with suppress(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(file).st_nlink > 0:
            path.unlink()
