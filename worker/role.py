"""The interface between an engine and its role: what the role accepts, and when it is drained."""

from typing import Protocol

from baton.request import EngineRequest
from baton.worker import KVBlockCounts, RequestCounts, WorkerRole


class Role(Protocol):
    """A worker process's part in the cluster. Roles hold no engine state, so one can replace another at run time."""

    @property
    def kind(self) -> WorkerRole: ...

    def admit(self, request: EngineRequest, counts: RequestCounts) -> None:
        """Raises a RequestError, with the reason, if this role may not take the request now."""
        ...

    def is_drained(self, counts: RequestCounts, blocks: KVBlockCounts) -> bool:
        """Whether the process could stop now without any loss."""
        ...
