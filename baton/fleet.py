"""The fleet as its controller sees it: its replicas, their states, and their nodes."""

from dataclasses import dataclass
from enum import Enum

from baton.worker import WorkerEndpoint, WorkerRole, WorkerStatus, check_figures

MAX_DRAIN_NODE_S = 3600.0
"""The longest time that an operator may give a node to drain."""


class ReplicaState(Enum):
    """The state of a replica, as the controller sees it; cluster/controller/replica.py draws how the state changes.

    A replica outlives the processes that fill it.
    """

    PLACING = "placing"
    """No node has room for it yet."""
    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"
    BACKING_OFF = "backing_off"
    """Its process died; each further early death lengthens the wait for the next process."""
    CRASH_LOOP = "crash_loop"
    """Its processes died too often in too short a time. Further processes begin at the longest interval."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaDescription:
    """One worker that the fleet should have."""

    name: str
    role: WorkerRole
    """The worker's role; during a change of role, the new one."""
    state: ReplicaState
    node: str = ""
    """The node that the worker is placed on; empty if there is none."""
    num_starts: int = 0
    """Processes started so far."""
    last_failure: str = ""
    """Why the last incarnation that ended has failed; empty if it ended as requested."""
    next_start_in_s: float | None = None
    """Seconds until the next process may begin. None, except in the states BACKING_OFF and CRASH_LOOP."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeDescription:
    """One machine of the cluster."""

    name: str
    address: str
    is_alive: bool
    is_head: bool = False
    is_draining: bool = False
    """No worker is placed on this node any more."""
    resources: tuple[tuple[str, float], ...] = ()
    """The node's resources by name, e.g. `("CPU", 8.0)`, `("GPU", 8.0)`, `("prefill", 1.0)`."""
    workers: tuple[str, ...] = ()
    """Names of the workers on this node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetDescription:
    """Everything the controller knows."""

    replicas: tuple[ReplicaDescription, ...]
    nodes: tuple[NodeDescription, ...]
    controller_incarnation: str
    """The controller's incarnation. A new one means that the controller restarted and adopted the workers."""
    decisions: tuple[str, ...] = ()
    """The autoscaler's latest decisions, one sentence each, oldest first; in a dry run, what it would do."""


@dataclass(frozen=True, slots=True)
class FleetView:
    """The workers that serve, as of `version`. Each controller incarnation counts versions on its own."""

    controller_incarnation: str
    version: int
    endpoints: tuple[WorkerEndpoint, ...]
    deaths: tuple[tuple[str, str], ...] = ()
    """Of each replica, the last incarnation that failed while it served, with the reason."""


@dataclass(frozen=True, slots=True)
class RolloutStep:
    """Progress of a rollout: this worker's new incarnation serves."""

    worker: str
    incarnation: str
    done: int
    count: int


@dataclass(frozen=True, slots=True)
class CacheFlush:
    """The result of emptying one worker's prefix cache."""

    worker: str
    obstacle: str = ""
    """Why the cache was not emptied; empty if it was emptied."""

    @property
    def is_flushed(self) -> bool:
        return not self.obstacle


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayReport:
    """What a gateway observed lately, as input for autoscaling. Times are in seconds."""

    gateway: str
    """The gateway's incarnation. A restarted gateway has a new one, and reports only what happened since its start."""
    oldest_queued_s: float
    """The longest wait of requests that wait for a worker with room, not only for their turn at the gateway."""
    oldest_without_prefill_s: float
    """The longest wait of requests that require a prefill worker, while there is none for them."""
    num_first_tokens: int
    ttft_s: tuple[float, float]
    """Median and 99th percentile of the time to first token; zeros without a measurement."""
    itl_s: tuple[float, float]
    """Median and 99th percentile of the time between two tokens of a request; zeros without a measurement."""
    workers: tuple[WorkerStatus, ...]
    """The status of each worker in its last heartbeat."""

    def __post_init__(self) -> None:
        check_figures(
            oldest_queued_s=self.oldest_queued_s,
            oldest_without_prefill_s=self.oldest_without_prefill_s,
            num_first_tokens=self.num_first_tokens,
            median_ttft_s=self.ttft_s[0],
            p99_ttft_s=self.ttft_s[1],
            median_itl_s=self.itl_s[0],
            p99_itl_s=self.itl_s[1],
        )
