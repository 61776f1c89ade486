"""What Baton changes in Ray's driver while it starts or joins: fewer processes, and this process's own signals."""

import contextlib
import ctypes
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

_INSTALL_RAYS_HANDLER = "_ZN3ray6RayLog27InstallFailureSignalHandlerEPKcb"
"""ray::RayLog::InstallFailureSignalHandler(const char*, bool), which installs a handler unless it is installed."""

_OWN_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def fewer_processes() -> Iterator[None]:
    """Makes Ray start without its autoscaler, its log reader and its dashboard server.

    A private Ray uses none of these. Ray starts the server even if the dashboard is off, and `ray.init` waits
    for the server. On two cores, this wait doubles the time of the start.
    """
    from ray._private import node

    class Node(node.Node):  # type: ignore[misc]  # mypy does not read Ray
        def start_monitor(self) -> None:
            """Starts no autoscaler: there are no nodes to add."""

        def start_log_monitor(self) -> None:
            """Starts no log reader: it prints actors' logs in the driver, and `log_to_driver` is False."""

        def start_api_server(self, **_options: object) -> None:
            """Starts no dashboard server."""

    with _replaced(node, "Node", Node):
        yield


@contextmanager
def own_signals() -> Iterator[None]:
    """Keeps Ray from replacing this process's handler of SIGTERM, which stops a start as Ctrl-C does.

    Ray's own handler in C++ prints a stack and aborts the process. `ray.init` installs this handler, unless it is
    installed already. So this function first installs it, and then puts our handler back. While Ray connects,
    SIGINT, SIGTERM and SIGHUP wait, since a driver that is interrupted there ends with SIGSEGV. Afterwards, this
    function puts our handler back again, in case this build of Ray hides the function that installs Ray's handler.

    SIGHUP is blocked in all processes that Ray starts: if the terminal is closed, they must run until the workers have
    drained.
    """
    from ray import _raylet
    from ray._private import utils, worker

    with contextlib.suppress(AttributeError):  # a build of Ray that hides this function
        getattr(ctypes.CDLL(_raylet.__file__), _INSTALL_RAYS_HANDLER)(None, False)
    _restore_handler()
    with (
        _replaced(utils, "set_sigterm_handler", lambda _handler: None),
        _replaced(worker, "connect", _signals_wait()(worker.connect)),
    ):
        former = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})  # which new processes inherit
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, former)


@contextmanager
def _replaced(module: ModuleType, name: str, value: object) -> Iterator[None]:
    names = vars(module)
    former, names[name] = names[name], value
    try:
        yield
    finally:
        names[name] = former


@contextmanager
def _signals_wait() -> Iterator[None]:
    """The handlers of _OWN_SIGNALS run only after the body."""
    came: list[int] = []
    numbers = [number for number in _OWN_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    former = [signal.signal(number, lambda number, _: came.append(number)) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, former, strict=True):
            signal.signal(number, handler)
        for late in came:
            signal.raise_signal(late)


def _restore_handler() -> None:
    if (handler := signal.getsignal(signal.SIGTERM)) is not None:
        signal.signal(signal.SIGTERM, handler)
