"""open_regular: opens a file that is read at once; a pipe in its place is an error instead of a wait without end."""

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO


def open_regular(path: Path) -> BinaryIO:
    """Opens a file for reading. OSError if it is no regular file."""
    file = open_at_once(path)
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return file


def open_at_once(path: Path) -> BinaryIO:
    """Opens a file for reading. Does not wait until another process opens a pipe of this name: without such a process,
    the content is empty."""
    file = open(path, "rb", opener=_without_waiting)  # noqa: SIM115 - the caller closes it
    os.set_blocking(file.fileno(), True)
    return file


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)
