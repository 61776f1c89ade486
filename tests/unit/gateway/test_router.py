"""The router: who gets a request, and who never does."""

from typing import Any

import pytest

from baton.config import GatewayConfig
from baton.errors import WorkerUnavailable
from baton.kv import WorkerRef
from baton.worker import KVBlockCounts, RequestCounts, WorkerRole, WorkerState, WorkerStatus
from gateway.routing.placement import Ask, Mode, Placement
from gateway.routing.router import Router


def status(name: str, running: int = 0, state: WorkerState = WorkerState.READY) -> WorkerStatus:
    role = WorkerRole.PREFILL if name.startswith("p") else WorkerRole.DECODE
    ref = WorkerRef(name, f"{name}-life", ("tcp://127.0.0.1:1",), 16)
    return WorkerStatus(ref, role, state, KVBlockCounts(9, 9, 0, 0), RequestCounts(running, 0, 0), {})


def router_of(policy: Any, mode: Mode, *statuses: WorkerStatus) -> Router:
    router = Router(GatewayConfig(routing_policy=policy, routing_mode=mode.value))
    for one in statuses:
        router.heard(one)
    return router


def ask(**values: Any) -> Ask:
    return Ask(token_ids=(1, 2, 3), max_new_tokens=9, **values)


P = [status("p0"), status("p1")]
D = [status("d0"), status("d1")]


def test_round_robin_takes_turns() -> None:
    router = router_of("round_robin", Mode.DISAGGREGATED, *P, *D)
    assert [router.route(ask()).decode for _ in range(4)] == ["d0", "d1", "d0", "d1"]


def test_least_loaded_takes_the_emptiest_and_ties_take_turns() -> None:
    router = router_of("least_loaded", Mode.LOCAL, status("d0", 3), status("d1", 1), status("d2", 1))
    assert {router.route(ask()).decode for _ in range(6)} == {"d1", "d2"}


def test_legs_count_before_the_worker_tells_of_them() -> None:
    router = router_of("least_loaded", Mode.LOCAL, *D)
    placement = Placement(Mode.LOCAL, None, "d0")
    router.sent("d0", placement)
    assert {router.route(ask()).decode for _ in range(4)} == {"d1"}
    router.ended("d0", placement)
    assert {router.route(ask()).decode for _ in range(4)} == {"d0", "d1"}


def test_workers_that_drain_or_are_gone_get_nothing() -> None:
    router = router_of("round_robin", Mode.LOCAL, *D, status("d2"))
    router.heard(status("d0", state=WorkerState.DRAINING))
    router.gone("d1")
    assert {router.route(ask()).decode for _ in range(4)} == {"d2"}


def test_a_request_may_ask_for_another_mode_than_the_default() -> None:
    router = router_of("round_robin", Mode.DISAGGREGATED, *P, *D)
    placement = router.route(ask(mode=Mode.LOCAL))
    assert (placement.mode, placement.prefill, placement.is_fallback) == (Mode.LOCAL, None, False)
    assert router_of("round_robin", Mode.LOCAL, *P, *D).route(ask(mode=Mode.DISAGGREGATED)).prefill == "p0"


def test_c53_without_prefill_workers_a_default_falls_back_visibly_and_a_demand_fails() -> None:
    for router, one in (
        (router_of("round_robin", Mode.DISAGGREGATED, *D), ask()),
        (router_of("round_robin", Mode.DISAGGREGATED, *P, *D), ask(without_prefill=True)),
    ):
        placement = router.route(one)
        assert (placement.mode, placement.prefill, placement.is_fallback) == (Mode.LOCAL, None, True)
    with pytest.raises(WorkerUnavailable, match="requires one"):
        router_of("round_robin", Mode.DISAGGREGATED, *D).route(ask(mode=Mode.DISAGGREGATED))


def test_excluded_workers_are_not_asked_again() -> None:
    router = router_of("least_loaded", Mode.DISAGGREGATED, *P, *D)
    for _ in range(4):
        assert router.route(ask(excluded={"p0", "d1"})) == Placement(Mode.DISAGGREGATED, "p1", "d0")
    with pytest.raises(WorkerUnavailable, match="no decode worker"):
        router.route(ask(excluded={"d0", "d1"}))
