"""Observation: the planner's input, merged from gateways' reports and the controller's replicas; pure."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from baton.fleet import GatewayReport, ReplicaDescription, ReplicaState
from baton.worker import WorkerRole, WorkerStatus

MIN_FOR_P99 = 5
"""With fewer times to first token, the median counts: the 99th percentile would be the time of a single request."""
MIN_FOR_MEDIAN = 2
"""With fewer times to first token, none counts."""

COMING = frozenset({ReplicaState.PLACING, ReplicaState.STARTING})
CHANGING = COMING | {ReplicaState.DRAINING}


@dataclass(frozen=True, slots=True)
class ObservedWorker:
    """A replica, and the last status of its worker."""

    replica: ReplicaDescription
    status: WorkerStatus | None = None
    """None: no gateway has reported it recently."""
    is_leaving: bool = False
    """The worker drains, or is about to, and no other incarnation follows."""

    @property
    def num_requests(self) -> int:
        return 0 if self.status is None else self.status.requests.total


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """The fleet at one moment. Times are in seconds, 0 without a measurement."""

    workers: tuple[ObservedWorker, ...]
    oldest_queued_s: float = 0.0
    """The longest wait of a request at a gateway for a worker with room."""
    oldest_without_prefill_s: float = 0.0
    """The longest wait, at a gateway, of a request that requires a prefill worker and finds none."""
    ttft_p99_s: float = 0.0
    """The worst gateway's 99th percentile, or median if the gateway had few first tokens."""
    slowest_ttft_s: float = 0.0
    """The worst gateway's 99th percentile, however few first tokens it had."""
    itl_p99_s: float = 0.0

    def of(self, role: WorkerRole) -> list[ObservedWorker]:
        """All replicas of the role, in any state."""
        return [worker for worker in self.workers if worker.replica.role is role]

    def serving(self, role: WorkerRole) -> list[ObservedWorker]:
        return [worker for worker in self.of(role) if worker.replica.state is ReplicaState.SERVING]


def merge(
    replicas: Sequence[ReplicaDescription], reports: Sequence[GatewayReport], leaving: Collection[str] = ()
) -> Observation:
    """Merges the reports of all gateways, of which there is at least one. The worst latencies and queues count, since
    each gateway has its own clients.

    All gateways receive the same status of a worker, so the status from any gateway is used. `leaving`: the names of
    leaving workers.
    """
    status_by_name = {status.ref.name: status for report in reports for status in report.workers}
    return Observation(
        workers=tuple(
            ObservedWorker(replica, status_by_name.get(replica.name), replica.name in leaving)
            for replica in replicas
        ),
        oldest_queued_s=max(report.oldest_queued_s for report in reports),
        oldest_without_prefill_s=max(report.oldest_without_prefill_s for report in reports),
        ttft_p99_s=max(map(_ttft_p99_s, reports)),
        slowest_ttft_s=max(report.ttft_s[1] for report in reports),
        itl_p99_s=max(report.itl_s[1] for report in reports),
    )


def _ttft_p99_s(report: GatewayReport) -> float:
    median_s, p99_s = report.ttft_s
    if report.num_first_tokens >= MIN_FOR_P99:
        return p99_s
    return median_s if report.num_first_tokens >= MIN_FOR_MEDIAN else 0.0
