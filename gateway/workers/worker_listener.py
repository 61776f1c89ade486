"""WorkerListener: what receives the workers' reports at a gateway, and the causes of a loss; knows no connection."""

from enum import Enum
from typing import Protocol

from baton.messages.request_plane import KVEvents
from baton.request import RequestOutput
from baton.worker import WorkerStatus


class LossCause(Enum):
    """What first showed a gateway that the requests on a worker will not be answered."""

    DIED = "died"
    """The controller reported the worker's death."""
    DISCONNECTED = "disconnected"
    """The connection broke, for example because the worker's process was killed."""
    SILENT = "silent"
    """No heartbeat arrived, for example because the worker's process was stopped or its host is gone."""
    ENDED = "ended"
    """The worker reported a failure that ended it, or that it stopped without a drain before."""
    HUNG = "hung"
    """The worker reported that one of its threads makes no progress."""
    RESTARTED = "restarted"
    """Another incarnation answers at the worker's address."""
    REPLACED = "replaced"
    """The controller lists another incarnation, and reported no death."""
    SESSION_LOST = "session_lost"
    """Messages were lost, or the worker had ended this gateway's session. The worker itself continues to
    serve."""
    REFUSED = "refused"
    """The worker and the gateway have different secrets or versions."""
    LEFT = "left"
    """The worker ended after its drain, or the controller no longer lists it. This is no loss."""


UNCOUNTED = frozenset({LossCause.REPLACED, LossCause.LEFT})
"""Causes that metrics do not count as losses, since the controller acted as planned."""


class WorkerListener(Protocol):
    """Receives what workers report. RequestDriver implements it; gateway/workers may not import
    gateway/requests."""

    def on_status(self, status: WorkerStatus) -> None:
        """A reachable worker sent a heartbeat."""
        ...

    def on_outputs(self, worker: str, outputs: tuple[RequestOutput, ...]) -> None: ...

    def on_kv_events(self, worker: str, events: KVEvents) -> None:
        """The content of a worker's prefix cache, or changes of it; only after a subscription."""
        ...

    def on_worker_lost(self, worker: str, cause: LossCause, reason: str) -> None:
        """The requests on the worker will not be answered. Called only once before the worker's next
        `on_status`."""
        ...
