"""Routers, the heartbeats of workers, and requests to route."""

from typing import Any

from baton.config import GatewayConfig
from baton.kv import WorkerRef
from baton.worker import KVBlockCounts, RequestCounts, WorkerLoad, WorkerRole, WorkerState, WorkerStatus
from gateway.routing.placement import Placement, RouteQuery
from gateway.routing.router import Router

KEY = b"a key of the tests"
DISAGGREGATED = "disaggregated"


def status(
    name: str, running: int = 0, state: WorkerState = WorkerState.READY, **values: Any
) -> WorkerStatus:
    role = values.pop("role", WorkerRole.PREFILL if name.startswith("p") else WorkerRole.DECODE)
    total, free, incarnation = (
        values.pop("total", 999),
        values.pop("free", 999),
        values.pop("incarnation", "incarnation"),
    )
    counts = RequestCounts(running, values.pop("waiting", 0), values.pop("remote", 0))
    ref = WorkerRef(name, f"{name}-{incarnation}", ("tcp://127.0.0.1:1",), values.pop("block_size", 16))
    return WorkerStatus(
        ref, role, state, KVBlockCounts(total, free, 0, 0), counts, {}, load=WorkerLoad(**values)
    )


def router_of(policy: Any, mode: Any, *statuses: WorkerStatus, **config: Any) -> Router:
    router = Router(GatewayConfig(routing_policy=policy, routing_mode=mode, **config), KEY)
    for one in statuses:
        router.on_status(one)
    return router


def ask(num_tokens: int = 3, **values: Any) -> RouteQuery:
    return RouteQuery(token_ids=tuple(range(num_tokens)), max_new_tokens=9, **values)


def send(router: Router, asked: RouteQuery) -> Placement:
    """As the dispatcher does."""
    placement = router.route(asked)
    for worker in filter(None, (placement.decode, placement.prefill)):
        router.sent(worker, placement)
    return placement


def end(router: Router, placement: Placement) -> None:
    for worker in filter(None, (placement.decode, placement.prefill)):
        router.ended(worker, placement)


P = [status("p0"), status("p1")]
D = [status("d0"), status("d1")]
POLICIES = ["round_robin", "least_loaded", "kv_aware"]
