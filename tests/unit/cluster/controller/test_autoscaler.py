"""The autoscaler's loop: merges gateways' reports, and carries out or only logs the planner's decisions."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest

from baton.clock import VirtualClock
from baton.errors import FleetError
from baton.fleet import GatewayReport, ReplicaDescription, ReplicaState
from baton.system.tasks import end_tasks
from baton.worker import WorkerRole
from cluster.controller.autoscaler import Autoscaler
from cluster.controller.observation import merge
from cluster.controller.planner import Decision, NoChange, RoleChange
from tests.factories.observed_fleet import autoscaling_config, gateway_report, worker_status

P, D = WorkerRole.PREFILL, WorkerRole.DECODE


class FakeFleet:
    """Carries out every change at once, or refuses it."""

    def __init__(self, *roles: WorkerRole, problem: Exception | None = None) -> None:
        self.roles = {f"w{index}": role for index, role in enumerate(roles)}
        self.problem = problem
        self.take_time: Callable[[], None] = lambda: None
        self.leaving: tuple[str, ...] = ()
        self.states: dict[str, ReplicaState] = {}
        """The states of replicas that do not serve."""
        self.commands: list[tuple[Any, ...]] = []

    def replicas_to_scale(self) -> Sequence[ReplicaDescription]:
        return [
            ReplicaDescription(name=name, role=role, state=self.states.get(name, ReplicaState.SERVING))
            for name, role in self.roles.items()
        ]

    async def scale(self, role: WorkerRole, count: int) -> None:
        self._obey("scale", role, count)
        mine = [name for name, its in self.roles.items() if its is role]
        for name in mine[count:]:
            del self.roles[name]
        for index in range(len(mine), count):
            self.roles[f"w{index}{role.value}"] = role

    async def set_role(self, worker: str, role: WorkerRole) -> None:
        self._obey("set_role", worker, role)
        self.roles[worker] = role

    def _obey(self, *command: Any) -> None:
        self.commands.append(command)
        self.take_time()
        if self.problem is not None:
            raise self.problem

    def statuses(self, running: int) -> tuple[Any, ...]:
        return tuple(worker_status(name, role, running=running) for name, role in self.roles.items())


SLOW: dict[str, Any] = {"itl_s": (0.05, 0.083)}


def autoscaler_of(
    fleet: FakeFleet, clock: VirtualClock, has_equal_ranks: bool = True, **config: Any
) -> Autoscaler:
    values = autoscaling_config(**config)
    bounds = {role: values.worker_bounds(role) for role in WorkerRole}
    return Autoscaler(values.autoscaling, bounds, has_equal_ranks, clock, fleet)


def look_often(
    autoscaler: Autoscaler, fleet: FakeFleet, clock: VirtualClock, count: int, running: int = 1, **report: Any
) -> None:
    """Looks every five seconds, each with a gateway's report before it."""

    async def all_looks() -> None:
        for _ in range(count):
            clock.advance(5.0)
            autoscaler.report(gateway_report(workers=fleet.statuses(running), **report))
            await autoscaler.decide_once()

    asyncio.run(all_looks())


@pytest.mark.parametrize(
    ("mode", "commands", "prefix"),
    [("on", [("scale", D, 2)], "decode +1 (1 -> 2): "), ("dry_run", [], "would do: decode +1 (1 -> 2): ")],
)
def test_it_does_what_it_says_and_a_dry_run_only_says_it(
    mode: str, commands: list[tuple[Any, ...]], prefix: str
) -> None:
    clock, fleet = VirtualClock(), FakeFleet(P, D)
    autoscaler = autoscaler_of(fleet, clock, mode=mode)
    look_often(autoscaler, fleet, clock, 3, **SLOW)
    assert fleet.commands == commands
    assert autoscaler.decisions[-1].startswith(f"{prefix}inter-token latency p99 is 83 ms")


@pytest.mark.parametrize("kind", [FleetError, RuntimeError])
def test_a_refused_change_is_logged_and_not_tried_again_at_once(kind: type[Exception]) -> None:
    """An unexpected error counts as a refusal, too: it must not end the autoscaler."""
    clock, fleet = VirtualClock(), FakeFleet(P, P, D, problem=kind("w0 still holds leased blocks"))
    fleet.take_time = lambda: clock.advance(7.0)
    autoscaler = autoscaler_of(fleet, clock, prefill=2)
    look_often(autoscaler, fleet, clock, 7, running=0, **SLOW)
    assert fleet.commands == [("set_role", "w0", D), ("scale", D, 2)]
    assert "the change failed: w0 still holds leased blocks" in autoscaler.decisions


async def test_a_decision_that_fails_does_not_end_the_autoscaler(caplog: pytest.LogCaptureFixture) -> None:
    decided = asyncio.Event()

    class Fleet(FakeFleet):
        def replicas_to_scale(self) -> Sequence[ReplicaDescription]:
            if not caplog.records:
                raise OverflowError("Result too large")
            decided.set()
            return super().replicas_to_scale()

    clock, fleet = VirtualClock(), Fleet(P, D)
    autoscaler = autoscaler_of(fleet, clock, interval_s=0.01)
    autoscaler.report(gateway_report(workers=fleet.statuses(1)))
    running = asyncio.create_task(autoscaler.run())
    await decided.wait()
    await end_tasks(running)
    assert [record.message for record in caplog.records[:1]] == ["a decision failed unexpectedly"]


def test_no_role_changes_if_the_workers_of_the_roles_have_other_ranks() -> None:
    clock, fleet = VirtualClock(), FakeFleet(P, P, D)
    autoscaler = autoscaler_of(fleet, clock, has_equal_ranks=False, prefill=2)
    look_often(autoscaler, fleet, clock, 3, running=0, **SLOW)
    assert fleet.commands == [("scale", D, 2)]


@pytest.mark.parametrize(("state", "commands"), [("placing", [("scale", D, 2)]), ("starting", [])])
def test_a_worker_that_replaces_an_unplaced_one_leaves_the_number_of_those_that_stay(
    state: str, commands: list[tuple[Any, ...]]
) -> None:
    """A worker that drains for good does not count: `scale` does not count it either. If the replica was placed after
    all, it stays."""
    fleet = FakeFleet(P, P, D, D, D)
    fleet.leaving = ("w2",)
    fleet.states = {"w4": ReplicaState(state)}
    autoscaler = autoscaler_of(fleet, VirtualClock(), prefill=2, decode=3)
    change = RoleChange("w0", D, replaces_unplaced=True)
    with patch.object(autoscaler._planner, "observe", return_value=Decision("a change", change)):
        asyncio.run(autoscaler.decide_once())
    assert fleet.commands == [("set_role", "w0", D), *commands]


def test_the_same_reason_for_no_change_is_logged_once() -> None:
    clock, fleet = VirtualClock(), FakeFleet(P, D)
    autoscaler = autoscaler_of(fleet, clock)
    look_often(autoscaler, fleet, clock, 20)
    (only,) = autoscaler.decisions
    assert only.startswith("nothing changes: 1 prefill and 1 decode are enough")


def test_a_standstill_of_the_controller_makes_no_report_stale_and_no_shortage_longer() -> None:
    clock, fleet = VirtualClock(), FakeFleet(P, D)
    autoscaler = autoscaler_of(fleet, clock, grow_after_s=15.0)
    look_often(autoscaler, fleet, clock, 1, **SLOW)
    clock.advance(600.0)
    decision = asyncio.run(autoscaler.decide_once())
    assert decision.no_change is NoChange.NOT_YET
    look_often(autoscaler, fleet, clock, 3, **SLOW)
    assert fleet.commands == [("scale", D, 2)]


def test_decisions_that_are_kept_do_not_grow_without_end() -> None:
    clock, fleet = VirtualClock(), FakeFleet(P, D)
    autoscaler = autoscaler_of(fleet, clock)
    for _ in range(200):
        look_often(autoscaler, fleet, clock, 1)
        look_often(autoscaler, fleet, clock, 1, **SLOW)
    assert len(autoscaler.decisions) == 50


def test_the_report_of_a_silent_gateway_does_not_count() -> None:
    clock, fleet = VirtualClock(), FakeFleet(P, D, D)
    autoscaler = autoscaler_of(fleet, clock, decode=2)
    look_often(autoscaler, fleet, clock, 1)

    async def silence() -> list[NoChange | None]:
        found = []
        for _ in range(30):
            clock.advance(5.0)
            found.append((await autoscaler.decide_once()).no_change)
        return found

    assert asyncio.run(silence()) == [NoChange.STEADY] * 3 + [NoChange.NO_REPORT] * 27
    assert fleet.commands == []  # an idle fleet shrinks, a fleet without reports does not


def test_the_loop_looks_at_its_interval() -> None:
    clock, fleet = VirtualClock(), FakeFleet(P, D)
    autoscaler = autoscaler_of(fleet, clock, interval_s=0.01)

    async def until_it_decides() -> None:
        loop = asyncio.create_task(autoscaler.run())
        async with asyncio.timeout(60.0):
            while not autoscaler.decisions:
                await asyncio.sleep(0.005)
        loop.cancel()
        with pytest.raises(asyncio.CancelledError):
            await loop

    asyncio.run(until_it_decides())


def test_several_gateways_make_one_fleet() -> None:
    """The worst counts: each gateway has clients of its own."""
    replicas = FakeFleet(P, D).replicas_to_scale()
    first = gateway_report("g0", ttft_s=(0.1, 3.0), oldest_queued_s=1.0, workers=(worker_status("w0", P),))
    first = replace(first, oldest_without_prefill_s=2.0)
    second = gateway_report("g1", itl_s=(0.1, 0.4), workers=(worker_status("w1", D, running=3),))
    seen = merge(replicas, [first, second])
    assert (seen.ttft_p99_s, seen.itl_p99_s, seen.oldest_queued_s) == (3.0, 0.4, 1.0)
    assert seen.oldest_without_prefill_s == 2.0
    assert [worker.num_requests for worker in seen.workers] == [0, 3]


@pytest.mark.parametrize(
    ("num_first_tokens", "counts"), [(0, 0.0), (1, 0.0), (2, 3.0), (4, 3.0), (5, 9.0), (100, 9.0)]
)
def test_of_few_times_to_first_token_the_median_counts_and_of_one_nothing(
    num_first_tokens: int, counts: float
) -> None:
    report: GatewayReport = gateway_report(ttft_s=(3.0, 9.0), num_first_tokens=num_first_tokens)
    seen = merge([], [report])
    assert (seen.ttft_p99_s, seen.slowest_ttft_s) == (counts, 9.0)


def test_a_wish_of_a_dry_run_is_logged_once_while_it_stays_the_same() -> None:
    clock, fleet = VirtualClock(), FakeFleet(P, D)
    autoscaler = autoscaler_of(fleet, clock, mode="dry_run")
    look_often(autoscaler, fleet, clock, 200, **SLOW)
    assert [sentence.split(":")[0] for sentence in autoscaler.decisions] == ["decode stays 1", "would do"]


def test_a_wish_of_a_dry_run_is_logged_again_after_the_fleet_was_well_in_between() -> None:
    clock, fleet = VirtualClock(), FakeFleet(P, D)
    autoscaler = autoscaler_of(fleet, clock, mode="dry_run")
    for _ in range(2):
        look_often(autoscaler, fleet, clock, 10, **SLOW)
        look_often(autoscaler, fleet, clock, 1)
    once = ["decode stays 1", "would do", "nothing changes"]
    assert [sentence.split(":")[0] for sentence in autoscaler.decisions] == 2 * once


def test_a_dry_run_says_once_in_a_calm_time_that_it_would_shrink() -> None:
    clock, fleet = VirtualClock(), FakeFleet(P, D, D)
    autoscaler = autoscaler_of(fleet, clock, decode=2, mode="dry_run")
    look_often(autoscaler, fleet, clock, 400, running=0)
    once = ["nothing changes", "would do", "nothing changes"]
    assert [sentence.split(":")[0] for sentence in autoscaler.decisions] == once
    look_often(autoscaler, fleet, clock, 20, running=1, itl_s=(0.01, 0.045))
    look_often(autoscaler, fleet, clock, 400, running=0)
    assert [sentence.split(":")[0] for sentence in autoscaler.decisions] == [*once, *once[1:]]


def test_a_dry_run_of_a_fleet_out_of_its_bounds_says_what_else_it_would_do() -> None:
    clock, fleet = VirtualClock(), FakeFleet(P, D, D, D, D, D)
    autoscaler = autoscaler_of(fleet, clock, mode="dry_run")
    look_often(autoscaler, fleet, clock, 400, ttft_s=(1.0, 9.0))
    assert autoscaler.decisions[0].startswith("would do: decode -1 (5 -> 4): 5 is above the maximum of 4")
    assert any(
        sentence.startswith("would do: prefill +1 (1 -> 2): time") for sentence in autoscaler.decisions
    )
    assert len(autoscaler.decisions) < 10
