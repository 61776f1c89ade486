"""RankGroup: the processes of a worker's other tensor-parallel ranks, as rank 0 starts, watches and ends them.

Whatever goes wrong with one rank ends the worker: once a rank has left a step, the others wait for it in a collective,
and nobody can say where each of them is. So the first failure is kept, every rank is killed, and from then on `check`
raises.
"""

import logging
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

from baton.errors import BatonError, ClusterError, ConfigError, ModelError, WireError
from baton.step import KVConnectorOutput
from baton.system.standstill import wait_awake
from engine.ranks.channel import RankChannel, frame_of
from engine.ranks.messages import (
    FROM_RANK,
    TO_RANK,
    FromRank,
    Loaded,
    News,
    RankFailed,
    Ready,
    Report,
    Setup,
    StartFailed,
    StepFailed,
    Stop,
    ToRank,
)

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S = 10.0
"""A rank that was told to stop, or to which nobody is left, ends in this time or is killed."""

EXPLANATION_TIMEOUT_S = 1.0
"""Within this, a rank whose end made rank 0's step fail has said so, or is known to be gone."""


class RankLink:
    """One rank's process, and what it has said."""

    def __init__(
        self, setup: Setup, module: str, on_message: Callable[["RankLink", FromRank | None], None]
    ) -> None:
        """Starts the process. `on_message` is called on a thread of the link's own, with None when the line ends."""
        self.rank = setup.rank
        self.loaded: Loaded | None = None
        self.is_ready = False
        self.report = Report({}, ())
        self.news: queue.SimpleQueue[KVConnectorOutput] = queue.SimpleQueue()
        self._on_message = on_message
        ours, theirs = socket.socketpair()
        self.channel: RankChannel[ToRank, FromRank] = RankChannel(ours, TO_RANK, FROM_RANK)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=2,  # what the worker itself says on stdout is for whoever started it
                pass_fds=(theirs.fileno(), setup.meeting_file),
                # A rank finds our modules where this process did, which may be Ray's doing.
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        self._reader = threading.Thread(target=self._read, name=f"rank-{self.rank}", daemon=True)
        self._reader.start()
        self.channel.send(setup)

    def close(self) -> None:
        """Ends the line, and the process if it still runs."""
        self.channel.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._reader.join()

    def how_it_ended(self) -> str:
        """For a message. The line is closed, so the process has ended or is about to."""
        try:
            code = self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return f"rank {self.rank} (pid {self.process.pid}) closed its line and went on"
        end = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return f"rank {self.rank} (pid {self.process.pid}) {end}"

    def _read(self) -> None:
        try:
            while (message := self.channel.receive()) is not None:
                self._on_message(self, message)
        except WireError as error:
            self._on_message(self, RankFailed(f"what it said cannot be read: {error}"))
        self._on_message(self, None)


class RankGroup:
    """Ranks 1 and up. Methods are for one thread at a time, the engine's or whoever starts and stops the worker."""

    def __init__(
        self,
        setups: Sequence[Setup],
        on_news: Callable[[], None],
        on_failure: Callable[[], None],
        module: str = "engine.ranks.entry",
    ) -> None:
        """Starts a process for each, as `python -m module`. On threads of the group, `on_news` is called after `serve`
        when there is something to ask for, and `on_failure` when a rank has failed, to end a wait for it."""
        self.num_computed = 0
        """Plans whose results rank 0 has."""
        self._on_news = on_news
        self._on_failure = on_failure
        self._changed = threading.Condition()
        self._failure: Exception | None = None
        self._is_serving = False
        self._is_stopping = False
        self._links: list[RankLink] = []
        try:
            for setup in setups:
                self._links.append(RankLink(setup, module, self._take))
        except OSError as error:
            self.stop()
            raise ClusterError(f"cannot start rank {len(self._links) + 1} of the worker: {error}") from error

    @property
    def links(self) -> Sequence[RankLink]:
        return self._links

    def wait_until_loaded(self, timeout_s: float) -> tuple[Loaded, ...]:
        """What each rank said when it was. Raises what a rank could not be built for, or ClusterError."""
        self._wait(lambda link: link.loaded is not None, "loaded its model", timeout_s)
        return tuple(link.loaded for link in self._links if link.loaded is not None)

    def wait_until_ready(self, timeout_s: float) -> None:
        """Until each rank's collectives are connected. Raises as the former."""
        self._wait(lambda link: link.is_ready, "connected to the others", timeout_s)

    def serve(self) -> None:
        """From now on a failure is the engine's to take notice of."""
        self._is_serving = True
        if self._failure is not None:
            self._on_news()

    def send(self, message: ToRank) -> None:
        """To every rank, in the order of the calls; a rank that is gone hears nothing."""
        frame = frame_of(TO_RANK, message)
        for link in self._links:
            self._send_frame(link, frame)

    def send_to(self, link: RankLink, message: ToRank) -> None:
        """To one of them."""
        self._send_frame(link, frame_of(TO_RANK, message))

    def check(self) -> None:
        """RuntimeError if a rank has failed."""
        if self._failure is not None:
            raise RuntimeError(str(self._failure)) from self._failure

    def explain(self, step: int, error: Exception) -> RuntimeError:
        """Why rank 0 failed to compute a step, which ends all ranks: another one may be the reason."""
        self._wait_for_failure()
        self._fail(RuntimeError(f"rank 0 failed to compute step {step}: {error}"))
        return RuntimeError(str(self._failure))

    def explain_start(self, error: Exception) -> Exception:
        """Why rank 0 could not get ready: what another one failed at, if it says so, else rank 0's own error."""
        self._wait_for_failure()
        return self._failure or error

    def stop(self) -> None:
        """Ends every process: by itself if all is well, else by force. To be called once, whatever else was."""
        self.begin_stop()
        deadline = time.monotonic() + STOP_TIMEOUT_S
        is_well = self._is_serving and self._failure is None  # one that still loads has nothing to lose
        for link in self._links if is_well else ():
            try:
                link.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                logger.warning("rank %d did not stop within %g s", link.rank, STOP_TIMEOUT_S)
        for link in self._links:
            link.close()

    def begin_stop(self) -> None:
        """Tells the ranks to end, if they were not told yet."""
        if not self._is_stopping:
            self._is_stopping = True
            self.send(Stop())

    def _wait(self, is_done: Callable[[RankLink], bool], what: str, timeout_s: float) -> None:
        with self._changed:
            is_over = partial(
                self._changed.wait_for, lambda: self._failure is not None or all(map(is_done, self._links))
            )
            wait_awake(is_over, timeout_s)
            late = [str(link.rank) for link in self._links if not is_done(link)]
        if self._failure is not None:
            raise self._failure
        if late:
            raise ClusterError(
                f"rank {' and '.join(late)} of the worker had not {what} within {timeout_s:g} s "
                "(cluster.start_timeout_s, engine.rank_timeout_s)"
            )

    def _wait_for_failure(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None, EXPLANATION_TIMEOUT_S)

    def _take(self, link: RankLink, message: FromRank | None) -> None:
        """On the link's thread."""
        match message:
            case News(news):
                link.news.put(news)
                self._notify()
            case Report():
                link.report = message
            case Loaded():
                with self._changed:
                    link.loaded = message
                    self._changed.notify_all()
            case Ready():
                with self._changed:
                    link.is_ready = True
                    self._changed.notify_all()
            case StartFailed(kind, error):
                self._fail(_start_error(link.rank, kind, error))
            case StepFailed(step, error):
                self._fail(RuntimeError(f"rank {link.rank} failed to compute step {step}: {error}"))
            case RankFailed(error):
                how = f"rank {link.rank} failed: {error}"
                self._fail(RuntimeError(how) if self._is_serving else ClusterError(how))
            case None if not self._is_stopping and self._failure is None:
                how = link.how_it_ended()
                self._fail(RuntimeError(how) if self._is_serving else ClusterError(f"{how} before it served"))

    def _fail(self, failure: Exception) -> None:
        """From any thread. The first one counts: the rest follows from it."""
        with self._changed:
            if self._failure is not None or self._is_stopping:
                return
            self._failure = failure
            self._changed.notify_all()
        logger.error("the worker's ranks end: %s", failure)
        for link in self._links:
            link.process.kill()
        self._on_failure()
        self._notify()

    def _notify(self) -> None:
        if self._is_serving:
            self._on_news()

    def _send_frame(self, link: RankLink, frame: bytes) -> None:
        if self._failure is not None:
            return
        try:
            link.channel.send_frame(frame)
        except BlockingIOError:
            self._fail(
                RuntimeError(f"rank {link.rank} (pid {link.process.pid}) does not read what it is told")
            )
        except OSError:  # it is gone: its thread finds out how
            return


def _start_error(rank: int, kind: str, error: str) -> BatonError:
    """A rank's own error as ours: what is wrong with the configuration or the model is not the rank's alone."""
    kinds: dict[str, type[BatonError]] = {"ConfigError": ConfigError, "ModelError": ModelError}
    return kinds[kind](error) if kind in kinds else ClusterError(f"rank {rank} could not start: {error}")
