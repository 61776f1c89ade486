"""Watched: the content of files, read again once they have changed; does not know what they contain."""

import logging
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from baton.clock import Clock
from baton.errors import ConfigError

logger = logging.getLogger(__name__)

Content = TypeVar("Content")

_LOOK_INTERVAL_S = 1.0

LOST_GRACE_S = 5.0
"""How long content stays in use after its file is gone: a file may be replaced in two steps."""

_Seen = tuple[tuple[int, int, int, int] | None, ...]


class Lost(ConfigError):
    """The content must not be used any longer: the files are gone, or other users may have changed them."""


class UnreadableFiles(ConfigError):
    """The files could not be read. The cause may not be the files, but too many open files in this process."""


class Watched(Generic[Content]):
    """The files are checked when the content is requested, at most once a second. Any thread may request it.

    A change that cannot be used is logged once, and the previous content stays. For example, a certificate and its
    key may be replaced one after the other. After Lost, the previous content stays for LOST_GRACE_S only. After Lost
    and UnreadableFiles, the files are read again each time, changed or not.

    If reading takes long, an event loop calls `is_due`, then `reload` on a thread, and uses `latest` meanwhile.
    """

    def __init__(self, paths: Sequence[Path], read: Callable[[], Content], clock: Clock) -> None:
        """Reads at once; `read` raises ConfigError if the files cannot be used."""
        self._paths = paths
        self._read = read
        self._clock = clock
        self._lock = threading.RLock()
        self._seen = self._look()
        self._is_changed = False
        self._looked_at = clock.now()
        self._content = read()
        self._is_unread = False
        """The last version of the files has not been read."""
        self._lost: Lost | None = None
        self._lost_at = 0.0

    def current(self) -> Content:
        """The content, after reading changed files. Raises the error of `latest`."""
        with self._lock:
            if self.is_due():
                self.reload()
            return self.latest()

    def latest(self) -> Content:
        """The content when the files were last read; never waits. If `read` raised Lost, this method raises it, too,
        after LOST_GRACE_S, until `read` succeeds."""
        lost = self._lost
        if lost is not None and self._clock.now() - self._lost_at >= LOST_GRACE_S:
            raise lost
        return self._content

    def is_due(self) -> bool:
        """Looks at the files, at most once a second. True: they have changed, or the last attempt could not read them,
        so `reload` must read them. Waits for a running `reload`."""
        with self._lock:
            now = self._clock.now()
            if now - self._looked_at < _LOOK_INTERVAL_S:
                return False
            self._looked_at = now
            seen = self._look()
            self._is_changed, self._seen = seen != self._seen, seen
            self._is_unread |= self._is_changed
            return self._is_unread or self._lost is not None

    def reload(self) -> None:
        """Reads the files. Errors are logged, and change only what `latest` returns or raises."""
        with self._lock:
            self._read_again()

    def _read_again(self) -> None:
        names = ", ".join(map(str, self._paths))
        try:
            self._content = self._read()
        except Lost as error:
            if self._lost is None:
                self._lost_at = self._looked_at
                logger.error("%s: the previous content is used for %g s more: %s", names, LOST_GRACE_S, error)
            self._lost = error
        except ConfigError as error:
            was_unread, self._is_unread = self._is_unread, isinstance(error, UnreadableFiles)
            if self._is_changed or (was_unread and not self._is_unread):
                logger.error("%s changed but cannot be used; keeping the previous content: %s", names, error)
        else:
            self._lost, self._is_unread = None, False
            logger.warning("reloaded %s, which changed", names)

    def _look(self) -> _Seen:
        """Identifies a version of the files; taken before they are read, never after."""
        return tuple(map(_stamp, self._paths))


def _stamp(path: Path) -> tuple[int, int, int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    # `st_ctime_ns` also changes if the file's mode or owner changes.
    return status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_size
