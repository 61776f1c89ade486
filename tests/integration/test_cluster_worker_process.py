"""One worker without Ray: it prints its address, and ends on a command or when its parent has ended."""

import asyncio
import contextlib
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest

import worker.process
from baton.errors import ClusterError, FleetError, ModelError, WorkerUnavailable
from baton.messages.control import Drain, Drained, SetRole, WaitStatus
from baton.system.open_files import MAX_FILES
from baton.worker import WorkerRole, WorkerState
from tests.factories.models import make_model_dir
from worker.control_channel import StdioControlClient
from worker.ready_line import endpoint_from_json

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked_workers")]

Process = subprocess.Popen[str]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    model = make_model_dir(tmp_path / "tiny")
    path = tmp_path / "baton.yaml"
    path.write_text(
        f"model: {{path: {model}, dtype: float32}}\nengine: {{kv_cache_memory_mib: 8, num_threads: 1}}\n"
    )
    return path


def start(*arguments: str, first: tuple[str, ...] = ()) -> Process:
    return subprocess.Popen(
        [*first, sys.executable, "-m", "worker", "--name", "w0", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize(
    "end",
    [
        lambda process: process.send_signal(signal.SIGTERM),
        lambda process: process.send_signal(signal.SIGINT),
        lambda process: process.stdin.close(),
    ],
    ids=["SIGTERM", "SIGINT", "stdin closes"],
)
def test_prints_its_endpoint_and_ends_cleanly(config: Path, end: Callable[[Process], None]) -> None:
    with start("--role", "prefill", "--config", str(config)) as process:
        assert process.stdout is not None
        endpoint = endpoint_from_json(process.stdout.readline())
        assert endpoint.ref.name == "w0"
        assert endpoint.role is WorkerRole.PREFILL
        assert endpoint.pid == process.pid
        assert endpoint.request_address.startswith("tcp://127.0.0.1:")
        end(process)
        assert process.wait(30) == 0


def test_without_a_share_it_has_the_threads_that_the_configuration_gives_its_role(config: Path) -> None:
    with config.open("a") as file:
        file.write("cluster: {decode_num_threads: 2}\n")
    with start("--role", "decode", "--config", str(config)) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert endpoint_from_json(process.stdout.readline()).num_threads == 2
        process.stdin.close()
        assert process.wait(30) == 0


def test_cpus_without_threads_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "baton.yaml"
    path.write_text(f"model: {{path: {make_model_dir(tmp_path / 'tiny')}, dtype: float32}}\n")
    with start("--role", "decode", "--config", str(path), "--cpus", "0") as process:
        assert process.stderr is not None
        errors = process.stderr.read()
        assert process.wait(60) == 1
    assert "--cpus needs --threads" in errors


def test_all_its_threads_keep_to_the_cpus_of_its_share(config: Path) -> None:
    cpu = max(os.sched_getaffinity(0))
    share = ("--threads", "1", "--cpus", str(cpu))
    with config.open("a") as file:
        file.write("cluster: {lend_cores: false}\n")  # threads on lent CPUs are the exception
    with start("--role", "decode", "--config", str(config), *share) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        endpoint = endpoint_from_json(process.stdout.readline())
        assert (endpoint.num_threads, endpoint.cpus) == (1, (cpu,))
        threads = os.listdir(f"/proc/{process.pid}/task")
        assert len(threads) > 3
        assert all(os.sched_getaffinity(int(thread)) == {cpu} for thread in threads)
        process.stdin.close()
        assert process.wait(30) == 0


def test_it_may_open_as_many_files_as_the_system_allows(config: Path) -> None:
    """Logins have a soft limit of 1,024, which connections of strangers would reach. This worker is no fork."""
    few = ("bash", "-c", 'ulimit -S -n 256; exec "$@"', "few")
    with start("--role", "prefill", "--config", str(config), first=few) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        endpoint_from_json(process.stdout.readline())
        soft, hard = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
        assert soft == (MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES))
        process.stdin.close()
        assert process.wait(30) == 0


def test_a_worker_is_controlled_through_its_stdin(config: Path) -> None:
    async def scenario(process: Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        endpoint = endpoint_from_json(process.stdout.readline())
        channel = StdioControlClient("w0", process.stdin, process.stdout)
        status = await channel.call(WaitStatus(0.0))
        assert (status.ref, status.role, status.state) == (
            endpoint.ref,
            WorkerRole.PREFILL,
            WorkerState.READY,
        )
        await channel.call(SetRole(WorkerRole.DECODE, 5.0))
        assert (await channel.call(WaitStatus(0.0))).role is WorkerRole.DECODE
        assert await channel.call(Drain(5.0)) == Drained(is_clean=True)
        assert (await channel.call(WaitStatus(0.0))).state is WorkerState.DRAINING
        with pytest.raises(FleetError, match=r"^it is draining"):
            await channel.call(SetRole(WorkerRole.PREFILL, 5.0))
        process.kill()
        with pytest.raises(ClusterError, match="its process has ended"):
            await asyncio.wait_for(channel.call(WaitStatus(0.0)), 60)
        with contextlib.suppress(OSError):  # what was not written before it ended
            process.stdin.close()

    with start("--role", "prefill", "--config", str(config)) as process:
        asyncio.run(scenario(process))


def test_a_model_that_is_not_there_is_said_in_one_line(tmp_path: Path) -> None:
    config = tmp_path / "baton.yaml"
    config.write_text(f"model: {{path: {tmp_path / 'nothing'}}}\n")
    with start("--role", "decode", "--config", str(config)) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        out, err = process.stdout.read(), process.stderr.read()
        assert process.wait(60) == 1
    assert err.count("\n") == 1
    assert "neither a folder, nor a GGUF file, nor a known name" in err
    with pytest.raises(ModelError, match="neither a folder, nor a GGUF file, nor a known name"):
        endpoint_from_json(out)


@pytest.mark.parametrize("failing", ["build_worker", "StdioControlServer"])
def test_an_unexpected_error_reaches_its_parent(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], failing: str
) -> None:
    build = Mock()
    monkeypatch.setattr(worker.process, "build_worker", build)
    monkeypatch.setattr(worker.process, "write_logs", Mock())
    error = RuntimeError("can't start new thread")
    monkeypatch.setattr(worker.process, failing, Mock(side_effect=error))
    arguments = ["--role", "decode", "--name", "w0", "--config", str(config)]
    assert worker.process.main(arguments) == 1
    words = "it cannot start: RuntimeError: can't start new thread; raise the limits of threads"
    with pytest.raises(WorkerUnavailable, match=words):
        endpoint_from_json(capsys.readouterr().out)
    started = build.return_value
    assert started.stop.call_count == started.start.call_count, "a started worker is stopped"
