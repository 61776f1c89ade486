"""Workers' processes as forks of one that has imported PyTorch, which takes two CPU seconds; a fork takes none.

    test's process    `Popen([python, "-m", "worker", ...])` asks the fork server       `forks_workers`
    fork server       has imported everything, has one thread, and does nothing else    `_serve`
    worker            a fork of it, which runs the module as `python -m` does, and becomes a child of the test's process

The worker has the command's arguments, environment, folder and files, and starts its ranks in the same way. Code that
wants PyTorch and a process of its own may be forked, too (code.py). Tests of how processes start must start real ones.
`python -m tests.factories.fork_server MODULE ...` is `python -m MODULE ...` whose workers are forks.
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
import tempfile
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import psutil

from baton.system.cpus import let_openmp_sleep
from baton.system.garbage import imports
from tests.factories.sabotage import VARIABLE, obey

RANK_0 = "tests.integration.test_ranks"
WORKERS = ("worker", "tests.factories.warm_worker", RANK_0)
PROGRAMS = (*WORKERS, "engine.ranks.entry", "tests.factories.fake_rank", "tests.factories.code")
"""What is forked, if it is started as `python -m PROGRAM ...`."""
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
_HIGH = 900
"""A program's files have lower numbers."""
_PR_SET_CHILD_SUBREAPER = 36


class ForkServer:
    """The server, as its clients see it. Any thread may fork."""

    def __init__(self, line: socket.socket | None = None) -> None:
        """`line`: to a running server; by default, one starts at the first request."""
        self._line = line
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def fork(self, request: dict[str, Any], files: Sequence[int]) -> int:
        """Returns the pid of a new child of this process. The child has these files."""
        with self._lock:
            if self._line is None:
                self._line = self._start()
            socket.send_fds(self._line, [json.dumps(request).encode()], files)
            return int(self._line.recv(100))

    def stop(self) -> None:
        if self._line is not None:
            self._line.close()
        if self._process is not None:
            self._process.wait()

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.factories.fork_server", str(theirs.fileno()), _ROOM],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        return ours


@contextmanager
def forks_workers(server: ForkServer) -> Iterator[None]:
    """Within this context, if a `Popen` of this process would start one of PROGRAMS, the server forks it instead."""
    original = subprocess.Popen
    signature = inspect.signature(original._execute_child)  # type: ignore[attr-defined]

    class Popen(original):  # type: ignore[misc, valid-type]
        def _execute_child(self, *given: Any) -> None:
            named = signature.bind(self, *given).arguments
            command = [part for part in named["args"] if part != "-P"]
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
        _reap_orphans()


def _adopt_orphans(may_adopt: bool) -> None:
    """Whether a descendant whose parent has ended becomes a child of this process."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, int(may_adopt), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


def _reap_orphans() -> None:
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess, ChildProcessError):  # another thread was first
            if child.status() == psutil.STATUS_ZOMBIE:
                os.waitpid(child.pid, os.WNOHANG)


def main() -> None:
    if not sys.argv[1].isdecimal():
        with forks_workers(ForkServer()):
            _run([sys.executable, "-m", *sys.argv[1:]])
    let_openmp_sleep()
    with imports():
        for name in _IMPORTED:
            import_module(name)
    assert len(os.listdir("/proc/self/task")) == 1, "a fork has none of its parent's other threads"
    _serve(socket.socket(fileno=int(sys.argv[1])))


def _serve(line: socket.socket) -> NoReturn:
    """Forks at each request, until the client is gone; answers with the pid."""
    while True:
        message, files, _, _ = socket.recv_fds(line, _MAX_REQUEST_BYTES, _MAX_FILES)
        if not message:
            os._exit(0)
        reading, writing = os.pipe()
        if (between := os.fork()) == 0:
            if os.fork() == 0:
                _begin(json.loads(message), files, writing)
            os._exit(0)  # the client adopts the new process
        os.waitpid(between, 0)
        for file in (writing, *files):
            os.close(file)
        with os.fdopen(reading, "rb") as pipe:
            line.send(pipe.read())


def _begin(request: dict[str, Any], files: Sequence[int], writing: int) -> NoReturn:
    """Reports the pid, and runs the request's command in this process; a worker gets a server for its ranks."""
    server = None
    if request["command"][2] in WORKERS:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.fork() == 0:
            for file in (writing, *files):
                os.close(file)
            ours.close()
            _serve(theirs)
        server = ForkServer(socket.socket(fileno=_high(ours.fileno())))
    report = _high(writing)
    if request["is_session"]:
        os.setsid()
    _keep(files, request["files"])
    os.environ.clear()
    os.environ.update(request["environment"])
    tempfile.tempdir = None  # read from the environment at the next use
    os.chdir(request["folder"])
    _show_command(request["command"])
    os.write(report, str(os.getpid()).encode())
    os.close(report)
    with nullcontext() if server is None else forks_workers(server):
        _run(request["command"])


def _keep(files: Sequence[int], numbers: Sequence[int]) -> None:
    """Gives these files these numbers, and closes all other files below _HIGH."""
    high = [_high(file) for file in files]
    os.closerange(0, _HIGH)
    for file, number in zip(high, numbers, strict=True):
        os.dup2(file, number)
        os.close(file)


def _high(file: int) -> int:
    """Another number of the file, so high that no program asks for it."""
    return fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, _HIGH)


def _run(command: list[str]) -> NoReturn:
    """Runs `python -m MODULE ...` in this process, and ends the process."""
    sys.orig_argv = command
    _, _, module, *arguments = command
    sys.argv = [module, *arguments]
    if module == "worker" and VARIABLE in os.environ:
        threading.Thread(target=obey, args=(Path(os.environ[VARIABLE]),), daemon=True).start()
    code: object = 0
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    os._exit(code if isinstance(code, int) else 1)


def _show_command(command: Sequence[str]) -> None:
    """Replaces this process's command line in /proc, which is in its memory."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end = int(fields[45]), int(fields[46])
    text = "".join(f"{part}\0" for part in command).encode()[: end - begin]
    ctypes.memmove(begin, text.ljust(end - begin, b"\0"), end - begin)


if __name__ == "__main__":
    main()
