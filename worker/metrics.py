"""WorkerMetrics: a worker's state and counts for Prometheus; computed when read, so they cost the engine nothing.

Some names are vLLM's, apart from the prefix. They have the same meaning as in vLLM; docs/observability.md lists both.
"""

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Metric, ProcessCollector

from baton.system.exposition import CollectedOnDemand, Values, counter, gauge, histogram, render
from baton.version import baton_version
from baton.worker import KVPeerCounts, WorkerStatus
from worker.step_counts import StepCounts

Labelled = dict[tuple[str, ...], float]

COUNTERS = {
    "preemptions": (
        "num_preemptions",
        "Requests preempted: blocks ran out, a step failed, or the prefix cache was emptied by force",
    ),
    "prefix_cache_queries": ("prefix_cache_queries", "Tokens looked up in the prefix cache"),
    "prefix_cache_hits": ("prefix_cache_hits", "Tokens found in the prefix cache"),
    "non_finite_steps": ("non_finite_steps", "Steps whose logits were not all finite"),
    "requests_given_back": ("requests_given_back", "Requests given back, to continue on other workers"),
    "forced_tokens": ("forced_tokens", "Tokens that a grammar forced, which no step sampled"),
    "spec_decode_num_drafts": ("spec_decode_num_drafts", "Steps of a request that verified drafts"),
    "spec_decode_num_draft_tokens": ("spec_decode_num_draft_tokens", "Drafts verified"),
    "spec_decode_num_accepted_tokens": ("spec_decode_num_accepted_tokens", "Drafts that were right"),
}
"""Scheduler counters with metrics of their own. All others are exported as `worker_events`, by name."""

ACCEPTED_AT = "spec_decode_num_accepted_tokens_per_pos"
"""Prefix of the scheduler's counters of accepted drafts by place: 0, 1 ..."""

DENIED = {"request_denied_peers": "request", "kv_denied_peers": "kv"}
"""Counters of refused connections, and the value of the label `plane`."""


class WorkerMetrics:
    """Renders the metrics. Any thread may call it, but only one thread at a time."""

    def __init__(
        self,
        status: Callable[[], WorkerStatus],
        steps: StepCounts,
        device_memory: Callable[[], Mapping[str, int]],
        borrowed_s: Callable[[], float] | None = None,
    ) -> None:
        """`device_memory`: bytes by kind; empty for a device without memory of its own. `borrowed_s`: how long CPUs of
        other workers have computed for this one; None for a worker that does not borrow CPUs."""
        self._status = status
        self._steps = steps
        self._device_memory = device_memory
        self._borrowed_s = borrowed_s
        self._registry = CollectorRegistry()
        self._registry.register(CollectedOnDemand(self._collect))
        ProcessCollector(registry=self._registry)

    def render(self, accept: str) -> tuple[bytes, str]:
        """A scrape's content, and its content type."""
        return render(self._registry, accept)

    def _collect(self) -> Iterator[Metric]:
        status = self._status()
        worker = status.ref.name
        info = {
            "worker": worker,
            "role": status.role.value,
            "state": status.state.value,
            "incarnation": status.ref.incarnation,
            "block_size": str(status.ref.block_size),
            "version": baton_version(),
        }
        yield gauge("worker_info", "Always 1", list(info), {tuple(info.values()): 1})
        yield from _requests(worker, status)
        yield from _blocks(worker, status)
        yield from _counters(worker, status.counters)
        yield from _peers(worker, status.kv_peers)
        yield from self._engine(worker)

    def _engine(self, worker: str) -> Iterator[Metric]:
        steps = self._steps
        yield histogram(
            "iteration_tokens_total", "Tokens per step", ["worker"], {(worker,): steps.tokens.counts()}
        )
        yield histogram(
            "step_seconds",
            "Time of a step; `prefill`: a step that computed prompt tokens",
            ["worker", "kind"],
            {(worker, "prefill"): steps.prefill_s.counts(), (worker, "decode"): steps.decode_s.counts()},
        )
        yield counter(
            "worker_computed_tokens",
            "Tokens computed by the model",
            ["worker", "kind"],
            {(worker, "prompt"): steps.num_prompt_tokens, (worker, "decode"): steps.num_decode_tokens},
        )
        if self._borrowed_s is not None:
            yield counter(
                "worker_borrowed_cpu_seconds",
                "Time for which CPUs of other workers computed for this worker",
                ["worker"],
                {(worker,): self._borrowed_s()},
            )
        memory: Values = {(worker, kind): size for kind, size in self._device_memory().items()}
        yield gauge("device_memory_bytes", "GPU memory of rank 0", ["worker", "kind"], memory)


def _requests(worker: str, status: WorkerStatus) -> Iterator[Metric]:
    labels, at = ["worker", "role"], (worker, status.role.value)
    requests, load = status.requests, status.load
    for name, meaning, value in (
        ("num_requests_running", "Requests in the batch", requests.running),
        ("num_requests_waiting", "Requests that wait to join the batch", requests.waiting),
        (
            "num_requests_loading",
            "Requests that wait for KV from a prefill worker",
            requests.waiting_for_remote_kvs,
        ),
        (
            "worker_queued_prompt_tokens",
            "Tokens to compute before the waiting requests can decode",
            load.num_queued_prompt_tokens,
        ),
        (
            "worker_oldest_waiting_seconds",
            "Age of the oldest request that waits for its first step",
            load.oldest_waiting_s,
        ),
        (
            "worker_prefill_tokens_per_second",
            "Prompt tokens per second in recent prefill steps; 0: unknown",
            load.prefill_tokens_per_s,
        ),
        (
            "worker_decode_step_seconds",
            "Time of a recent decode step; 0: unknown",
            load.decode_step_s,
        ),
    ):
        yield gauge(name, meaning, labels, {at: value})


def _blocks(worker: str, status: WorkerStatus) -> Iterator[Metric]:
    blocks, at = status.kv_blocks, (worker, status.role.value)
    usage = 1.0 - blocks.free / blocks.total if blocks.total else 0.0
    yield gauge(
        "kv_cache_usage_perc", "Share of the KV blocks in use, 0 to 1", ["worker", "role"], {at: usage}
    )
    states: Labelled = {(*at, state): getattr(blocks, state) for state in BLOCK_STATES}
    yield gauge("kv_blocks", "KV blocks by use", ["worker", "role", "state"], states)
    host: Labelled = {(*at, "used"): blocks.host_used, (*at, "free"): blocks.host_total - blocks.host_used}
    yield gauge("host_kv_blocks", "Host memory blocks for preempted KV", ["worker", "role", "state"], host)


BLOCK_STATES = ("free", "referenced", "leased", "quarantined")


def _counters(worker: str, counts: Mapping[str, int]) -> Iterator[Metric]:
    for key, (name, meaning) in COUNTERS.items():
        yield counter(name, meaning, ["worker"], {(worker,): counts.get(key, 0)})
    denied: Labelled = {(worker, plane): counts.get(key, 0) for key, plane in DENIED.items()}
    yield counter("denied_peers", "Refused connections", ["worker", "plane"], denied)
    accepted: Labelled = {
        (worker, key.removeprefix(f"{ACCEPTED_AT}_")): count
        for key, count in counts.items()
        if key.startswith(ACCEPTED_AT)
    }
    yield counter(ACCEPTED_AT, "Right drafts, by their place in a step", ["worker", "position"], accepted)
    others = sorted(
        key for key in counts.keys() - COUNTERS.keys() - DENIED.keys() if not key.startswith(ACCEPTED_AT)
    )
    events: Labelled = {(worker, name): counts[name] for name in others}
    yield counter("worker_events", "All other counters of a worker", ["worker", "event"], events)


def _peers(worker: str, rows: tuple[KVPeerCounts, ...]) -> Iterator[Metric]:
    labels = ["worker", "end", "peer", "transport"]
    outcomes: Labelled = {}
    sizes: Labelled = {}
    times: Labelled = {}
    for row in rows:
        at = worker, row.role.value, row.peer, row.transport
        sizes[at] = row.num_bytes
        for outcome in ("done", "failed", "not_needed"):
            outcomes[(*at, outcome)] = getattr(row, outcome)
        for phase in ("queued", "moving", "exposed"):
            times[(*at, phase)] = getattr(row, f"{phase}_s")
    yield counter("kv_peer_handovers", "Hand-overs, by rank transfer", [*labels, "outcome"], outcomes)
    yield counter("kv_peer_bytes", "KV bytes sent, offered or received", labels, sizes)
    yield counter("kv_peer_seconds", "Total time of hand-overs", [*labels, "phase"], times)
