"""ClusterSnapshot: the cluster as a gateway sees it at one moment, in the shape that HTTP returns."""

from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class BlocksSeen:
    """A worker's KV blocks: total = free + used + leased + quarantined."""

    total: int = 0
    free: int = 0
    used: int = 0
    leased: int = 0
    """Blocks of finished prefills, until they are read."""
    quarantined: int = 0
    """Blocks of transfers that were given up, until no transfer can write them any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSeen:
    """A worker as of its last heartbeat; without numbers before its first."""

    name: str
    role: Literal["prefill", "decode"]
    state: str
    """`starting`, `ready`, `draining`, `stopped`, `hung`, `dead`; without a process `placing`, `backing_off`,
    `crash_loop`."""
    blocks: BlocksSeen = BlocksSeen()
    running: int = 0
    waiting: int = 0
    """Requests that wait for their first step."""
    waiting_for_kv: int = 0
    """Requests that wait for blocks on their way here."""
    node: str | None = None
    """Its node; for administrators."""
    failure: str | None = None
    """Why its previous process ended; for administrators."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoversSeen:
    """What one worker received from another since its start; with tensor parallelism, for each pair of ranks."""

    prefill: str
    decode: str
    done: int
    failed: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LastMinute:
    """A value for each whole second, oldest first; latencies are null for seconds without any."""

    newest: int
    """Number of the newest second, from an arbitrary origin."""
    tokens: tuple[int, ...]
    finished: tuple[int, ...]
    ttft_p50_s: tuple[float | None, ...]
    ttft_p99_s: tuple[float | None, ...]
    itl_p50_s: tuple[float | None, ...]
    itl_p99_s: tuple[float | None, ...]
    ttft_s: tuple[float, float]
    """Median and 99th percentile of the whole minute; zeros if there was nothing."""
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
    """A machine of the cluster; for administrators."""

    name: str
    address: str
    is_alive: bool
    is_head: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSnapshot:
    """Complete: a reader needs no earlier snapshot."""

    model: str
    version: str
    workers: tuple[WorkerSeen, ...]
    handovers: tuple[HandoversSeen, ...]
    """The busiest pairs."""
    gateway: GatewaySeen
    last_minute: LastMinute
    controller: Literal["none", "answering", "away"]
    """Whether there is a controller that starts and replaces workers, and whether it answers."""
    nodes: tuple[NodeSeen, ...] = ()

    def for_everybody(self) -> "ClusterSnapshot":
        """Without what only administrators may see: machines, and failures, which may name them."""
        workers = tuple(replace(worker, node=None, failure=None) for worker in self.workers)
        return replace(self, workers=workers, nodes=())
