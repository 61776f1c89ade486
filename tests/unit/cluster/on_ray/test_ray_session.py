"""What Ray reads from the environment before it is imported, and where it may be."""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import cast
from unittest.mock import Mock

import psutil
import pytest
from ray import _raylet
from ray._private import utils, worker

from baton.clock import VirtualClock
from baton.config import ClusterConfig
from baton.errors import ClusterError, ConfigError
from cluster.on_ray.driver_patches import _INSTALL_RAYS_HANDLER
from cluster.on_ray.session import (
    _init,
    _join,
    _no_agents_left,
    _probe,
    _root_cause,
    _short_folder,
    _shut_down_after,
    _start,
    check_token,
    connect,
    lost_process,
    prepare_environment,
)

JOINED = ClusterConfig(ray_address="head:6379")
LIBC = ctypes.CDLL(None)


def actions() -> dict[int, ctypes.Array[ctypes.c_char]]:
    """What the kernel does on each signal that Ray's C++ handles: struct sigaction begins with the handler."""
    found: dict[int, ctypes.Array[ctypes.c_char]] = {}
    for number in (
        signal.SIGTERM,
        signal.SIGSEGV,
        signal.SIGILL,
        signal.SIGFPE,
        signal.SIGABRT,
        signal.SIGBUS,
    ):
        found[number] = ctypes.create_string_buffer(256)
        LIBC.sigaction(number, None, found[number])
    return found


@pytest.fixture(autouse=True)
def handlers_of_ray_do_not_stay() -> Iterator[None]:
    former = actions()
    yield
    for number, action in former.items():
        LIBC.sigaction(number, action, None)


def test_a_private_ray_stays_on_loopback_behind_a_fresh_secret(tmp_path: Path) -> None:
    environments: list[dict[str, str]] = [{}, {}]
    for environment in environments:
        prepare_environment(ClusterConfig(), environment, tmp_path)
    tokens = {environment.pop("RAY_AUTH_TOKEN") for environment in environments}
    assert len(tokens) == 2
    assert environments[0] == {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DEDUP_LOGS_SKIP_REGEX": ".",
        "RAY_worker_niceness": "0",
        "RAY_RAYLET_PID": str(os.getpid()),
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_AUTH_MODE": "token",
    }


def test_a_joined_cluster_may_span_hosts_and_keeps_its_owners_choice(tmp_path: Path) -> None:
    choice = {"RAY_USAGE_STATS_ENABLED": "1", "RAY_DEDUP_LOGS_SKIP_REGEX": "quiet"}
    environment = dict(choice)
    prepare_environment(JOINED, environment, tmp_path)
    assert environment == {**choice, "RAY_RAYLET_PID": str(os.getpid())}


def test_a_joined_cluster_gets_the_token_that_is_there(tmp_path: Path) -> None:
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("secret")
    environment: dict[str, str] = {}
    prepare_environment(JOINED, environment, tmp_path)
    assert environment["RAY_AUTH_MODE"] == "token"
    environment = {"RAY_AUTH_MODE": "disabled"}
    prepare_environment(JOINED, environment, tmp_path)
    assert environment["RAY_AUTH_MODE"] == "disabled"


@pytest.mark.parametrize(
    ("has_token", "addresses", "is_allowed", "is_refused"),
    [
        (False, ["127.0.0.1", "10.0.0.7"], False, True),
        (False, ["10.0.0.7"], True, False),
        (False, ["127.0.0.1"], False, False),
        (True, ["10.0.0.7"], False, False),
    ],
)
def test_a_ray_that_others_can_reach_asks_for_a_token_unless_the_operator_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, has_token: bool, addresses: list[str], is_allowed: bool, is_refused: bool
) -> None:
    nodes = [{"NodeManagerAddress": address, "Alive": True} for address in addresses]
    nodes.append({"NodeManagerAddress": "10.0.0.9", "Alive": False})
    monkeypatch.setattr("ray.nodes", lambda: nodes)
    monkeypatch.setattr(
        "ray._private.authentication.authentication_utils.is_token_auth_enabled", lambda: has_token
    )
    config = ClusterConfig(ray_address="auto", allow_ray_without_token=is_allowed)
    if is_refused:
        with pytest.raises(
            ConfigError, match=r"\(10\.0\.0\.7, 127\.0\.0\.1\) asks for no token.*allow_ray_without_token"
        ):
            check_token(config)
    else:
        check_token(config)


def test_an_address_without_a_listener_fails_at_once() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(
            ClusterError, match=rf"no Ray cluster answers at {address} \(cluster\.ray_address\)"
        ):
            _probe(address)
        taken.listen()
        _probe(address)
    with pytest.raises(ClusterError, match=r"no Ray cluster answers at 10\.0\.0\.\.1:6379"):
        _probe("10.0.0..1:6379")


def test_ray_leaves_the_handler_of_sigterm_as_it_is_even_while_it_starts() -> None:
    former, ray = signal.signal(signal.SIGTERM, lambda *_: None), Mock(spec=["init"])
    ours = signal.getsignal(signal.SIGTERM), actions()[signal.SIGTERM][:8]

    def start(**_options: object) -> None:
        utils.set_sigterm_handler(lambda *_: sys.exit(15))
        getattr(ctypes.CDLL(_raylet.__file__), _INSTALL_RAYS_HANDLER)(None, False)
        assert (signal.getsignal(signal.SIGTERM), actions()[signal.SIGTERM][:8]) == ours

    ray.init.side_effect = start
    _init(ray, address="local")
    signal.signal(signal.SIGTERM, former)
    assert utils.set_sigterm_handler.__module__ == "ray._private.utils", "it is as it was"


def test_processes_of_ray_outlive_the_terminal() -> None:
    ray, blocked = Mock(spec=["init"]), []
    ray.init.side_effect = lambda **_: blocked.append(
        subprocess.run(["grep", "SigBlk", "/proc/self/status"], capture_output=True, check=True).stdout
    )
    _init(ray, address="local")
    mask = int(blocked[0].split()[1], 16)
    assert mask >> (signal.SIGHUP - 1) & 1
    assert signal.SIGHUP not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("error", [None, ConnectionError()])
def test_a_signal_while_ray_connects_takes_effect_when_it_has_connected(
    monkeypatch: pytest.MonkeyPatch, number: int, error: Exception | None
) -> None:
    events: list[str] = []

    def connect() -> None:
        signal.raise_signal(number)
        events.append("connected")
        if error is not None:
            raise error

    def stop(*_: object) -> None:
        events.append("stop")
        raise KeyboardInterrupt

    monkeypatch.setattr(worker, "connect", connect)
    ray = Mock(spec=["init"])
    ray.init.side_effect = lambda **_: worker.connect()
    former = signal.signal(number, stop)
    try:
        with pytest.raises(KeyboardInterrupt):
            _init(ray, address="local")
        assert signal.getsignal(number) is stop
    finally:
        signal.signal(number, former)
    assert events == ["connected", "stop"]


def test_without_a_folder_for_temporary_files_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    error = OSError(28, "No space left on device", "/tmp/baton-ray-x")
    monkeypatch.setattr(tempfile, "mkdtemp", Mock(side_effect=error))
    with (
        pytest.raises(ClusterError, match=r"No space left on device: '/tmp/baton-ray-x'; set TMPDIR"),
        connect(ClusterConfig(), 1, "cpu"),
    ):
        raise AssertionError


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("error", [KeyboardInterrupt(), ClusterError("could not start Ray")])
def test_a_start_of_ray_that_fails_leaves_no_agents(tmp_path: Path, error: BaseException) -> None:
    agent = "sleep 600 & echo $!; wait"
    (tmp_path / "raylet").write_text(f"#!/bin/sh\n{agent}\n")
    (tmp_path / "raylet").chmod(0o700)
    started = []

    def start() -> None:
        for command in ([str(tmp_path / "raylet")], ["sh", "-c", agent]):
            process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            assert process.stdout is not None
            started.append((process, psutil.Process(int(process.stdout.readline()))))
        raise error

    with pytest.raises(type(error)), _no_agents_left():
        start()
    (raylet, its_agent), (other, its_child) = started
    try:
        assert raylet.wait(60) == -signal.SIGKILL
        its_agent.wait(60)
        assert other.poll() is None, "only Ray's processes are ended"
        assert its_child.is_running()
    finally:
        its_child.kill()
        for process, _ in started:
            process.communicate()


@pytest.mark.parametrize(
    ("name", "end", "said"),
    [
        ("raylet", "kill -9 $$", "Ray's process raylet ({}) was killed by SIGKILL"),
        ("gcs_server", "exit 3", "Ray's process gcs_server ({}) ended with exit code 3"),
        ("another", "exit 3", None),
    ],
)
def test_the_end_of_a_process_of_a_private_ray_is_seen(
    tmp_path: Path, name: str, end: str, said: str | None
) -> None:
    program = tmp_path / name
    program.write_text(f"#!/bin/sh\nread line\n{end}\n")
    program.chmod(0o755)
    with subprocess.Popen([program], stdin=subprocess.PIPE) as process:
        assert lost_process() is None
        assert process.stdin is not None
        process.stdin.write(b"\n")
        process.stdin.close()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert lost_process() == (said and said.format(process.pid))
    assert lost_process() is None


class StartingRay:
    """Stands for the module `ray`: for a while, `ray.init` finds no cluster."""

    def __init__(self, num_failures: int) -> None:
        self._num_failures = num_failures
        self.calls: list[str] = []

    def init(self, **_options: object) -> None:
        self.calls.append("init")
        if self.calls.count("init") <= self._num_failures:
            raise ConnectionError("Could not find any running Ray instance")

    def shutdown(self) -> None:
        self.calls.append("shutdown")


@pytest.fixture
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time passes only while the code sleeps."""
    clock = VirtualClock()
    monkeypatch.setattr("cluster.on_ray.session.time", Mock(monotonic=clock.now, sleep=clock.advance))


@pytest.mark.usefixtures("no_pauses")
def test_a_ray_that_starts_beside_us_is_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    ray = StartingRay(2)
    module = cast("ModuleType", ray)
    with _shut_down_after(module):
        _join(module, ClusterConfig(ray_address="auto", ray_timeout_s=60.0))
        assert ray.calls == ["init", "shutdown", "init", "shutdown", "init"]
    assert ray.calls[-1] == "shutdown"
    assert [record.getMessage() for record in caplog.records] == [
        "waiting up to 60 s for Ray (cluster.ray_timeout_s): could not join the Ray cluster at auto "
        "(cluster.ray_address): Could not find any running Ray instance"
    ]


@pytest.mark.usefixtures("no_pauses")
@pytest.mark.parametrize(("timeout_s", "num_tries"), [(0.0, 1), (2.5, 4)])
def test_a_ray_that_does_not_come_is_an_error(timeout_s: float, num_tries: int) -> None:
    ray = StartingRay(10**9)
    config = ClusterConfig(ray_address="auto", ray_timeout_s=timeout_s)
    with pytest.raises(ClusterError, match="Could not find any running Ray"):
        _join(cast("ModuleType", ray), config)
    assert ray.calls.count("init") == num_tries


def test_addresses_only_ray_understands_are_left_to_ray() -> None:
    _probe("auto")


def test_a_temporary_folder_that_is_long_or_not_ascii_is_not_for_sockets() -> None:
    assert _short_folder("/tmp") == "/tmp"
    assert _short_folder("/home/me/tmp") == "/home/me/tmp"
    assert _short_folder("/var/folders/of/a/system/that/likes/long/names") == "/tmp"
    assert _short_folder("/home/jörg/tmp") == "/tmp"


def test_the_root_cause_is_one_line() -> None:
    error = ConnectionError("could not connect")
    error.__cause__ = RuntimeError("Last error: Traceback\n  File ...\nInvalidAuthToken: missing\n\n")
    assert _root_cause(error) == "InvalidAuthToken: missing"
    assert _root_cause(ValueError()) == "ValueError"


def test_the_error_of_a_ray_that_does_not_start_says_what_to_do() -> None:
    ray = Mock(**{"init.side_effect": Exception("The current node timed out during startup.")})
    with pytest.raises(
        ClusterError, match=r"timed out during startup; if this .* busy, try again\. .* needs no Ray"
    ):
        _init(ray, address="local")


def test_workers_import_nothing_from_the_current_folder() -> None:
    """Ray adds the folder to this list. A downloaded model there may have a `torch.py`."""
    ray = Mock(spec=["init"])
    _init(ray, address="local")
    job = ray.init.call_args.kwargs["job_config"]
    job._py_driver_sys_path.extend([os.getcwd()])
    assert list(job._get_proto_job_config().py_driver_sys_path) == []


def test_a_private_ray_does_not_give_up_its_only_node_early(tmp_path: Path) -> None:
    """Ray's own limits let a raylet stand still for a minute. `lost_process` notices a raylet that has ended."""
    ray = Mock(spec=["init"])
    _start(ray, tmp_path, ClusterConfig(), 1, "cpu")
    settings = ray.init.call_args.kwargs["_system_config"]
    assert [name for name in settings if name.startswith("health_check")] == []
