"""exclusive: one process at a time, on this host or on a volume that hosts share.

A process that dies releases its lock.
"""

import errno
import fcntl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP}


@contextmanager
def exclusive(path: Path, on_wait: Callable[[], None] = lambda: None) -> Iterator[bool]:
    """Locks the file at `path`, which is created if necessary; calls `on_wait` if it must wait for the lock.

    Yields False if the file system has no locks: then the body runs without a lock. On NFS, a lock is valid
    for all hosts.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as lock:
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                on_wait()
                fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            yield False
            return
        yield True
