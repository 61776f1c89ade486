"""RankGroup: starts, watches and ends the processes of a worker's other tensor-parallel ranks, on rank 0.

Any failure of a rank ends the worker. Once a rank has left a step, the other ranks wait for it in a
collective call, and their progress is unknown. So the group stores the first failure and kills every rank;
from then on `check` raises.
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

from baton.clock import SystemClock
from baton.errors import BatonError, ClusterError, ConfigError, ModelError, WireError
from baton.step import KVConnectorOutput
from baton.system.module_command import module_command
from baton.system.progress import Progress, ProgressObserver
from baton.system.standstill import pace_of, wait_awake
from engine.ranks.channel import RankChannel, frame_of
from engine.ranks.messages import (
    FROM_RANK,
    TO_RANK,
    FromRank,
    KVOutput,
    Loaded,
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
"""A rank that was told to stop ends within this time or is killed. A rank that has lost rank 0 ends at once."""

EXPLANATION_TIMEOUT_S = 1.0
"""If another rank's failure made rank 0's step fail, that rank's report or end arrives within this time."""

_OTHER_END_S = 0.5
"""If the end of another rank's process made a rank's step fail, that process closes its connection within this time."""

_SILENCE_MARGIN_S = 2.0
"""A rank may be silent for this much longer than a step may take, since it reports nothing during a step."""


class RankEnded(RuntimeError):
    """The process of a rank has ended by itself, for example for lack of memory."""


class RankLink:
    """One rank's process, and its latest reports."""

    def __init__(
        self,
        setup: Setup,
        module: str,
        max_step_s: float,
        on_message: Callable[["RankLink", FromRank | None], None],
    ) -> None:
        """Starts the process. `on_message` runs on the link's own thread, with None when the connection closes."""
        self.rank = setup.rank
        self.loaded: Loaded | None = None
        self.is_ready = False
        self.has_failed = False
        """Whether the rank has reported a failed step, after which it ends."""
        self.is_lost = False
        """Whether the process has ended, or soon ends, without such a report."""
        self.report = Report({}, ())
        self.outputs: queue.SimpleQueue[KVConnectorOutput] = queue.SimpleQueue()
        self._on_message = on_message
        ours, theirs = socket.socketpair()
        self.channel: RankChannel[ToRank, FromRank] = RankChannel(ours, TO_RANK, FROM_RANK)
        with theirs:
            self.process = subprocess.Popen(
                module_command(module, str(theirs.fileno())),
                stdin=subprocess.DEVNULL,
                stdout=2,  # stdout is reserved for the worker's messages to its parent
                pass_fds=(theirs.fileno(), setup.meeting_file),
                # A rank must import modules from the same folders as this process; Ray may have changed them.
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        what = f"rank {self.rank} (pid {self.process.pid})"
        self.progress = Progress(what, SystemClock(), max_step_s + _SILENCE_MARGIN_S)
        """A piece of work ends when the rank sends its next message."""
        self._reader = threading.Thread(target=self._read, name=f"rank-{self.rank}", daemon=True)
        self._reader.start()
        self.channel.send(setup)

    def close(self) -> None:
        """Closes the connection, and kills the process if it still runs."""
        self.channel.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._reader.join()

    def how_it_ended(self) -> str:
        """How the process ended, as text for a message.

        Call it when the connection is closed, so that the process has ended or soon ends.
        """
        try:
            code = self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return (
                f"rank {self.rank} (pid {self.process.pid}) closed its connection, but its process still runs"
            )
        end = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return f"rank {self.rank} (pid {self.process.pid}) {end}"

    def _read(self) -> None:
        try:
            while (message := self.channel.receive()) is not None:
                self.progress.begin()
                self._on_message(self, message)
        except WireError as error:
            self._on_message(self, RankFailed(f"its message cannot be read: {error}"))
        self.progress.end()
        self._on_message(self, None)


class RankGroup:
    """Ranks 1 and up. Only one thread at a time may call its methods."""

    def __init__(
        self,
        setups: Sequence[Setup],
        max_step_s: float,
        on_kv_output: Callable[[], None],
        on_failure: Callable[[], None],
        module: str = "engine.ranks.entry",
    ) -> None:
        """Starts a process for each setup, as `python -m module`. The group's threads call the two callbacks.

        After `serve`, they call `on_kv_output` when there are outputs to collect. They call `on_failure` when a rank
        fails. `max_step_s`: the longest time of a step. A rank that sends nothing for longer has failed, too.
        """
        self.num_computed = 0
        """How many plans rank 0 has computed."""
        self._max_step_s = max_step_s
        self._on_kv_output = on_kv_output
        self._on_failure = on_failure
        self._changed = threading.Condition()
        self._failure: Exception | None = None
        self._first_report: Exception | None = None
        """Of a failed step. Later reports follow from it."""
        self._is_serving = False
        self._stopping = threading.Event()
        self._links: list[RankLink] = []
        try:
            for setup in setups:
                self._links.append(RankLink(setup, module, max_step_s, self._handle))
        except OSError as error:
            self.stop()
            raise ClusterError(f"cannot start rank {len(self._links) + 1} of the worker: {error}") from error

    @property
    def links(self) -> Sequence[RankLink]:
        return self._links

    def wait_until_loaded(self, timeout_s: float) -> tuple[Loaded, ...]:
        """Returns each rank's `Loaded` message. Raises the error of a rank that could not be built, or ClusterError."""
        self._wait(lambda link: link.loaded is not None, "loaded its model", timeout_s)
        return tuple(link.loaded for link in self._links if link.loaded is not None)

    def wait_until_ready(self, timeout_s: float) -> None:
        """Waits until each rank's collectives are connected. Raises the same errors as
        `wait_until_loaded`."""
        self._wait(lambda link: link.is_ready, "connected to the other ranks", timeout_s)

    def serve(self) -> None:
        """Begins to call `on_kv_output`, and to watch for silent ranks. From now on the engine handles failures."""
        self._is_serving = True
        threading.Thread(target=self._watch, name="rank-watch", daemon=True).start()
        if self._failure is not None:
            self._on_kv_output()

    def send(self, message: ToRank) -> None:
        """Sends to every rank, in the order of the calls; skips ranks whose processes are gone."""
        frame = frame_of(TO_RANK, message)
        for link in self._links:
            self._send_frame(link, frame)

    def send_to(self, link: RankLink, message: ToRank) -> None:
        """Sends to one rank."""
        self._send_frame(link, frame_of(TO_RANK, message))

    def check(self) -> None:
        """RuntimeError if a rank has failed."""
        if self._failure is not None:
            raise RuntimeError(str(self._failure)) from self._failure

    @property
    def has_lost_rank(self) -> bool:
        """Whether the worker failed because a rank's process ended after `serve`."""
        return isinstance(self._failure, RankEnded)

    def explain(self, step: int, error: Exception) -> str:
        """Why rank 0 failed to compute a step; another rank may be the reason. Ends all ranks."""
        self._wait_for_failure()
        self._fail(RuntimeError(f"rank 0 failed to compute step {step}: {error}"))
        return str(self._failure)

    def explain_start(self, error: Exception) -> Exception:
        """Why rank 0 could not get ready: another rank's error if it reported one, else rank 0's error."""
        self._wait_for_failure()
        return self._failure or error

    def stop(self) -> None:
        """Ends every process; without a failure, the processes may stop by themselves first. Call it once."""
        self.begin_stop()
        deadline = time.monotonic() + STOP_TIMEOUT_S
        waits_for_ranks = (
            self._is_serving and self._failure is None
        )  # a rank that still loads may be killed at once
        for link in self._links if waits_for_ranks else ():
            try:
                link.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                logger.warning("rank %d did not stop within %g s", link.rank, STOP_TIMEOUT_S)
        for link in self._links:
            link.close()

    def begin_stop(self) -> None:
        """Tells the ranks to stop, once."""
        if not self._stopping.is_set():
            self._stopping.set()
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

    def _watch(self) -> None:
        """Fails if a rank is silent for too long. Only this notices a stopped rank while the worker waits for its KV.

        No step runs then, so rank 0 waits for no rank in a collective call.
        """
        pace_s = pace_of(self._max_step_s)
        observer = ProgressObserver(tuple(link.progress for link in self._links), pace_s)
        while self._failure is None and not self._stopping.wait(pace_s / 2):
            if (hang := observer.look(time.monotonic())) is not None:
                self._fail(RuntimeError(hang))

    def _wait_for_failure(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None, EXPLANATION_TIMEOUT_S)
            if self._first_report is not None:  # it counts only after `_is_other_lost`
                self._changed.wait_for(
                    lambda: self._failure is not None or self._stopping.is_set(), STOP_TIMEOUT_S
                )

    def _handle(self, link: RankLink, message: FromRank | None) -> None:
        """Handles a message of a rank; runs on the link's thread."""
        if message is None:
            with self._changed:
                link.is_lost = not link.has_failed
                self._changed.notify_all()
        match message:
            case KVOutput(output):
                link.outputs.put(output)
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
                with self._changed:
                    link.has_failed = True
                    if self._first_report is None:
                        how = f"rank {link.rank} failed to compute step {step}: {error}"
                        self._first_report = RuntimeError(how)
                if not self._is_other_lost(link):
                    self._fail(self._first_report)
            case RankFailed(error):
                how = f"rank {link.rank} failed: {error}"
                self._fail(RuntimeError(how) if self._is_serving else ClusterError(how))
            case None if link.is_lost and not self._stopping.is_set() and self._failure is None:
                how = link.how_it_ended()
                self._fail(RankEnded(how) if self._is_serving else ClusterError(f"{how} before it served"))

    def _is_other_lost(self, link: RankLink) -> bool:
        """Whether another rank is lost. Then the step of this rank failed for that reason, and the other link's thread
        reports it."""
        others = [other for other in self._links if other is not link]
        if not others:
            return False
        with self._changed:
            return self._changed.wait_for(lambda: any(other.is_lost for other in others), _OTHER_END_S)

    def _fail(self, failure: Exception) -> None:
        """Ends all ranks; may be called from any thread.

        Stores only the first failure: later ones follow from it.
        """
        with self._changed:
            if self._failure is not None or self._stopping.is_set():
                return
            self._failure = failure
            self._changed.notify_all()
        logger.error("ending all ranks of this worker: %s", failure)
        for link in self._links:
            link.process.kill()
        self._on_failure()
        self._notify()

    def _notify(self) -> None:
        if self._is_serving:
            self._on_kv_output()

    def _send_frame(self, link: RankLink, frame: bytes) -> None:
        if self._failure is not None:
            return
        try:
            link.channel.send_frame(frame)
        except BlockingIOError:
            self._fail(RuntimeError(f"rank {link.rank} (pid {link.process.pid}) does not read its messages"))
        except OSError:  # the process is gone; the link's thread reports how it ended
            return


def _start_error(rank: int, kind: str, error: str) -> BatonError:
    """The error that rank 0 raises for a rank's error. Errors of configuration and model keep their class, since they
    concern the whole worker."""
    kinds: dict[str, type[BatonError]] = {"ConfigError": ConfigError, "ModelError": ModelError}
    return kinds[kind](error) if kind in kinds else ClusterError(f"rank {rank} could not start: {error}")
