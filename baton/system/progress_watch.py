"""ProgressWatch: a thread that notices if a worker's thread stands still, reports that and ends the process.

Each process of a worker has one: rank 0 for all of its threads, another rank for the thread that moves KV
blocks.
"""

import faulthandler
import logging
import os
import sys
import threading
from collections.abc import Callable

from baton.clock import Clock
from baton.system.progress import Progress, ProgressObserver

logger = logging.getLogger(__name__)

EXIT_HUNG = 70
"""The exit code of a hung process. Other workers exit with 0 or 1 (worker/process.py), unless a signal ends them."""

_LOOK_EVERY_S = 0.5
PACE_S = 2.0
"""If the watch looks later than after this time, the process stood still meanwhile."""
LONG_STANDSTILL_S = 1.0
"""A standstill of this length is logged: streams stalled meanwhile, and nothing else shows it."""
LAST_WORDS_S = 0.5
"""Time to send heartbeats that say `hung`."""


def end_process() -> None:
    """Ends this process at once: a thread that stands still cannot be joined, and may hold any lock."""
    os._exit(EXIT_HUNG)


class ProgressWatch:
    """Looks at all threads that do a worker's work. If a thread stands still, `hang` says which one."""

    def __init__(
        self,
        observed: tuple[Progress, ...],
        clock: Clock,
        on_hang: Callable[[], None],
        end: Callable[[], None] = end_process,
        last_words_s: float = LAST_WORDS_S,
        on_look: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_hang` is called once, on the watch's thread, and must not block; `end` follows `last_words_s` later.
        `on_look` is called by `start`, and then at each look, on the watch's thread.
        """
        self._observer = ProgressObserver(observed, PACE_S)
        self._on_look = on_look
        self._clock = clock
        self._on_hang = on_hang
        self._end = end
        self._last_words_s = last_words_s
        self._is_stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="progress-watch", daemon=True)
        self.hang: str | None = None

    def start(self) -> None:
        self._on_look()
        self._thread.start()

    def stop(self) -> None:
        """Ends the watch. May be repeated."""
        self._is_stopping.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        looked_at = self._clock.now()
        while not self._is_stopping.wait(_LOOK_EVERY_S):
            now = self._clock.now()
            if (late_s := now - looked_at - _LOOK_EVERY_S) >= LONG_STANDSTILL_S:
                logger.warning(
                    "this process stood still for %.1f s: it was suspended, or got no CPU time", late_s
                )
            looked_at = now
            self._on_look()
            if (hang := self._observer.look(now)) is not None:
                self._report(hang)
                return

    def _report(self, hang: str) -> None:
        self.hang = hang
        self._on_hang()
        logger.critical("%s; this process ends itself. The stacks of its threads follow on stderr", hang)
        faulthandler.dump_traceback(sys.__stderr__ or 2, all_threads=True)
        if not self._is_stopping.wait(self._last_words_s):
            self._end()
