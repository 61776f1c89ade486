"""Observations and reports of fleets, and looks of planners at them, for tests of planner and autoscaler."""

from collections.abc import Sequence
from typing import Any

from baton.config import BatonConfig
from baton.fleet import GatewayReport, ReplicaDescription, ReplicaState
from baton.kv import WorkerRef
from baton.worker import KVBlockCounts, RequestCounts, WorkerLoad, WorkerRole, WorkerState, WorkerStatus
from cluster.controller.observation import Observation, ObservedWorker
from cluster.controller.planner import Decision, Planner, RoleChange, ScaleDecision


def autoscaling_config(prefill: int = 1, decode: int = 1, **autoscaling: Any) -> BatonConfig:
    """By default, a fleet grows after 10 s and shrinks after 60 s, and is checked every 5 s."""
    values = {
        "mode": "on",
        "min_prefill": min(1, prefill),
        "max_prefill": 4,
        "min_decode": 1,
        "max_decode": 4,
        "target_ttft_p99_s": 2.0,
        "target_itl_p99_s": 0.05,
        "grow_after_s": 10.0,
        "shrink_after_s": 60.0,
        "grow_cooldown_s": 20.0,
        "shrink_cooldown_s": 40.0,
    }
    return BatonConfig.from_mapping(
        {"cluster": {"prefill": prefill, "decode": decode}, "autoscaling": {**values, **autoscaling}}
    )


def worker_status(
    name: str,
    role: WorkerRole,
    *,
    running: int = 0,
    oldest_waiting_s: float = 0.0,
    blocks_used: int = 0,
    decode_step_s: float = 0.02,
) -> WorkerStatus:
    """A prefill worker has no time of a decode step, since it computes none."""
    decode_step_s = decode_step_s if role is WorkerRole.DECODE else 0.0
    return WorkerStatus(
        WorkerRef(name, "1", ("tcp://127.0.0.1:1",), 16),
        role,
        WorkerState.READY,
        KVBlockCounts(100, 100 - blocks_used, 0, 0),
        RequestCounts(running, 0, 0),
        {},
        load=WorkerLoad(oldest_waiting_s=oldest_waiting_s, decode_step_s=decode_step_s),
    )


def worker(
    name: str, role: WorkerRole, state: ReplicaState = ReplicaState.SERVING, **status: Any
) -> ObservedWorker:
    """One worker. A worker that serves has a status with these values; other workers have none."""
    replica = ReplicaDescription(name=name, role=role, state=state)
    is_serving = state is ReplicaState.SERVING
    return ObservedWorker(replica, worker_status(name, role, **status) if is_serving else None)


def fleet(prefill: int = 1, decode: int = 1, *, busy: bool = False, **observed: Any) -> Observation:
    """Workers that serve. If `busy`, each prefill worker has one running request, each decode worker ten."""
    names = iter(range(100))
    workers = [
        *(worker(f"w{next(names)}", WorkerRole.PREFILL, running=int(busy)) for _ in range(prefill)),
        *(worker(f"w{next(names)}", WorkerRole.DECODE, running=10 * busy) for _ in range(decode)),
    ]
    return Observation(workers=tuple(workers), **observed)


def gateway_report(gateway: str = "g0", **values: Any) -> GatewayReport:
    """A report of a gateway without problems, except for `values`."""
    calm = {
        "oldest_queued_s": 0.0,
        "oldest_without_prefill_s": 0.0,
        "num_first_tokens": 100,
        "ttft_s": (0.1, 0.2),
        "itl_s": (0.01, 0.02),
        "workers": (),
    }
    return GatewayReport(gateway=gateway, **{**calm, **values})


def make_planner(config: BatonConfig) -> Planner:
    bounds = {role: config.worker_bounds(role) for role in WorkerRole}
    return Planner(config.autoscaling, bounds, config.autoscaling.may_change_roles)


def look(
    planner: Planner, observation: Observation | None, start: float, seconds: float
) -> list[tuple[float, Decision]]:
    """One look every five seconds, at a fleet that stays as it is whatever is decided."""
    times = [start + 5.0 * index for index in range(int(seconds / 5.0) + 1)]
    return [(now, planner.observe(observation, now)) for now in times]


def changes(looks: Sequence[tuple[float, Decision]]) -> list[tuple[float, ScaleDecision | RoleChange]]:
    return [(now, decision.change) for now, decision in looks if decision.change is not None]
