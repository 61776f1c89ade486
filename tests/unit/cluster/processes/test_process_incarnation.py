"""How long a worker's process has to end, by its parent's clock, and how it ended; the process is replaced."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psutil
import pytest

from baton.config import BatonConfig
from baton.errors import ClusterError
from baton.messages.control import DescribeFleet
from baton.worker import WorkerRole
from cluster.processes import fleet
from cluster.processes.fleet import ProcessIncarnation, ProcessLauncher
from cluster.processes.worker_process import WorkerProcess
from tests.factories.virtual_loop import in_virtual_time, virtual_loop

STOOD_S = 60.0


class Process:
    """A process that serves, and ends when a test says so or when it is killed."""

    def __init__(self) -> None:
        self.name = "w0"
        self.exit: Future[int] = Future()
        self.signals: list[int] = []

    def wait_until_ready(self) -> object:
        return object()

    def wait(self) -> int:
        raise AssertionError("its result is `exit`")

    def control(self) -> Any:
        return Mock(is_gone=False, call=lambda _: asyncio.Event().wait())

    def ask_to_end(self) -> None:
        self.signals.append(signal.SIGTERM)

    def kill(self) -> None:
        self.signals.append(signal.SIGKILL)
        self.exit.set_result(-signal.SIGKILL)

    def close(self) -> None:
        """Nothing is open."""


class Threads:
    """Calls at once what is submitted; for `wait`, returns the result of the process."""

    def __init__(self, *_: object, **__: object) -> None:
        """Takes the arguments of a ThreadPoolExecutor."""

    def submit(self, call: Callable[[], Any]) -> Future[Any]:
        if isinstance(process := getattr(call, "__self__", None), Process) and call == process.wait:
            return process.exit
        done: Future[Any] = Future()
        done.set_result(call())
        return done

    def shutdown(self, *, wait: bool) -> None:
        assert not wait


async def serving(monkeypatch: pytest.MonkeyPatch) -> tuple[ProcessIncarnation, Process]:
    monkeypatch.setattr(fleet, "ThreadPoolExecutor", Threads)
    process: Any = Process()
    incarnation = ProcessIncarnation(process, 1)
    await incarnation.start(lambda _: None)
    return incarnation, process


@in_virtual_time
async def test_a_standstill_of_the_parent_takes_no_time_from_a_process_that_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    incarnation, process = await serving(monkeypatch)
    virtual_loop().call_later(1.0, virtual_loop().stand_still, STOOD_S)
    virtual_loop().call_later(STOOD_S + 2.0, process.exit.set_result, 0)
    await incarnation.stop(5.0)
    assert process.signals == [signal.SIGTERM]


@in_virtual_time
async def test_a_process_that_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    incarnation, process = await serving(monkeypatch)
    begun = virtual_loop().now()
    async with asyncio.timeout(60.0):
        await incarnation.stop(5.0)
    assert process.signals == [signal.SIGTERM, signal.SIGKILL]
    assert virtual_loop().now() - begun == pytest.approx(5.0, abs=0.1)


@pytest.mark.parametrize(
    ("code", "end"),
    [
        (-signal.SIGKILL, "its process was killed by SIGKILL (perhaps for lack of memory)"),
        (-signal.SIGSEGV, "its process was killed by SIGSEGV"),
        (-40, "its process was killed by signal 40"),
        (3, "its process ended with exit code 3"),
    ],
)
@in_virtual_time
async def test_a_call_says_how_the_process_has_ended(
    monkeypatch: pytest.MonkeyPatch, code: int, end: str
) -> None:
    incarnation, process = await serving(monkeypatch)
    process.exit.set_result(code)
    with pytest.raises(ClusterError) as caught:
        await incarnation.call(DescribeFleet())
    assert str(caught.value) == end


@in_virtual_time
async def test_a_launcher_forgets_processes_that_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """An autoscaled fleet gives each new worker a new name."""
    monkeypatch.setattr(fleet, "ThreadPoolExecutor", Threads)
    monkeypatch.setattr(fleet, "WorkerProcess", lambda *_: Process())
    launcher = ProcessLauncher(BatonConfig(), Path(), None)
    for name in ("w0", "w1", "w2"):
        incarnation = await launcher.place(name, WorkerRole.DECODE, 1)
        await incarnation.stop(0.0)
    assert set(launcher.incarnations) == {"w2"}


@pytest.mark.parametrize(
    ("module", "name", "error", "reason"),
    [
        (
            subprocess,
            "Popen",
            BlockingIOError(11, "Resource temporarily unavailable"),
            "its process: .*unavailable",
        ),
        (
            threading.Thread,
            "start",
            RuntimeError("can't start new thread"),
            "to watch its process: can't start new thread",
        ),
    ],
)
async def test_what_the_system_has_no_room_for_leaves_no_process(
    monkeypatch: pytest.MonkeyPatch, module: Any, name: str, error: Exception, reason: str
) -> None:
    begun: list[subprocess.Popen[str]] = []
    real = subprocess.Popen

    def sleeping(_: Any, **options: Any) -> subprocess.Popen[str]:
        begun.append(real(["sleep", "100"], **options))
        return begun[-1]

    monkeypatch.setattr(subprocess, "Popen", sleeping)
    monkeypatch.setattr(module, name, Mock(side_effect=error))
    with pytest.raises(ClusterError, match=reason):
        await ProcessLauncher(BatonConfig(), Path(), None).place("w0", WorkerRole.DECODE, 1)
    assert [process.returncode for process in begun] == [-signal.SIGKILL] * (module is threading.Thread)


@in_virtual_time
async def test_without_a_thread_for_its_control_calls_a_worker_does_not_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fleet, "ThreadPoolExecutor", Threads)
    process: Any = Process()
    process.control = Mock(side_effect=RuntimeError("can't start new thread"))
    with pytest.raises(ClusterError, match=r"can't start new thread; raise the limits of threads"):
        await ProcessIncarnation(process, 1).start(lambda _: None)


def test_a_workers_configuration_is_on_no_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk, or a cleaner of /tmp, would keep a fleet's workers from being replaced."""
    real = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda command, **options: real(["cat", command[-1]], **options))
    config = BatonConfig.from_mapping({"engine": {"kv_cache_memory_mib": 64}})
    worker = WorkerProcess(config, Path("/models/m"), None, WorkerRole.DECODE, "w0")
    assert worker._process.stdout is not None
    there = worker._process.stdout.read()
    assert json.loads(there) == {"engine": {"kv_cache_memory_mib": 64}, "model": {"path": "/models/m"}}
    assert worker.stop() == 0


@pytest.mark.parametrize("kill", [WorkerProcess.kill, lambda worker: os.kill(worker.pid, signal.SIGKILL)])
def test_a_worker_that_is_killed_or_dies_leaves_no_compiler(
    monkeypatch: pytest.MonkeyPatch, kill: Callable[[WorkerProcess], None]
) -> None:
    real = subprocess.Popen
    compiling = ["sh", "-c", "sleep 600 & echo $!; wait"]
    monkeypatch.setattr(subprocess, "Popen", lambda _, **options: real(compiling, **options))
    worker = WorkerProcess(BatonConfig(), Path("/models/m"), None, WorkerRole.DECODE, "w0")
    assert worker._process.stdout is not None
    compiler = psutil.Process(int(worker._process.stdout.readline()))
    try:
        kill(worker)
        assert worker.wait() == -signal.SIGKILL
        compiler.wait(60)
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            compiler.kill()
        worker.close()
    worker.kill()  # changes nothing
    monkeypatch.setattr(
        worker._process, "poll", lambda: None
    )  # as before another thread has stored the exit code
    worker.kill()
