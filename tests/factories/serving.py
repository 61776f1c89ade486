"""`baton serve` or `baton gateway` as a user starts it: a process whose descendants can all be found."""

import asyncio
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil

from gateway.client import GatewayClient

START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 180.0
"""The time limit for a stop. It is also enough for a command that fails while it starts, on a busy
machine."""
COMMAND = [sys.executable, "-P", "-m", "cli.main"]
"""Like the installed command, it imports nothing from the current folder."""
FORKING_COMMAND = [sys.executable, "-m", "tests.factories.fork_server", "cli.main"]
"""Its workers are forks of one process, instead of importing PyTorch."""
OPTIONS = ["--grpc-port", "0", "--http-port", "0", "--routing-mode", "disaggregated", "--json"]
"""The routing mode of tests, since the decisions of `auto` depend on times. A test that needs `auto` repeats
the flag."""
_MARKER = "BATON_TEST_MARKER"


class ServeProcess:
    """A running `baton serve --json`, or another command.

    All its descendants inherit a marker in their environment.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._marker = secrets.token_hex(8)
        self.temporary = Path(
            tempfile.mkdtemp(prefix="b", dir="/tmp")
        )  # a short path; otherwise Ray puts its sockets elsewhere
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment, _MARKER: self._marker, "TMPDIR": str(self.temporary)},
            start_new_session=True,
        )
        self.stderr = ""
        self._stderr_grew = threading.Condition()
        self._reader = threading.Thread(target=self._read_stderr)
        self._reader.start()

    def wait_ready(self) -> dict[str, Any]:
        """Blocks until the ready line, and returns its JSON object."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"it ended with {self.process.wait()}:\n{self.stderr}"
        ready: dict[str, Any] = json.loads(line)
        return ready

    def wait_for_text(self, text: str) -> None:
        """Blocks until stderr contains this text."""
        with self._stderr_grew:
            came = self._stderr_grew.wait_for(lambda: text in self.stderr, START_TIMEOUT_S)
        assert came, f"{text!r} did not come:\n{self.stderr}"

    def interrupt(self) -> None:
        """Sends Ctrl-C as a terminal does: to the whole foreground process group."""
        os.killpg(self.process.pid, signal.SIGINT)

    def descendants(self) -> list[psutil.Process]:
        """Every live process that carries the marker, whatever its parent."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(_MARKER) == self._marker and process.pid != self.process.pid:
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
                continue
        return found

    def wait_gone(self) -> int:
        """Waits until the command and everything it started have ended; returns the exit code.

        Fails with the processes that are left.
        """
        try:
            code = self.process.wait(timeout=STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it did not end:\n{self.stderr}") from None
        self._reader.join(STOP_TIMEOUT_S)
        _, alive = psutil.wait_procs(self.descendants(), timeout=STOP_TIMEOUT_S)
        assert alive == [], f"left behind: {[(p.pid, p.cmdline()) for p in alive]}\n{self.stderr}"
        return code

    def destroy(self) -> None:
        """Ends everything, for a test that failed before its end."""
        for process in self.descendants():
            process.kill()
        self.process.kill()
        self.process.wait(timeout=STOP_TIMEOUT_S)
        self._reader.join(STOP_TIMEOUT_S)
        assert self.process.stdout is not None
        self.process.stdout.close()
        shutil.rmtree(self.temporary)

    def _read_stderr(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr:
            for line in self.process.stderr:
                with self._stderr_grew:
                    self.stderr += line
                    self._stderr_grew.notify_all()


def listening_addresses(processes: list[psutil.Process]) -> set[tuple[str, int]]:
    """(host, port) of every TCP socket that these processes listen on."""
    return {
        (connection.laddr.ip, connection.laddr.port)
        for process in processes
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }


def shared_memory_of(processes: list[psutil.Process]) -> set[Path]:
    """The files of /dev/shm that these processes have mapped."""
    paths = set[Path]()
    for process in processes:
        with suppress(psutil.NoSuchProcess):  # it ended meanwhile
            paths |= {Path(each.path) for each in process.memory_maps()}
    return {
        path for path in paths if path.parent == Path("/dev/shm") and not path.name.endswith(" (deleted)")
    }


def serving(
    *arguments: str, environment: Mapping[str, str] = MappingProxyType({})
) -> AbstractContextManager[ServeProcess]:
    """Runs `baton serve` with these arguments.

    At the end of the `with` block, nothing of the service is left, even after a failure.
    """
    return running([*COMMAND, "serve", *OPTIONS, *arguments], environment)


def serving_with_forks(*arguments: str) -> AbstractContextManager[ServeProcess]:
    """As `serving`, for tests with many workers that do not test how one starts."""
    return running([*FORKING_COMMAND, "serve", *OPTIONS, *arguments], {})


def joining(*arguments: str, environment: Mapping[str, str]) -> AbstractContextManager[ServeProcess]:
    """Runs `baton gateway` with these arguments, as `serving` does."""
    return running([*COMMAND, "gateway", *OPTIONS, *arguments], environment)


@contextmanager
def running(command: Sequence[str], environment: Mapping[str, str]) -> Iterator[ServeProcess]:
    """Runs any command that prints one JSON line when it is ready, as `serving` does."""
    process = ServeProcess(command, environment)
    try:
        yield process
    finally:
        process.destroy()


def baton(*arguments: str, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
    """Runs a client command to its end."""
    command = [sys.executable, "-m", "cli.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)


def workers_of(target: str) -> list[dict[str, Any]]:
    """As `baton status --json` has them; for tests that look often, since a command takes a second to start."""

    async def describe() -> list[dict[str, Any]]:
        async with GatewayClient(target) as client:
            workers: list[dict[str, Any]] = (await client.describe())["workers"]
            return workers

    return asyncio.run(describe())
