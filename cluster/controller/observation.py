"""Observation: what the planner looks at, put together from gateways' reports and the controller's replicas; pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from baton.fleet import GatewayReport, ReplicaDescription, ReplicaState
from baton.worker import WorkerRole, WorkerStatus

MIN_FINISHED = 5
"""Of fewer requests a 99th percentile of the time to first token says nothing."""

COMING = frozenset({ReplicaState.PLACING, ReplicaState.STARTING})
CHANGING = COMING | {ReplicaState.DRAINING}


@dataclass(frozen=True, slots=True)
class ObservedWorker:
    """A replica, and what the worker in it last said."""

    replica: ReplicaDescription
    status: WorkerStatus | None = None
    """None: no gateway has heard of it lately."""

    @property
    def num_requests(self) -> int:
        if self.status is None:
            return 0
        counts = self.status.requests
        return counts.running + counts.waiting + counts.waiting_for_remote_kvs


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """The fleet at one moment. Times are in seconds, 0 where nothing came."""

    workers: tuple[ObservedWorker, ...]
    oldest_queued_s: float = 0.0
    """Of the requests that wait at a gateway for a worker with room."""
    ttft_p99_s: float = 0.0
    itl_p99_s: float = 0.0

    def of(self, role: WorkerRole) -> list[ObservedWorker]:
        """All replicas of the role, whatever became of their workers."""
        return [worker for worker in self.workers if worker.replica.role is role]

    def serving(self, role: WorkerRole) -> list[ObservedWorker]:
        return [worker for worker in self.of(role) if worker.replica.state is ReplicaState.SERVING]


def merge(replicas: Sequence[ReplicaDescription], reports: Iterable[GatewayReport]) -> Observation:
    """Several gateways make one fleet: the worst of their latencies and queues counts, since each has its own clients.

    A worker's status is the same whoever heard it, so any will do.
    """
    reports = list(reports)
    status_by_name = {status.ref.name: status for report in reports for status in report.workers}
    enough = [report for report in reports if report.num_finished >= MIN_FINISHED]
    return Observation(
        workers=tuple(ObservedWorker(replica, status_by_name.get(replica.name)) for replica in replicas),
        oldest_queued_s=max((report.oldest_queued_s for report in reports), default=0.0),
        ttft_p99_s=max((report.ttft_s[1] for report in enough), default=0.0),
        itl_p99_s=max((report.itl_s[1] for report in reports), default=0.0),
    )
