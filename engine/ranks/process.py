"""One tensor-parallel rank of a worker as a process: `python -m engine.ranks.entry FD`, started by rank 0.

FD is the rank's end of the connection to rank 0 (engine/ranks/channel.py). Through this connection the rank
receives its setup, the same plans as rank 0 in the same order, and the same commands for its connector. The
process ends when the connection closes, so it never outlives rank 0.

    main thread      builds; then plans and commands, in the order of their arrival
    reader thread    the connection
    device thread    if there is one (engine/pipeline.py)
    transfer thread  KV blocks in and out (kv_transfer/)
"""

import json
import logging
import os
import queue
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, Protocol

from baton.clock import Clock, SystemClock
from baton.config import BatonConfig
from baton.errors import BatonError, WireError
from baton.step import SchedulerOutput
from baton.system.garbage import settle
from baton.system.logs import write_logs
from baton.system.progress import Progress
from baton.system.progress_watch import ProgressWatch
from engine.build import build_device_engine
from engine.collectives import Collectives, TorchCollectives
from engine.device import rank_device
from engine.pipeline import Pipeline
from engine.ranks.channel import RankChannel
from engine.ranks.exit_codes import EXIT_ALONE, EXIT_FAILED
from engine.ranks.group import STOP_TIMEOUT_S
from engine.ranks.messages import (
    FROM_RANK,
    TO_RANK,
    FromRank,
    Join,
    KVOutput,
    Loaded,
    Plan,
    RankCommands,
    RankFailed,
    Ready,
    Report,
    Setup,
    StartFailed,
    StepFailed,
    Stop,
    ToRank,
)
from kv_transfer import BlockMover

logger = logging.getLogger(__name__)

REPORT_INTERVAL_S = 0.5
"""Time between two reports. The connector's counters also change without plans, and rank 0 waits for reports."""

Channel = RankChannel[FromRank, ToRank]


class OwnConnector(BlockMover, Protocol):
    """This rank's KVConnectorWorker."""

    kv_address: str
    progress: Progress
    """The progress of the thread that moves blocks."""

    def start(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Rank:
    """The parts of a rank's process."""

    make_pipeline: Callable[[], Pipeline]
    """Called once the collectives are connected."""
    connector: OwnConnector
    num_blocks: int
    digest: str


Build = Callable[[Setup, BatonConfig, Collectives, Callable[[], None]], Rank]
"""Makes the rank; calls the last argument, from any thread, when the connector has outputs."""


def build(
    setup: Setup, config: BatonConfig, collectives: Collectives, on_kv_output: Callable[[], None]
) -> Rank:
    """Builds the real rank. Only rank 0 samples and uses grammars, so this rank does neither."""
    parts = build_device_engine(
        config,
        setup.kv_keys,
        Path(setup.model_path),
        setup.incarnation,
        collectives,
        SystemClock(),
        on_kv_output,
        on_progress=lambda *_: None,  # rank 0 reports its own, equal progress
    )
    return Rank(parts.make_pipeline, parts.connector, parts.num_blocks, parts.model.digest)


@dataclass(frozen=True, slots=True)
class _KVOutputReady:
    """The connector has outputs; the transfer thread puts this into the inbox."""


Inbox = queue.SimpleQueue[ToRank | _KVOutputReady]


class RankLoop:
    """Executes rank 0's messages. Only the main thread calls it; an exception ends the process."""

    def __init__(
        self, pipeline: Pipeline, connector: OwnConnector, channel: Channel, inbox: Inbox, clock: Clock
    ) -> None:
        self._pipeline = pipeline
        self._connector = connector
        self._channel = channel
        self._inbox = inbox
        self._clock = clock
        self._under_way: deque[int] = deque()
        """The numbers of the steps whose results were not taken yet."""
        self._num_computed = 0
        self._report_at = clock.now()

    def run(self) -> None:
        """Executes messages until Stop; returns when every planned step is computed."""
        while not isinstance(message := self._next(), Stop):
            match message:
                case Plan(plan):
                    self._compute(plan)
                case RankCommands(commands, num_computed):
                    self._wait_for_steps(num_computed)
                    self._connector.send_commands(commands)
                    self._connector.start_load_kv(commands)
                    self._connector.save_kv_blocks(commands, frozenset())
                case _KVOutputReady():
                    if output := self._connector.get_finished():
                        self._channel.send(KVOutput(output))
                case None:  # idle: takes results, so that a failed step is noticed before the next plan
                    self._wait_for_steps(self._num_computed + len(self._under_way))
                case _:
                    raise WireError(f"unexpected message {type(message).__name__}")
            self._report_if_due()
        self._wait_for_steps(self._num_computed + len(self._under_way))

    def _next(self) -> ToRank | _KVOutputReady | None:
        """The next message; None if no message arrives before a report is due."""
        try:
            return self._inbox.get(timeout=max(0.0, self._report_at - self._clock.now()))
        except queue.Empty:
            return None

    def _compute(self, plan: SchedulerOutput) -> None:
        """Submits a step, then waits for the previous step, as the engine does on rank 0 (worker/core.py)."""
        self._pipeline.submit(plan)
        self._under_way.append(plan.step)
        self._wait_for_steps(
            self._num_computed + max(0, len(self._under_way) - self._pipeline.num_ahead(plan))
        )

    def _wait_for_steps(self, num_computed: int) -> None:
        """Waits until this many steps are computed."""
        while self._num_computed < num_computed:
            result = self._pipeline.take_result()
            step = self._under_way.popleft()
            if result.error is not None:
                raise _StepError(step) from result.error
            self._num_computed += 1

    def _report_if_due(self) -> None:
        if self._clock.now() >= self._report_at:
            self._channel.send(Report(self._connector.counters(), self._connector.peers()))
            self._report_at = self._clock.now() + REPORT_INTERVAL_S


class _StepError(Exception):
    """The device failed to compute a step; `__cause__` is its error."""

    def __init__(self, step: int) -> None:
        super().__init__(f"step {step} failed")
        self.step = step


def main(build: Build = build) -> NoReturn:
    """Serves until Stop. Exit codes: 0 if it stopped; otherwise those of engine/ranks/exit_codes.py."""
    end = socket.socket(fileno=int(sys.argv[1]))
    end.set_inheritable(False)
    channel: Channel = RankChannel(end, FROM_RANK, TO_RANK)
    setup = channel.receive()
    if not isinstance(setup, Setup):
        _end(EXIT_ALONE, "rank 0 is gone")
    inbox: Inbox = queue.SimpleQueue()
    threading.Thread(target=_read, args=(channel, inbox), name="rank-0", daemon=True).start()
    try:
        _serve(setup, channel, inbox, build)
    except OSError as error:
        _end(EXIT_ALONE, f"rank 0 is unreachable: {error}")
    _end(0, "stopped")


def _serve(setup: Setup, channel: Channel, inbox: Inbox, build: Build) -> None:
    """Builds and serves. A failure is reported to rank 0, and ends the process without waiting for its threads."""
    try:
        config = BatonConfig.from_mapping(json.loads(setup.config), "rank 0's configuration")
        write_logs(
            config.logging,
            component="worker",
            fleet=config.cluster.name,
            rank=str(setup.rank),
            incarnation=setup.incarnation,
        )
        device = rank_device(config.engine, setup.rank)
        timeout_s = config.engine.rank_timeout_s
        collectives = TorchCollectives(setup.meeting_file, setup.rank, setup.num_ranks, device, timeout_s)
        rank = build(setup, config, collectives, lambda: inbox.put(_KVOutputReady()))
    except BatonError as error:
        channel.send(StartFailed(type(error).__name__, str(error)))
        _end(EXIT_FAILED, f"could not start: {error}")
    except Exception as error:
        logger.exception("could not start")
        channel.send(StartFailed("", _text(error)))
        _end(EXIT_FAILED, "could not start")
    try:
        channel.send(Loaded(rank.connector.kv_address, rank.num_blocks, rank.digest))
        message = inbox.get()
        if isinstance(message, Join):
            collectives.connect()
            pipeline = rank.make_pipeline()
            rank.connector.start()
            settle()
            _watch(rank.connector.progress, channel).start()
            channel.send(Ready())
            RankLoop(pipeline, rank.connector, channel, inbox, SystemClock()).run()
            pipeline.close()
            rank.connector.shutdown()
        collectives.close()
    except _StepError as error:
        logger.error("step %d failed", error.step, exc_info=error.__cause__)
        channel.send(StepFailed(error.step, _text(error.__cause__)))
        _end(EXIT_FAILED, str(error))
    except Exception as error:
        logger.exception("the rank ends")
        channel.send(RankFailed(_text(error)))
        _end(EXIT_FAILED, "failed")


def _watch(transfers: Progress, channel: Channel) -> ProgressWatch:
    """Watches this rank's transfers. Rank 0 waits for this rank's steps, but cannot see its transfers."""
    watch = ProgressWatch((transfers,), SystemClock(), lambda: channel.send(RankFailed(str(watch.hang))))
    return watch


def _read(channel: Channel, inbox: Inbox) -> None:
    """The reader thread: the process ends when the connection closes, whatever its other threads wait for."""
    try:
        while (message := channel.receive()) is not None:
            inbox.put(message)
            if isinstance(message, Stop):
                deadline = threading.Timer(STOP_TIMEOUT_S, _end, (EXIT_FAILED, "did not stop in time"))
                deadline.daemon = True
                deadline.start()
                return
    except WireError as error:
        _end(EXIT_ALONE, f"a message of rank 0 cannot be read: {error}")
    _end(EXIT_ALONE, "rank 0 is gone")


def _end(code: int, why: str) -> NoReturn:
    """Ends the process at once: threads may wait in collectives forever; torch's teardown takes seconds."""
    logger.info("%s", why)
    logging.shutdown()
    os._exit(code)


def _text(error: BaseException | None) -> str:
    return f"{type(error).__name__}: {error}"
