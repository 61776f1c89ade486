"""Workers' processes as forks of one that has imported PyTorch, which takes two CPU seconds; a fork takes none.

    test's process    `Popen([python, "-m", "worker", ...])` asks the fork server       `forks_workers`
    fork server       has imported everything, has one thread, and does nothing else    `_serve`
    worker            a fork of it, which runs the module as `python -m` does, and becomes a child of the test's process

The worker has the command's arguments, environment, folder and files, and starts its ranks in the same way. Tests of
how processes start must start real ones.
"""

import ctypes
import fcntl
import inspect
import json
import os
import runpy
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from baton.system.cpus import let_openmp_sleep
from baton.system.garbage import imports
from tests.factories.sabotage import VARIABLE, obey

PROGRAMS = ("worker", "tests.factories.warm_worker", "engine.ranks.entry", "tests.factories.fake_rank")
"""What may be forked."""
_IMPORTED = (
    "worker.process",
    "engine.models.decoder",
    "engine.ranks.process",
    "simulator.device",
    "tests.factories.security",
)
_ROOM = "room for the command lines of forks".ljust(500, ".")
_MAX_REQUEST_BYTES = 2**17
_MAX_FILES = 16
_HIGH = 100
"""Files of a fork get lower numbers."""
_PR_SET_CHILD_SUBREAPER = 36


class ForkServer:
    """The server, as its clients see it. It starts at the first request. Any thread may fork."""

    def __init__(self, *, is_fork: bool = False) -> None:
        """`is_fork`: the server is a fork of this process, which has one thread, and starts at once."""
        self._line, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._is_running = is_fork
        if is_fork:
            if os.fork() == 0:
                self._line.close()
                _serve(self._theirs)
            self._theirs.close()

    def fork(self, request: dict[str, Any], files: Sequence[int]) -> int:
        """The pid of a new child of this process, which has these files."""
        with self._lock:
            if not self._is_running:
                self._is_running = True
                number = self._theirs.fileno()
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "tests.factories.fork_server", str(number), _ROOM],
                    stdin=subprocess.DEVNULL,
                    pass_fds=(number,),
                    start_new_session=True,
                )
                self._theirs.close()
            socket.send_fds(self._line, [json.dumps(request).encode()], files)
            return int(self._line.recv(100))

    def stop(self) -> None:
        self._line.close()
        self._theirs.close()
        if self._process is not None:
            self._process.wait()


@contextmanager
def forks_workers(server: ForkServer) -> Iterator[None]:
    """Within it, a `Popen` of this process that would start one of PROGRAMS has it forked by the server."""
    original = subprocess.Popen
    signature = inspect.signature(original._execute_child)  # type: ignore[attr-defined]

    class Popen(original):  # type: ignore[misc, valid-type]
        def _execute_child(self, *given: Any) -> None:
            named = signature.bind(self, *given).arguments
            command = list(named["args"])
            if command[:2] != [sys.executable, "-m"] or command[2] not in PROGRAMS:
                super()._execute_child(*given)
                return
            ends = [named[end] for end in ("p2cread", "c2pwrite", "errwrite")]
            inherited = [number if end == -1 else end for number, end in enumerate(ends)]
            request = {
                "command": command,
                "environment": dict(os.environ if named["env"] is None else named["env"]),
                "folder": named["cwd"] or os.getcwd(),
                "is_session": named["start_new_session"],
                "files": [0, 1, 2, *named["pass_fds"]],
            }
            self.pid = server.fork(request, [*inherited, *named["pass_fds"]])
            self._child_created = True
            pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
            self._close_pipe_fds(*[named[pipe] for pipe in pipes])

    _adopt_orphans(True)
    subprocess.Popen = Popen  # type: ignore[misc]
    try:
        yield
    finally:
        subprocess.Popen = original  # type: ignore[misc]
        _adopt_orphans(False)


def _adopt_orphans(may_adopt: bool) -> None:
    """Whether a descendant whose parent has ended becomes a child of this process."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, int(may_adopt), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


def main() -> None:
    let_openmp_sleep()
    with imports():
        for name in _IMPORTED:
            import_module(name)
    assert len(os.listdir("/proc/self/task")) == 1, "a fork has none of its parent's other threads"
    _serve(socket.socket(fileno=int(sys.argv[1])))


def _serve(line: socket.socket) -> NoReturn:
    """Forks at each request, until the client is gone."""
    while True:
        message, files, _, _ = socket.recv_fds(line, _MAX_REQUEST_BYTES, _MAX_FILES)
        if not message:
            os._exit(0)
        if (pid := _fork_orphan()) == 0:
            line.close()
            _run(json.loads(message), files)
        for file in files:
            os.close(file)
        line.send(str(pid).encode())


def _fork_orphan() -> int:
    """Like os.fork, but the new process becomes a child of the nearest ancestor that adopts orphans."""
    reading, writing = os.pipe()
    if (between := os.fork()) == 0:
        if (pid := os.fork()) == 0:
            os.close(reading)
            os.close(writing)
            return 0
        os.write(writing, str(pid).encode())
        os._exit(0)
    os.waitpid(between, 0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        return int(pipe.read())


def _run(request: dict[str, Any], files: Sequence[int]) -> NoReturn:
    """Runs the request's command in this process, and ends the process."""
    if request["is_session"]:
        os.setsid()
    _renumber(files, request["files"])
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    sys.orig_argv = request["command"]
    _show_command(request["command"])
    _, _, program, *arguments = request["command"]
    sys.argv = [program, *arguments]
    code: object = 0
    try:
        with forks_workers(ForkServer(is_fork=True)):
            if program == "worker" and VARIABLE in os.environ:
                threading.Thread(target=obey, args=(Path(os.environ[VARIABLE]),), daemon=True).start()
            runpy.run_module(program, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    os._exit(code if isinstance(code, int) else 1)


def _renumber(files: Sequence[int], numbers: Sequence[int]) -> None:
    """Gives each file its number, whatever had it."""
    high = [fcntl.fcntl(file, fcntl.F_DUPFD, _HIGH) for file in files]
    for file in files:
        os.close(file)
    for file, number in zip(high, numbers, strict=True):
        os.dup2(file, number)
        os.close(file)


def _show_command(command: Sequence[str]) -> None:
    """Replaces this process's command line in /proc, which is in its memory."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end = int(fields[45]), int(fields[46])
    text = "".join(f"{part}\0" for part in command).encode()[: end - begin]
    ctypes.memmove(begin, text.ljust(end - begin, b"\0"), end - begin)


if __name__ == "__main__":
    main()
