"""ClusterSnapshot: the cluster as a gateway sees it at one moment, with the fields of the HTTP response."""

from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class BlocksSeen:
    """A worker's KV blocks: total = free + used + leased + quarantined."""

    total: int = 0
    free: int = 0
    used: int = 0
    leased: int = 0
    """Blocks of finished prefills that the decode workers have not read yet."""
    quarantined: int = 0
    """Blocks of transfers that were given up, as long as a transfer may still write them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSeen:
    """A worker, according to its latest heartbeat. Before the first heartbeat, all counts are 0."""

    name: str
    role: Literal["prefill", "decode"]
    state: str
    """`starting`, `ready`, `draining`, `stopped`, `hung` or `dead`. Without a process: `placing`,
    `backing_off` or `crash_loop`."""
    blocks: BlocksSeen = BlocksSeen()
    running: int = 0
    waiting: int = 0
    """Requests that wait for their first step."""
    waiting_for_kv: int = 0
    """Requests that wait for blocks from a prefill worker."""
    node: str | None = None
    """The worker's node; only for administrators."""
    failure: str | None = None
    """Why the worker, or its previous process, failed; only for administrators."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoversSeen:
    """The hand-overs that one worker received from another since its start. With tensor parallelism, each
    pair of ranks counts."""

    prefill: str
    decode: str
    done: int
    failed: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LastMinute:
    """One value for each complete second, oldest first. Latencies are null for seconds without tokens."""

    newest: int
    """Number of the newest second. Seconds are numbered from an arbitrary moment."""
    tokens: tuple[int, ...]
    finished: tuple[int, ...]
    ttft_p50_s: tuple[float | None, ...]
    ttft_p99_s: tuple[float | None, ...]
    itl_p50_s: tuple[float | None, ...]
    itl_p99_s: tuple[float | None, ...]
    ttft_s: tuple[float, float]
    """Median and 99th percentile of the whole minute; zeros if no token arrived."""
    itl_s: tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySeen:
    """Outcomes of this gateway's requests, counted since its start."""

    in_flight: int
    queued: int
    oldest_queued_s: float
    paths: dict[str, int]
    """Finished requests by path: `disaggregated`, `local`, `fallback`."""
    outcomes: dict[str, int]
    """`received`, `finished`, `failed`, `rejected`, `aborted`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSeen:
    """A machine of the cluster; only for administrators."""

    name: str
    address: str
    is_alive: bool
    is_head: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSnapshot:
    """A complete snapshot, so a reader needs no earlier snapshot."""

    model: str
    version: str
    workers: tuple[WorkerSeen, ...]
    handovers: tuple[HandoversSeen, ...]
    """The busiest pairs."""
    gateway: GatewaySeen
    last_minute: LastMinute
    controller: Literal["none", "answering", "away"]
    """Whether a controller starts and replaces workers, and whether it answers."""
    nodes: tuple[NodeSeen, ...] = ()

    def for_everybody(self) -> "ClusterSnapshot":
        """A copy without the fields for administrators: machines, and failures, which may name machines."""
        workers = tuple(replace(worker, node=None, failure=None) for worker in self.workers)
        return replace(self, workers=workers, nodes=())
