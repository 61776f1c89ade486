"""A worker's ranks as real processes in real collectives; their devices and connectors do as a test says."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from baton.clock import SystemClock
from baton.config import BatonConfig
from baton.errors import BatonError, ClusterError, ModelError
from baton.step import KVConnectorOutput
from baton.system.progress import Progress
from baton.system.progress_watch import ProgressWatch
from engine.ranks.exit_codes import EXIT_ALONE
from engine.ranks.group import STOP_TIMEOUT_S, RankGroup, RankLink
from engine.ranks.messages import FromRank, Loaded, StepFailed
from engine.ranks.processes import RankProcesses
from kv_transfer import KVConnectorMetadata
from kv_transfer.commands import AbortLoad, LoadBlocks, SendBlocks, WithdrawBlocks
from tests.factories.engine import RunningLoop, make_core, make_engine_request
from tests.factories.fake_rank import (
    DELAY_S,
    DIGEST,
    FAKE_RANK,
    HANG_S,
    NUM_BLOCKS,
    Diary,
    DiaryConnector,
    make_fake_pipeline,
    make_plan,
)
from tests.factories.fork_server import RANK_0

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked_workers")]

SOON_S = STOP_TIMEOUT_S
"""Of what would otherwise take that long (a rank that must be killed), twice as long (a collective), or for ever."""
BLOCK_SIZE = 16


class RunningRanks:
    """Rank 0 in this process, the others in their own."""

    def __init__(self, others: RankProcesses, folder: Path, woken: threading.Event) -> None:
        self.woken = woken
        self.others = others
        self._folder = folder
        with pytest.raises(ClusterError, match="rank 1 has model digest, and rank 0 has another"):
            others.join("another")
        self.loaded = others.join(DIGEST)
        diary = Diary(folder, 0)
        own = DiaryConnector(diary, on_kv_output=lambda: None)
        self.pipeline = others.pipeline(lambda: make_fake_pipeline(others.collectives, diary))
        self.connector = others.connector(own)
        others.serve()

    def compute(self, step: int, *request_ids: str) -> int:
        """Runs a step and returns what it sampled: the sum of its number over all ranks."""
        self.pipeline.submit(make_plan(step, *request_ids))
        result = self.pipeline.take_result()
        assert result.output is not None, result.error
        return result.output.sampled_token_ids["sum"][0]

    def fails(self) -> str:
        """Waits until the connector says that the worker has failed, and returns the reason."""
        end = time.monotonic() + SOON_S
        while time.monotonic() < end:
            assert self.woken.wait(end - time.monotonic())
            self.woken.clear()
            try:
                self.connector.get_finished()
            except RuntimeError as error:
                return str(error)
        raise AssertionError("no rank has failed")

    def diary(self, rank: int) -> list[str]:
        return Diary.of(self._folder, rank)


@contextmanager
def starting(
    folder: Path, num_ranks: int, on_kv_output: Callable[[], None] = lambda: None, **config: Any
) -> Iterator[RankProcesses]:
    """Other ranks that have begun to load; ends every one."""
    values = {"engine": {"rank_timeout_s": 20.0}, **config}
    others = RankProcesses(
        BatonConfig.from_mapping(values),
        num_ranks,
        None,
        folder,
        "incarnation",
        on_kv_output,
        module=FAKE_RANK,
    )
    pids = [link.process.pid for link in others._group.links]
    try:
        assert len(pids) == num_ranks - 1
        yield others
    finally:
        begun = time.monotonic()
        others.stop()
        assert time.monotonic() - begun < SOON_S
        assert not any(map(psutil.pid_exists, pids))


@contextmanager
def running(folder: Path, num_ranks: int = 2, **config: Any) -> Iterator[RunningRanks]:
    woken = threading.Event()
    with starting(folder, num_ranks, woken.set, **config) as others:
        ranks = RunningRanks(others, folder, woken)
        try:
            yield ranks
        finally:
            ranks.pipeline.close()


def rank_pids(parent: int) -> list[int]:
    children = psutil.Process(parent).children()
    return [
        child.pid
        for child in children
        if child.status() != psutil.STATUS_ZOMBIE and FAKE_RANK in child.cmdline()
    ]


def test_ranks_compute_the_same_steps_execute_the_same_commands_and_end_on_command(tmp_path: Path) -> None:
    """A rank obeys commands when it has computed what rank 0 had computed."""
    commands = KVConnectorMetadata(
        (WithdrawBlocks("w"),),
        (LoadBlocks("r", 0, (1,)),),
        (SendBlocks("kept", 0, (2,)), SendBlocks("preempted", 0, (3,))),
    )
    abort = KVConnectorMetadata((AbortLoad("r", "the client left"),), (), ())
    with running(tmp_path) as ranks:
        assert ranks.loaded == (Loaded("tcp://127.0.0.1:2", NUM_BLOCKS, DIGEST),)
        assert ranks.compute(1) == 2, "the sum over two ranks"
        ranks.compute(2, "collectives")
        ranks.pipeline.submit(make_plan(3, "r", "delay-1"))
        time.sleep(DELAY_S / 5)
        ranks.connector.send_commands(commands)
        ranks.pipeline.take_result()
        ranks.connector.save_kv_blocks(commands, {"preempted"})
        ranks.connector.start_load_kv(commands)
        ranks.connector.send_commands(abort)
        end = time.monotonic() + SOON_S
        news = KVConnectorOutput()
        while not news and time.monotonic() < end:
            ranks.woken.wait(SOON_S)
            ranks.woken.clear()
            news += ranks.connector.get_finished()
        assert news.quiesced == ("r",), "both ranks are done with the load that was given up"
        while ranks.connector.counters() != {"kv_loads": 2} and time.monotonic() < end:
            time.sleep(0.05)
        assert ranks.connector.counters() == {"kv_loads": 2}, "of both ranks"
    expected = ["at once WithdrawBlocks", "step 3", "save kept", "load r", "at once AbortLoad"]
    gathered = [[0.0, 10.0, 1.0, 11.0], [20.0, 30.0, 21.0, 31.0]]
    collectives = str([[3.0], gathered] * 3 + [[7, 8]])
    assert ranks.diary(1) == ["start", "step 1", collectives, "step 2", *expected, "shutdown"]
    assert ranks.diary(0)[:3] == ["step 1", collectives, "step 2"]


def test_a_rank_that_is_killed_ends_the_worker_also_when_it_is_idle(tmp_path: Path) -> None:
    with running(tmp_path, num_ranks=3) as ranks:
        assert ranks.compute(1) == 3
        running_loop = RunningLoop(make_core(connector=ranks.connector))
        loop = running_loop.loop
        loop.start()
        victim = rank_pids(os.getpid())[1]
        os.kill(victim, signal.SIGKILL)
        assert ranks.woken.wait(SOON_S)
        running_loop.commands.wake()  # what the host's `on_kv_output` does
        running_loop.until_ended()
        assert str(loop.failure) == f"rank 2 (pid {victim}) was killed by SIGKILL"


def test_a_rank_that_ends_in_a_step_is_named_with_its_exit_code(tmp_path: Path) -> None:
    with running(tmp_path) as ranks:
        (pid,) = rank_pids(os.getpid())
        ranks.pipeline.submit(make_plan(1, "die-1"))
        error = ranks.pipeline.take_result().error
        assert str(error) == f"rank 1 (pid {pid}) ended with exit code 7"
        assert ranks.others.has_lost_rank
        assert ranks.fails() == str(error)


def test_a_rank_that_ends_in_a_step_is_named_though_others_report_their_failed_step_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process ends only after its connections have closed."""
    handle, how_it_ended, has_reported = RankGroup._handle, RankLink.how_it_ended, threading.Event()

    def note_reports(group: RankGroup, link: RankLink, message: FromRank | None) -> None:
        handle(group, link, message)
        if isinstance(message, StepFailed):
            has_reported.set()

    def ends_late(link: RankLink) -> str:
        assert has_reported.wait(60.0)
        return how_it_ended(link)

    monkeypatch.setattr(RankGroup, "_handle", note_reports)
    monkeypatch.setattr(RankLink, "how_it_ended", ends_late)
    with running(tmp_path, num_ranks=3) as ranks:
        pid = rank_pids(os.getpid())[1]
        ranks.pipeline.submit(make_plan(1, "die-2"))
        error = ranks.pipeline.take_result().error
        assert str(error) == f"rank 2 (pid {pid}) ended with exit code 7"
        assert ranks.others.has_lost_rank


@pytest.mark.parametrize("rank", [0, 1])
def test_a_step_that_fails_on_one_rank_fails_on_all_and_none_hangs(tmp_path: Path, rank: int) -> None:
    with running(tmp_path) as ranks:
        assert ranks.compute(1) == 2
        begun = time.monotonic()
        ranks.pipeline.submit(make_plan(2, f"raise-{rank}"))
        ranks.pipeline.submit(make_plan(3))
        error = ranks.pipeline.take_result().error
        assert f"rank {rank} failed to compute step 2: " in str(error)
        assert "the device is on fire" in str(error)
        assert ranks.pipeline.take_result().output is None, "planned on top of it"
        assert time.monotonic() - begun < SOON_S
        assert ranks.fails() == str(error)
        assert not ranks.others.has_lost_rank


@pytest.mark.parametrize(
    ("request_id", "kind", "message"),
    [
        ("lost", RuntimeError, "RuntimeError: the transfer thread has died"),
        ("full", OSError, "OSError: No space left on device"),  # not to be taken for the end of the line
    ],
)
def test_a_rank_whose_connector_fails_ends_the_worker(
    tmp_path: Path, request_id: str, kind: type[Exception], message: str
) -> None:
    with running(tmp_path) as ranks:
        ranks.compute(1)
        loads = KVConnectorMetadata((), (LoadBlocks(request_id, 0, (1,)),), ())
        with pytest.raises(kind):
            ranks.connector.start_load_kv(loads)  # rank 0's own comes first
        ranks.connector._ranks[1].start_load_kv(loads)  # type: ignore[attr-defined]
        assert ranks.fails() == f"rank 1 failed: {message}"


def test_c54_a_rank_whose_transfer_thread_hangs_ends_the_worker(tmp_path: Path) -> None:
    with running(tmp_path) as ranks:
        ranks.compute(1)
        ranks.connector.start_load_kv(KVConnectorMetadata((), (LoadBlocks("stuck", 0, (1,)),), ()))
        reason = r"rank 1 failed: its KV transfer has made no progress for 1\.\d s; its limit is 1\.0 s"
        assert re.fullmatch(reason, ranks.fails())


def test_c54_a_stopped_rank_ends_the_worker_even_if_no_step_waits_for_it(tmp_path: Path) -> None:
    """All requests wait for KV, and part of it must arrive on that rank."""
    with running(tmp_path, engine={"progress_timeout_s": 0.5}) as ranks:
        (link,) = ranks.others._group.links
        link.process.send_signal(signal.SIGSTOP)
        ranks.connector.start_load_kv(KVConnectorMetadata((), (LoadBlocks("r", 0, (1,)),), ()))
        reason = rf"rank 1 \(pid {link.process.pid}\) has made no progress for \d+\.\d s; its limit is 2\.5 s"
        assert re.fullmatch(reason, ranks.fails())


def test_c54_an_idle_rank_reports_again_and_again(tmp_path: Path) -> None:
    with running(tmp_path) as ranks:
        (link,) = ranks.others._group.links
        end = time.monotonic() + 60.0
        for _ in range(2):
            former = link.report
            while link.report is former:
                assert time.monotonic() < end
                time.sleep(0.05)


def test_c54_a_rank_that_hangs_in_a_step_is_a_step_of_the_worker_that_does_not_end(tmp_path: Path) -> None:
    """The watch is that of a real worker, where it then ends the process."""
    with running(tmp_path) as ranks:
        progress, is_hung = Progress("its engine", SystemClock(), HANG_S), threading.Event()
        core = make_core(connector=ranks.connector, pipeline=ranks.pipeline, progress=progress)
        watch = ProgressWatch((progress,), SystemClock(), is_hung.set, end=lambda: None, last_words_s=0.0)
        running_loop = RunningLoop(core)
        running_loop.loop.start()
        watch.start()
        running_loop.loop.submit("gateway", make_engine_request("stall-1"))
        assert is_hung.wait(SOON_S)
        assert str(watch.hang).startswith("its engine has made no progress for 1.")
        (pid,) = rank_pids(os.getpid())
        os.kill(pid, signal.SIGKILL)
        running_loop.until_ended()
        watch.stop()


@pytest.mark.parametrize(
    ("trouble", "kind", "message"),
    [
        ("no-model", ModelError, r"no config\.json"),
        ("broken", ClusterError, "rank 1 could not start: ValueError: out of memory"),
        ("dead", ClusterError, r"rank 1 \(pid \d+\) ended with exit code 9 before it served"),
        ("slow", ClusterError, r"rank 1 of the worker had not loaded its model within 0\.5 s"),
    ],
)
def test_a_rank_that_does_not_start_says_why(
    tmp_path: Path, trouble: str, kind: type[BatonError], message: str
) -> None:
    timeout_s = 0.5 if trouble == "slow" else 60.0
    config: dict[str, Any] = {
        "model": {"path": trouble},
        "cluster": {"start_timeout_s": timeout_s},
    }
    with starting(tmp_path, 2, **config) as others, pytest.raises(kind, match=message):
        others.join(DIGEST)


def serve_rank_0(folder: Path, what: str) -> None:
    """`python -m tests.integration.test_ranks FOLDER REQUEST_ID`"""
    with running(folder) as ranks:
        ranks.compute(1)
        ranks.pipeline.submit(make_plan(2, what))
        print("ready", flush=True)
        time.sleep(600)


@pytest.mark.parametrize("what", ["stall-0", "stall-1"], ids=["in a collective", "in its own step"])
def test_no_rank_outlives_rank_0_nor_does_any_file(tmp_path: Path, what: str) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    with subprocess.Popen(
        [sys.executable, "-m", RANK_0, str(tmp_path), what],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(temporary)},
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        (pid,) = rank_pids(process.pid)
        os.kill(pid, signal.SIGINT)  # as from a terminal, and no reason to end
        os.kill(pid, signal.SIGTERM)
        rank = psutil.Process(pid)
        assert rank.is_running()
        process.kill()
        rank.wait(SOON_S)
    assert not list(temporary.iterdir())


def test_a_rank_that_is_still_importing_ignores_the_terminal_and_ends_with_rank_0(tmp_path: Path) -> None:
    """The modules of a rank take seconds to import."""
    (tmp_path / "torch.py").write_text("print('importing', flush=True)\nimport time\ntime.sleep(600)\n")
    ours, theirs = socket.socketpair()
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    with (
        ours,
        theirs,
        subprocess.Popen(
            # With an option, a process is no fork.
            [sys.executable, "-u", "-m", "engine.ranks.entry", str(theirs.fileno())],
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=(theirs.fileno(),),
            env={**os.environ, "PYTHONPATH": path},
        ) as process,
    ):
        theirs.close()
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "importing\n"
            process.send_signal(signal.SIGINT)
            process.send_signal(signal.SIGTERM)
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.3)
            ours.close()
            assert process.wait(SOON_S) == EXIT_ALONE
        finally:
            process.kill()


if __name__ == "__main__":
    serve_rank_0(Path(sys.argv[1]), sys.argv[2])
