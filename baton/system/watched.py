"""Watched: the content of files, read again once they have changed; does not know what they hold."""

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

_Seen = tuple[tuple[int, int, int] | None, ...]


class Watched(Generic[Content]):
    """The files are checked when the content is requested, at most once a second. Any thread may request it.

    A change that cannot be used is logged once, and the previous content stays. For example, a certificate and its
    key may be replaced one after the other.
    """

    def __init__(self, paths: Sequence[Path], read: Callable[[], Content], clock: Clock) -> None:
        """Reads at once; `read` raises ConfigError if the files cannot be used."""
        self._paths = paths
        self._read = read
        self._clock = clock
        self._lock = threading.Lock()
        self._seen = self._look()
        self._looked_at = clock.now()
        self._content = read()

    def current(self) -> Content:
        with self._lock:
            now = self._clock.now()
            if now - self._looked_at >= _LOOK_INTERVAL_S:
                self._looked_at = now
                self._read_if_changed()
            return self._content

    def _read_if_changed(self) -> None:
        seen = self._look()
        if seen == self._seen:
            return
        self._seen = seen
        names = ", ".join(map(str, self._paths))
        try:
            self._content = self._read()
        except ConfigError as error:
            logger.error("%s changed but cannot be used; keeping the previous content: %s", names, error)
        else:
            logger.warning("reloaded %s, which changed", names)

    def _look(self) -> _Seen:
        """Identifies a version of the files; taken before they are read, never after."""
        return tuple(map(_stamp, self._paths))


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino, status.st_size
