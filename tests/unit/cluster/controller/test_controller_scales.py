"""A controller whose fleet is scaled by what gateways report; its workers are fakes, everything else is real."""

import asyncio
from collections.abc import Callable
from typing import Any

from baton.config import BatonConfig
from baton.fleet import FleetDescription
from baton.worker import WorkerRole
from tests.factories.fleet import QUICK, FleetUnderTest, fleet
from tests.factories.observed_fleet import gateway_report, worker_status
from tests.factories.virtual_loop import in_virtual_time, virtual_loop

QUICKLY = {
    "target_itl_p99_s": 0.05,
    "interval_s": 0.02,
    "grow_after_s": 0.04,
    "shrink_after_s": 0.2,
    "grow_cooldown_s": 0.1,
    "shrink_cooldown_s": 0.2,
}
SLOW: dict[str, Any] = {"itl_s": (0.05, 0.083)}


def scaled_config(prefill: int, decode: int, drain_timeout_s: float = 0.0, **autoscaling: Any) -> BatonConfig:
    return BatonConfig.from_mapping(
        {
            "cluster": {"prefill": prefill, "decode": decode, **QUICK, "drain_timeout_s": drain_timeout_s},
            "kv_transfer": {"lease_s": 0.1},
            "autoscaling": {"mode": "on", **QUICKLY, **autoscaling},
        }
    )


async def reporting_until(
    tested: FleetUnderTest, condition: Callable[[FleetDescription], bool], running: int, **report: Any
) -> FleetDescription:
    """Reports at a gateway's pace, with equal values for all workers, until the fleet is as wanted."""
    async with asyncio.timeout(60.0):
        while True:
            described = await tested.controller.describe()
            if condition(described):
                return described
            statuses = tuple(
                worker_status(replica.name, replica.role, running=running) for replica in described.replicas
            )
            await tested.controller.report(gateway_report(workers=statuses, **report))
            await asyncio.sleep(0.01)


def num_serving(described: FleetDescription, role: WorkerRole) -> int:
    return sum(replica.role is role and replica.state.value == "serving" for replica in described.replicas)


def num_draining(described: FleetDescription) -> int:
    return sum(replica.state.value == "draining" for replica in described.replicas)


def test_a_fleet_grows_under_load_and_shrinks_after_it() -> None:
    async def grow_and_shrink() -> None:
        async with fleet(scaled_config(1, 1, min_decode=1, max_decode=2)) as tested:
            await tested.all_serve(2)
            grown = await reporting_until(
                tested, lambda it: num_serving(it, WorkerRole.DECODE) == 2, 10, **SLOW
            )
            assert [replica.name for replica in grown.replicas] == ["w0", "w1", "w2"]
            assert any(s.startswith("decode +1 (1 -> 2): inter-token latency p99") for s in grown.decisions)
            shrunk = await reporting_until(tested, lambda it: len(it.replicas) == 2, 0)
            assert any(s.startswith("decode -1 (2 -> 1): all its targets were met") for s in shrunk.decisions)
            assert len(tested.launcher.alive) == 2

    asyncio.run(grow_and_shrink())


def test_a_spare_worker_changes_its_role() -> None:
    async def change() -> None:
        async with fleet(scaled_config(2, 1, min_prefill=1, max_prefill=2, max_decode=2)) as tested:
            await tested.all_serve(3)
            changed = await reporting_until(
                tested, lambda it: num_serving(it, WorkerRole.DECODE) == 2, 0, **SLOW
            )
            assert [replica.role.value for replica in changed.replicas].count("prefill") == 1
            assert len(tested.launcher.incarnations) == 3  # no worker was started for it

    asyncio.run(change())


@in_virtual_time
async def test_a_fleet_grows_while_a_worker_drains_but_loses_one_at_a_time() -> None:
    async with fleet(scaled_config(1, 3, 100.0, min_decode=1, max_decode=4)) as tested:
        await tested.all_serve(4)
        for incarnation in tested.launcher.incarnations:
            incarnation.may_drain.clear()
        await reporting_until(tested, lambda it: num_draining(it) == 1, 0)
        calm_until = virtual_loop().now() + 2.0  # ten times as long as a worker must be spare
        calm = await reporting_until(tested, lambda _: virtual_loop().now() > calm_until, 0)
        assert num_draining(calm) == 1
        grown = await reporting_until(tested, lambda it: num_serving(it, WorkerRole.DECODE) == 3, 10, **SLOW)
        assert (len(grown.replicas), num_draining(grown)) == (5, 1)
        assert any(s.startswith("decode +1 (2 -> 3): inter-token latency p99") for s in grown.decisions)
        full = await reporting_until(tested, lambda it: "is the maximum" in it.decisions[-1], 10, **SLOW)
        assert len(full.replicas) == 5, "a worker that drains counts until it has ended"
        for incarnation in tested.launcher.incarnations:
            incarnation.may_drain.set()
        await reporting_until(tested, lambda it: num_serving(it, WorkerRole.DECODE) == 4, 10, **SLOW)


@in_virtual_time
async def test_a_fleet_grows_while_a_worker_changes_its_role() -> None:
    bounds = {"min_prefill": 1, "max_prefill": 2, "max_decode": 2}
    async with fleet(scaled_config(2, 1, 100.0, target_ttft_p99_s=2.0, **bounds)) as tested:
        await tested.all_serve(3)
        for incarnation in tested.launcher.incarnations:
            incarnation.may_drain.clear()
        await reporting_until(tested, lambda it: "prefill -> decode" in " ".join(it.decisions), 0, **SLOW)
        waits = await reporting_until(tested, lambda it: it.decisions[-1].endswith("is starting"), 0, **SLOW)
        assert waits.decisions[-1].startswith("decode stays 2: inter-token latency p99")
        await reporting_until(
            tested, lambda it: num_serving(it, WorkerRole.PREFILL) == 3, 1, ttft_s=(1.0, 3.0)
        )
        for incarnation in tested.launcher.incarnations:
            incarnation.may_drain.set()
        await reporting_until(tested, lambda it: num_serving(it, WorkerRole.DECODE) == 2, 0)


@in_virtual_time
async def test_a_prefill_worker_takes_the_place_of_the_only_decode_worker_that_no_node_has_room_for() -> None:
    bounds = {"min_prefill": 1, "max_prefill": 2, "max_decode": 1}
    async with fleet(scaled_config(2, 1, 100.0, **bounds)) as tested:
        await tested.all_serve(3)
        tested.launcher.latest("w0").may_drain.clear()
        tested.launcher.room.clear()
        tested.launcher.latest("w2").kill("its node is gone")
        await reporting_until(
            tested, lambda it: "prefill -> decode" in " ".join(it.decisions), 0, oldest_queued_s=9.0
        )
        changes_until = virtual_loop().now() + 2.0
        await reporting_until(tested, lambda _: virtual_loop().now() > changes_until, 0, oldest_queued_s=9.0)
        tested.launcher.latest("w0").may_drain.set()
        healed = await reporting_until(tested, lambda it: len(it.replicas) == 2, 0)
        assert [(each.name, each.role.value) for each in healed.replicas] == [
            ("w0", "decode"),
            ("w1", "prefill"),
        ]
        assert [said for said in healed.decisions if "failed" in said or "maximum" in said] == []
        tested.launcher.room.set()


def test_a_fleet_that_is_not_scaled_heeds_no_report() -> None:
    async def stay() -> None:
        async with fleet(scaled_config(1, 1, mode="off")) as tested:
            await tested.all_serve(2)
            for _ in range(50):
                await tested.controller.report(gateway_report(**SLOW))
                await asyncio.sleep(0.005)
            described = await tested.controller.describe()
            assert (len(described.replicas), described.decisions) == (2, ())

    asyncio.run(stay())
