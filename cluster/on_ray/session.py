"""The connection to Ray: a private Ray for this command, or an existing cluster; knows no workers.

A private Ray listens on loopback only, and has a folder of its own that other users cannot enter. Its processes die
with this process even on SIGKILL: Ray ties them to the *thread* that starts them (PR_SET_PDEATHSIG), so `connect` must
run on the main thread.
"""

import atexit
import contextlib
import logging
import math
import os
import re
import secrets
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from baton.config import ClusterConfig
from baton.errors import ClusterError, ConfigError
from baton.system.hosts import is_loopback
from cluster.on_ray.driver_patches import fewer_processes, own_signals

logger = logging.getLogger(__name__)

_OBJECT_STORE_BYTES = 100 * 2**20
"""Size of a private Ray's object store. Baton puts almost nothing into it, and Ray refuses less than 75 MiB."""

_SYSTEM_CONFIG: dict[str, int | bool] = {
    # Otherwise, `ray.init` ignores Ctrl-C until a Python process per CPU has started.
    "prestart_worker_first_driver": False,
    # The raylet connects to a socket that one of its threads opens at that moment. By default, the raylet
    # waits 1 s if the socket is not open yet.
    "raylet_client_connect_timeout_milliseconds": 100,
    "raylet_client_num_connect_attempts": 100,
}

_NICENESS = "RAY_worker_niceness"
"""A worker's process reads this in its environment. By default, Ray gives workers niceness 15, and any other busy
program takes nearly all their CPU time. So it is 0 unless the command's environment has another value."""

_PROBE_TIMEOUT_S = 5.0

_TRY_AGAIN_S = 1.0

_MAX_SOCKET_PATH = 107  # sun_path of unix(7) less its terminator

_RAYS_FOLDER = "r"
"""Ray's folder, inside a folder that only this user may enter: Ray makes its own folder writable for all
users. The name is short because the paths of the sockets inside are long."""

_ROOT = Path(__file__).resolve().parent.parent.parent

# The packages that workers on an external Ray cluster need; a private Ray runs in this environment.
_PACKAGES = (
    "baton",
    "cluster",
    "decode_worker",
    "engine",
    "kv_transfer",
    "prefill_worker",
    "scheduler",
    "worker",
)


def prepare_environment(config: ClusterConfig, environment: MutableMapping[str, str], home: Path) -> None:
    """Sets variables that Ray reads when it is first imported, so call this before any import of Ray.

    A private Ray stays on loopback and requires a secret token. When Ray joins a cluster by its
    address, it does not look for a token by itself, so this function does.
    """
    environment.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Else Ray prints lost workers and repeated calls to the driver's stdout, which is for JSON.
    environment.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".")
    # If this variable is missing and the driver's parent is process 1 (as in a systemd unit), Ray believes that the
    # driver's raylet has ended. Then, when a connection to the raylet breaks, Ray ends the driver at once, without a
    # message.
    environment["RAY_RAYLET_PID"] = str(os.getpid())
    if config.ray_address == "local":
        environment.setdefault(_NICENESS, "0")
        environment["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # loopback instead of every interface
        environment["RAY_AUTH_MODE"] = "token"
        environment["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    elif "RAY_AUTH_TOKEN" in environment or (home / ".ray" / "auth_token").is_file():
        environment.setdefault("RAY_AUTH_MODE", "token")


@contextmanager
def connect(config: ClusterConfig, num_ranks: int, device: str) -> Iterator[Path | None]:
    """Starts or joins Ray for the body, then ends or leaves it.

    Yields the folder with the logs of a private Ray and its workers; None for an external Ray cluster. Raises
    ClusterError. A private Ray declares CPUs for `num_ranks` ranks even if the machine has fewer cores: Ray
    only counts them, so a laptop with few cores can serve, too. Its logs are kept only if its start or the body
    raises an Exception.
    """
    assert threading.current_thread() is threading.main_thread(), (
        "a private Ray dies with the thread that starts it"
    )
    import ray

    if config.ray_address != "local":
        with _shut_down_after(ray):
            _join(ray, config)
            yield None
        return
    try:
        folder = Path(tempfile.mkdtemp(prefix="baton-ray-", dir=_short_folder(tempfile.gettempdir())))
    except OSError as error:
        raise ClusterError(
            f"cannot make a folder for Ray: {error}; set TMPDIR to a folder with room that this user may write"
        ) from error
    is_worth_keeping = False

    def remove() -> None:
        shutil.rmtree(folder, ignore_errors=True)

    # An interrupted `ray.init` ends its processes in an exit hook of its own. A hook registered earlier runs later,
    # when no process writes to the folder any more.
    atexit.register(remove)
    try:
        with _shut_down_after(ray):
            _start(ray, folder / _RAYS_FOLDER, config, num_ranks, device)
            yield folder / _RAYS_FOLDER / "session_latest" / "logs"
    except Exception:
        is_worth_keeping = True
        logger.warning("the logs of Ray and of the workers are kept in %s", folder)
        raise
    finally:
        if not is_worth_keeping:
            remove()
        if is_worth_keeping or not folder.exists():
            atexit.unregister(remove)


def check_token(config: ClusterConfig) -> None:
    """Raises ConfigError if other hosts may reach this Ray, and Ray requires no token.

    Only a process of the cluster can check this. A driver with a token can also join a cluster that requires
    none.
    """
    import ray
    from ray._private.authentication.authentication_utils import is_token_auth_enabled

    addresses = {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    is_open = not is_token_auth_enabled() and not all(map(is_loopback, addresses))
    if is_open and not config.allow_ray_without_token:
        raise ConfigError(
            f"the Ray cluster ({', '.join(sorted(addresses))}) asks for no token: anyone who can connect can run "
            "programs on its nodes. Start Ray with RAY_AUTH_MODE=token on every node (docs/ray.md), or set "
            "cluster.allow_ray_without_token"
        )


@contextmanager
def _shut_down_after(ray: ModuleType) -> Iterator[None]:
    try:
        yield
    finally:
        ray.shutdown()


def _start(ray: ModuleType, folder: Path, config: ClusterConfig, num_ranks: int, device: str) -> None:
    with fewer_processes(), _no_agents_left():
        _init(
            ray,
            address="local",
            namespace=config.name,
            num_cpus=max(os.cpu_count() or 1, math.ceil(num_ranks * config.cpus_per_worker)),
            num_gpus=None if device == "cuda" else 0,  # None: all GPUs of the machine
            object_store_memory=_OBJECT_STORE_BYTES,
            include_dashboard=False,
            _temp_dir=str(folder),
            _system_config=_SYSTEM_CONFIG,
        )


def _join(ray: ModuleType, config: ClusterConfig) -> None:
    """Joins the cluster. Tries again until the cluster answers, for at most `ray_timeout_s`."""
    # Workers run the code of this checkout, whatever the cluster's nodes have installed.
    modules = [str(_ROOT / package) for package in _PACKAGES]
    # Excludes compiled files, which would make a different package each time.
    niceness = {_NICENESS: os.environ.get(_NICENESS, "0")}
    environment = {"py_modules": modules, "excludes": ["__pycache__"], "env_vars": niceness}
    deadline, is_announced = time.monotonic() + config.ray_timeout_s, False
    while True:
        try:
            _probe(config.ray_address)
            return _init(ray, address=config.ray_address, namespace=config.name, runtime_env=environment)
        except ClusterError as error:
            if time.monotonic() >= deadline:
                raise
            if not is_announced:
                logger.warning(
                    "waiting up to %g s for Ray (cluster.ray_timeout_s): %s",
                    config.ray_timeout_s,
                    error,
                )
            is_announced = True
        ray.shutdown()
        time.sleep(_TRY_AGAIN_S)


def _probe(address: str) -> None:
    """Raises ClusterError if nothing listens at the address. Without this check, Ray would retry for more than a
    minute."""
    match = re.fullmatch(r"([^:/]+):(\d+)", address)
    if match is None:
        return  # `auto`, or an address that only Ray can check
    try:
        socket.create_connection((match[1], int(match[2])), timeout=_PROBE_TIMEOUT_S).close()
    except (OSError, UnicodeError) as error:  # UnicodeError: a name that is no host name, such as 10.0.0..1
        raise ClusterError(f"no Ray cluster answers at {address} (cluster.ray_address): {error}") from error


def _short_folder(folder: str) -> str:
    """The folder for temporary files; /tmp instead if the paths of Ray's sockets would be too long in that folder, or
    not ASCII: Ray encodes them in ASCII."""
    is_usable = folder.isascii() and len(_longest_socket(folder)) <= _MAX_SOCKET_PATH
    return folder if is_usable else "/tmp"


def _longest_socket(folder: str) -> str:
    session = "session_2026-01-01_00-00-00_123456_1234567"
    return f"{folder}/baton-ray-12345678/{_RAYS_FOLDER}/{session}/sockets/plasma_store"


@contextmanager
def _no_agents_left() -> Iterator[None]:
    """Ends the raylet that this process started, and its agents, if the body fails or is interrupted.

    The agents notice the end of their raylet only after a minute if it ends before they were ready.
    """
    try:
        yield
    except BaseException:
        for name, pid in _processes_of_ray():
            if name == "raylet":
                with contextlib.suppress(OSError):  # it has just ended
                    _kill_with_children(pid)
        raise


def _processes_of_ray() -> list[tuple[str, int]]:
    """Name and pid of each process of a private Ray that this process has started, and not waited for."""
    found = []
    for child in _children(os.getpid()):
        with contextlib.suppress(OSError):  # it has just ended
            name = Path(f"/proc/{child}/comm").read_text().strip()
            if name in ("raylet", "gcs_server"):
                found.append((name, child))
    return found


def _kill_with_children(pid: int) -> None:
    """Ends a child of this process, and the child's own children."""
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)  # from now on, it starts no process
    for child in _children(pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
    os.kill(pid, signal.SIGKILL)


def _children(pid: int) -> list[int]:
    """The pids of the child processes; none on systems other than Linux."""
    found: list[int] = []
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # this thread has just ended
            found += map(int, children.read_text().split())
    return found


def lost_process() -> str | None:
    """Which process of this command's private Ray has ended, and how; None if all run, or Ray was joined.

    Ray itself does not notice the end of its raylet: the process stays a zombie, since no process waits for it.
    """
    for name, pid in _processes_of_ray():
        with contextlib.suppress(ChildProcessError):  # it has just ended, and was waited for
            end = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if end is not None and end.si_code == os.CLD_EXITED:
                return f"Ray's process {name} ({pid}) ended with exit code {end.si_status}"
            if end is not None:
                return f"Ray's process {name} ({pid}) was killed by {signal.Signals(end.si_status).name}"
    return None


class _NoFolders(list[str]):
    """Stays empty. Ray adds the current folder, from which workers would import first: its files may come from
    strangers, such as those of a downloaded model with a `torch.py`."""

    def extend(self, _folders: object) -> None:
        """Ignores the folders."""


def _init(ray: ModuleType, address: str, **options: Any) -> None:
    from ray.job_config import JobConfig

    job = JobConfig()
    job._py_driver_sys_path = _NoFolders()
    try:
        with own_signals():
            ray.init(
                address=address, job_config=job, log_to_driver=False, logging_level=logging.ERROR, **options
            )
    except Exception as error:  # Ray raises a bare Exception if a busy machine takes too long
        cause = _root_cause(error).rstrip(".")
        if address != "local":
            raise ClusterError(
                f"could not join the Ray cluster at {address} (cluster.ray_address): {cause}"
            ) from error
        raise ClusterError(
            f"could not start Ray (cluster.ray_address): {cause}; if this machine was busy, try again. On CPUs, "
            "`baton serve --ray-address none` needs no Ray"
        ) from error


def _root_cause(error: BaseException) -> str:
    """The last line of the first error; Ray wraps whole tracebacks into its messages."""
    while error.__cause__ is not None:
        error = error.__cause__
    return ([line for line in str(error).splitlines() if line.strip()] or [type(error).__name__])[-1].strip()
