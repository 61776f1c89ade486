"""WorkerControl: carries out control calls on a worker; does not know how they arrived."""

import threading
from typing import Any

from baton.messages.control import ControlRequest, Done, Drain, Drained, FlushCache, SetRole, WaitStatus
from worker.host import EngineHost


class WorkerControl:
    """Carries out calls on a worker that was started. Calls come on any thread, and may block."""

    def __init__(self, worker: EngineHost) -> None:
        self._worker = worker
        self._ended = threading.Event()
        worker.when_ended(self._ended.set)

    def call(self, request: ControlRequest[Any]) -> object:
        """The answer to one of WORKER_CALLS. Raises BatonErrors."""
        match request:
            case WaitStatus(after_s):
                self._ended.wait(after_s)
                return self._worker.status()
            case Drain(timeout_s):
                return Drained(self._worker.drain(timeout_s))
            case SetRole(role, timeout_s):
                self._worker.set_role(role, timeout_s)
                return Done()
            case FlushCache(force, timeout_s):
                self._worker.flush_cache(timeout_s, force=force)
                return Done()
        raise AssertionError(f"{request} is no call of a worker")
