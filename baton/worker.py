"""What a worker reports about itself to the rest of the cluster."""

import math
from dataclasses import dataclass
from enum import Enum

from baton.errors import WireError
from baton.kv import TransferRole, WorkerRef
from baton.kv_groups import ONE_GROUP, KVGroups


def check_figures(**figures: float) -> None:
    """Raises WireError for a figure that is negative or not finite: routers and the autoscaler compute with it."""
    for name, figure in figures.items():
        if not 0 <= figure < math.inf:
            raise WireError(f"{name}: got {figure}; must be 0 or more, and finite")


class WorkerRole(Enum):
    """A worker's current role; it may change without a restart."""

    PREFILL = "prefill"
    DECODE = "decode"


class WorkerState(Enum):
    """STARTING -> READY -> DRAINING -> STOPPED; a change of role goes from DRAINING back to READY.

    DEAD: the worker reported a failure that ended it, or other processes infer its end from silence or a broken
    connection. HUNG: a thread of the worker makes no progress, and its process is about to end.
    """

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    STOPPED = "stopped"
    DEAD = "dead"
    HUNG = "hung"

    @property
    def has_ended(self) -> bool:
        """Whether the worker has ended. Its requests and blocks are then lost, unless it gave them back before."""
        return self in (WorkerState.STOPPED, WorkerState.DEAD, WorkerState.HUNG)


@dataclass(frozen=True, slots=True)
class WorkerEndpoint:
    """Where a worker can be reached; known once its ports are bound, since the system picks free ports."""

    ref: WorkerRef
    role: WorkerRole
    request_address: str
    node: str
    pid: int
    metrics_address: str = ""
    """`HOST:PORT` where it serves Prometheus metrics over HTTP at /metrics; empty if it does not."""
    num_threads: int = 0
    """The number of threads with which each rank computes on a CPU; 0 on a GPU."""
    cpus: tuple[int, ...] = ()
    """The logical CPUs that the worker is pinned to; empty: it is not pinned."""
    quantization: str = ""
    """How the worker stores the model's matrices: `int8`, `int4`, `fp8`, `gguf` (a GGUF file's own bits), or
    the method of a checkpoint that is quantized already (`gptq`, `awq`, `compressed-tensors`); empty: in the
    model's data type. With `model.quantization: auto`, the value depends on the worker's machine."""


@dataclass(frozen=True, slots=True)
class StartProgress:
    """What a starting worker is doing, and how much of it is done."""

    what: str
    done: int
    count: int


@dataclass(frozen=True, slots=True)
class KVBlockCounts:
    """free + referenced + leased + quarantined = total, at every moment.

    `leased` blocks of finished prefills wait to be read. `quarantined` blocks may still be written by a transfer that
    was given up. Blocks of host memory are counted apart: `host_used` of them hold preempted KV.
    """

    total: int
    free: int
    leased: int
    quarantined: int
    host_total: int = 0
    host_used: int = 0

    @property
    def referenced(self) -> int:
        return self.total - self.free - self.leased - self.quarantined


@dataclass(frozen=True, slots=True)
class KVPeerCounts:
    """Rank transfers with one peer over one transport, since the start of the worker."""

    role: TransferRole
    """The end that this worker was on."""
    peer: str
    """The peer's name."""
    transport: str
    """Empty for rank transfers that ended before the two ends agreed on a transport."""
    done: int = 0
    failed: int = 0
    """Rank transfers that ended in any other way, while the request continued: prefill failed, refused,
    expired, given up."""
    not_needed: int = 0
    """Rank transfers whose request ended first: cancelled, past its deadline, or answered by the prefill worker."""
    num_bytes: int = 0
    queued_s: float = 0.0
    """Consumer: seconds from the request for pieces to the first piece; overlaps the prefill."""
    moving_s: float = 0.0
    """Consumer: seconds from the first piece to the last."""
    exposed_s: float = 0.0
    """Producer: seconds from the end of the prefill until the consumer had verified everything."""

    def __add__(self, other: "KVPeerCounts") -> "KVPeerCounts":
        """The sum of two counts with the same peer over the same transport."""
        assert (self.role, self.peer, self.transport) == (other.role, other.peer, other.transport)
        return KVPeerCounts(
            self.role,
            self.peer,
            self.transport,
            self.done + other.done,
            self.failed + other.failed,
            self.not_needed + other.not_needed,
            self.num_bytes + other.num_bytes,
            self.queued_s + other.queued_s,
            self.moving_s + other.moving_s,
            self.exposed_s + other.exposed_s,
        )


@dataclass(frozen=True, slots=True)
class RequestCounts:
    """How many requests run, wait to run, or wait for KV from another worker."""

    running: int
    waiting: int
    waiting_for_remote_kvs: int

    @property
    def total(self) -> int:
        return self.running + self.waiting + self.waiting_for_remote_kvs


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """How busy a worker is, measured by itself over its last steps; a rate of 0 has not been measured yet."""

    num_queued_prompt_tokens: int = 0
    """Prompt tokens that are not computed yet, of requests whose prompt waits or is being computed."""
    oldest_waiting_s: float = 0.0
    """Age of the request that has waited longest for its first step."""
    prefill_tokens_per_s: float = 0.0
    """Prompt tokens per second of all steps but decode steps and small ones; see worker/load.py."""
    decode_step_s: float = 0.0
    """Time of a decode step: about the time between two tokens of a request."""

    def __post_init__(self) -> None:
        check_figures(
            num_queued_prompt_tokens=self.num_queued_prompt_tokens,
            oldest_waiting_s=self.oldest_waiting_s,
            prefill_tokens_per_s=self.prefill_tokens_per_s,
            decode_step_s=self.decode_step_s,
        )


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """What a worker reports in each heartbeat. Heartbeats keep a fixed pace, however long a step takes."""

    ref: WorkerRef
    role: WorkerRole
    state: WorkerState
    kv_blocks: KVBlockCounts
    requests: RequestCounts
    counters: dict[str, int]
    """Monotonic counts for metrics and tests, e.g. `preemptions`, `kv_late_messages`."""
    kv_peers: tuple[KVPeerCounts, ...] = ()
    failure: str = ""
    """Why its engine ended, if it ended by itself."""
    load: WorkerLoad = WorkerLoad()
    max_num_seqs: int = 0
    """How many requests a step can hold; 0: unknown."""
    max_num_batched_tokens: int = 0
    """How many tokens a step can hold; 0: unknown."""
    kv_groups: KVGroups = ONE_GROUP
    """The KV groups of the model's layers. Each group has its own blocks for a request's tokens."""
    suspects: tuple[str, ...] = ()
    """In heartbeats to gateways: the suspects whose turns have begun on the worker; see worker/suspect_turns.py."""
    takes_suspects: bool = True
    """Whether no suspect has its turn at present. The worker may keep the next turn for a gateway that it refused."""

    @property
    def num_decoding(self) -> int:
        """About how many requests decode in one step: the running ones, but at most `max_num_seqs`. With
        `prefill_first`, more requests may run."""
        return min(self.requests.running, self.max_num_seqs or self.requests.running)
