"""The seam between an engine and the role on top of it: what to accept, and when nothing is left to do."""

from typing import Protocol

from baton.request import EngineRequest
from baton.worker import KVBlockCounts, RequestCounts, WorkerRole


class Role(Protocol):
    """A device process's part in the cluster. Roles hold no engine state, so one can replace another while it runs."""

    @property
    def kind(self) -> WorkerRole: ...

    def admit(self, request: EngineRequest, load: RequestCounts) -> None:
        """Returns if this role may take the request now; raises a RequestError that says why not."""
        ...

    def is_drained(self, load: RequestCounts, blocks: KVBlockCounts) -> bool:
        """Whether the process could stop now without anybody losing anything."""
        ...
