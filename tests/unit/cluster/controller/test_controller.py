"""A controller whose workers are fakes: replacing, draining, changing roles, and its own death."""

import asyncio

import pytest

from baton.errors import ClusterError, ConfigError, FleetError, UnknownWorker
from baton.fleet import CacheFlush
from baton.messages.control import CallFailure, WaitStart, WaitView
from baton.worker import WorkerRole
from cluster.controller.desired import InMemoryStore
from tests.factories.fleet import FakeIncarnation, FakeLauncher, fleet, fleet_config
from tests.factories.virtual_loop import in_virtual_time, virtual_loop

PREFILL, DECODE = WorkerRole.PREFILL, WorkerRole.DECODE


async def test_all_workers_start_at_once() -> None:
    launcher = FakeLauncher()
    launcher.room.clear()
    async with fleet(fleet_config(), launcher) as tested:
        assert set((await tested.states()).values()) == {"placing"}
        launcher.room.set()
        known = await tested.all_serve(3)
        assert [known[name].role for name in ("w0", "w1", "w2")] == [PREFILL, DECODE, DECODE]
        (node,) = (await tested.controller.describe()).nodes
        assert node.workers == ("w0", "w1", "w2")


@pytest.mark.parametrize("has_process", [False, True])
async def test_a_dead_worker_is_replaced_by_another_incarnation(has_process: bool) -> None:
    async with fleet(fleet_config()) as tested:
        before = await tested.all_serve(3)
        if has_process:
            tested.launcher.latest("w1").engine_failure = "out of memory"
        else:
            tested.launcher.latest("w1").kill("out of memory")
        incarnation = before["w1"].ref.incarnation
        after = await tested.until(lambda known: "w1" in known and known["w1"].ref.incarnation != incarnation)
        assert after["w0"] == before["w0"]
        assert (incarnation, "out of memory") in tested.view.deaths
        replica = (await tested.controller.describe()).replicas[1]
        assert (replica.num_starts, replica.last_failure, replica.state.value) == (
            2,
            "out of memory",
            "serving",
        )


async def test_a_worker_that_does_not_answer_is_killed_and_replaced() -> None:
    async with fleet(fleet_config()) as tested:
        before = (await tested.all_serve(3))["w2"]
        frozen = tested.launcher.latest("w2")
        frozen.is_frozen = True
        await tested.until(lambda known: "w2" in known and known["w2"].pid != before.pid)
        assert frozen.commands == ["stop 0"]
        assert "cluster.unresponsive_timeout_s" in dict(tested.view.deaths)[before.ref.incarnation]


async def test_a_worker_that_always_dies_ends_in_a_crash_loop_while_others_serve() -> None:
    def broken(incarnation: FakeIncarnation) -> None:
        if incarnation.name == "w1":
            incarnation.start_error = ClusterError("no")

    launcher = FakeLauncher(broken)
    async with fleet(fleet_config(), launcher) as tested:
        await tested.state_becomes("w1", "crash_loop")
        assert set(await tested.all_serve(2)) == {"w0", "w2"}
        report = await tested.controller.wait_start(WaitStart(-1, 1.0))
        assert (report.failure, dict(report.unready), report.lacking) == (None, {"w1": "no"}, ())
        launcher.prepare = lambda _: None
        await tested.all_serve(3)


@in_virtual_time
async def test_a_worker_that_serves_for_long_before_each_death_is_in_no_crash_loop() -> None:
    config = fleet_config(restart_delay_s=100.0, restart_delay_max_s=100.0)
    async with fleet(config) as tested:
        await tested.all_serve(3)
        for number in range(2, 2 + config.cluster.crash_loop_deaths):
            await asyncio.sleep(config.cluster.stable_after_s)
            died_at = virtual_loop().now()
            tested.launcher.latest("w1").kill()
            while tested.launcher.latest("w1").number < number:
                await asyncio.sleep(0.01)
            assert virtual_loop().now() - died_at < 1.0, "its next incarnation begins at once"
            await tested.state_becomes("w1", "serving")


async def test_a_role_without_a_serving_worker_is_lacking() -> None:
    def broken(incarnation: FakeIncarnation) -> None:
        if incarnation.name == "w0":
            incarnation.start_error = ClusterError("no")

    async with fleet(fleet_config(prefill=1), FakeLauncher(broken)) as tested:
        assert (await tested.controller.wait_start(WaitStart(-1, 1.0))).lacking != ()
        assert "w0" not in await tested.all_serve(2)
        assert (await tested.controller.wait_start(WaitStart(-1, 1.0))).lacking == (WorkerRole.PREFILL,)


@in_virtual_time
async def test_a_configuration_that_cannot_work_is_known_from_the_first_start() -> None:
    def broken(incarnation: FakeIncarnation) -> None:
        incarnation.start_error = ConfigError("no such thing") if incarnation.name == "w2" else None

    async with fleet(fleet_config(), FakeLauncher(broken)) as tested:
        version, failure = -1, None
        while failure is None:
            report = await tested.controller.wait_start(WaitStart(version, 1.0))
            version, failure = report.version, report.failure
        assert failure == CallFailure("ConfigError", "no such thing")
        assert virtual_loop().now() < 0.5, "each report is new, and none is waited for"


async def test_a_fleet_that_was_whole_once_has_a_configuration_that_can_work() -> None:
    async with fleet(fleet_config()) as tested:
        await tested.all_serve(3)
        tested.launcher.prepare = lambda each: setattr(each, "start_error", ConfigError("no such thing"))
        tested.launcher.latest("w2").kill()
        await tested.state_becomes("w2", "crash_loop")
        assert (await tested.controller.wait_start(WaitStart(-1, 1.0))).failure is None


@in_virtual_time
async def test_a_worker_that_is_not_ready_in_time_is_started_anew() -> None:
    def slow(incarnation: FakeIncarnation) -> None:
        if incarnation.name == "w1" and incarnation.number == 1:
            incarnation.may_start.clear()

    async with fleet(fleet_config(), FakeLauncher(slow)) as tested:
        await tested.all_serve(3)
        replica = (await tested.controller.describe()).replicas[1]
        assert replica.last_failure == "it was not ready within 2 s (cluster.start_timeout_s)"


async def test_who_knows_the_present_view_waits_for_the_next() -> None:
    async with fleet(fleet_config()) as tested:
        await tested.all_serve(3)
        view = tested.view
        same = await tested.controller.wait_view(WaitView(view.controller_incarnation, view.version, 0.01))
        assert same == view
        other = await tested.controller.wait_view(
            WaitView("another controller", view.version, 60.0)
        )  # at once
        assert other == view


async def test_c50_a_drained_worker_gives_away_what_it_has_and_leaves_for_good() -> None:
    async with fleet(fleet_config(drain_timeout_s=0.5)) as tested:
        await tested.all_serve(3)
        incarnation = tested.launcher.latest("w1")
        incarnation.may_drain.clear()
        draining = asyncio.create_task(tested.controller.drain("w1"))
        await tested.state_becomes("w1", "draining")
        assert len(await tested.all_serve(3)) == 3  # gateways still talk to it
        incarnation.may_drain.set()
        await draining
        assert incarnation.commands == ["drain 0.5", "stop 5"]
        assert set(await tested.all_serve(2)) == set(await tested.states()) == {"w0", "w2"}
        assert tested.launcher.forgotten == ["w1"]
        await tested.controller.drain("w1")  # as a caller that missed the first answer does
        with pytest.raises(FleetError, match="there is no worker 'w9'; the fleet has w0, w2"):
            await tested.controller.drain("w9")
        with pytest.raises(FleetError, match="w2 is drained, no decode worker serves"):
            await tested.controller.drain("w2")
        await tested.controller.drain("w0")


async def test_a_worker_that_dies_while_it_drains_is_gone_all_the_same() -> None:
    async with fleet(fleet_config()) as tested:
        await tested.all_serve(3)
        incarnation = tested.launcher.latest("w1")
        incarnation.may_drain.clear()
        draining = asyncio.create_task(tested.controller.drain("w1"))
        await tested.state_becomes("w1", "draining")
        incarnation.kill()
        await draining
        assert set(await tested.states()) == {"w0", "w2"}


async def test_a_worker_without_a_place_can_be_drained() -> None:
    launcher = FakeLauncher()
    async with fleet(fleet_config(), launcher) as tested:
        await tested.all_serve(3)
        launcher.room.clear()
        await tested.controller.scale(PREFILL, 2)
        await tested.state_becomes("w3", "placing")
        await tested.controller.drain("w3")
        assert set(await tested.states()) == {"w0", "w1", "w2"}


async def test_a_role_changes_without_a_restart_and_the_next_incarnation_keeps_it() -> None:
    async with fleet(fleet_config()) as tested:
        before = await tested.all_serve(3)
        await tested.controller.set_role("w1", PREFILL)
        known = await tested.until(lambda known: known["w1"].role is PREFILL)
        assert known["w1"].ref == before["w1"].ref
        with pytest.raises(FleetError, match="w2 changes its role, no decode worker serves"):
            await tested.controller.set_role("w2", PREFILL)
        tested.launcher.latest("w1").kill()
        await tested.until(lambda known: "w1" in known and known["w1"].pid != before["w1"].pid)
        assert tested.launcher.latest("w1").role is PREFILL


async def test_a_role_that_cannot_change_stays() -> None:
    async with fleet(fleet_config()) as tested:
        await tested.all_serve(3)
        tested.launcher.latest("w1").role_error = FleetError("3 leases are held")
        with pytest.raises(FleetError, match="w1 remains a decode worker: 3 leases are held"):
            await tested.controller.set_role("w1", PREFILL)
        assert [replica.role for replica in (await tested.controller.describe()).replicas] == [
            PREFILL,
            DECODE,
            DECODE,
        ]
        assert b'"name": "w1", "role": "decode"' in (tested.store.load() or b"")


async def test_while_one_of_two_decode_workers_changes_neither_may_be_changed_or_drained() -> None:
    async with fleet(fleet_config()) as tested:
        await tested.all_serve(3)
        tested.launcher.latest("w1").may_drain.clear()
        changing = asyncio.create_task(tested.controller.set_role("w1", PREFILL))
        await asyncio.sleep(0)
        with pytest.raises(FleetError, match="w1 is draining or is changing its role"):
            await tested.controller.set_role("w1", DECODE)
        with pytest.raises(FleetError, match="no decode worker serves"):
            await tested.controller.set_role("w2", PREFILL)
        with pytest.raises(FleetError, match="no decode worker serves"):
            await tested.controller.drain("w2")
        tested.launcher.latest("w1").may_drain.set()
        await changing


async def test_workers_of_other_ranks_cannot_change_into_each_other() -> None:
    async with fleet(fleet_config(prefill_tensor_parallel=2)) as tested:
        await tested.all_serve(3)
        with pytest.raises(
            FleetError, match="a prefill worker: prefill workers have 2 ranks, but this worker has 1"
        ):
            await tested.controller.set_role("w1", PREFILL)


async def test_c63_every_worker_is_asked_to_flush_its_cache_and_its_refusal_is_passed_on() -> None:
    async with fleet(fleet_config()) as tested:
        await tested.all_serve(3)
        tested.launcher.latest("w1").flush_error = FleetError("blocks are in use")
        tested.launcher.latest("w2").may_drain.clear()
        changing = asyncio.create_task(tested.controller.set_role("w2", PREFILL))
        await asyncio.sleep(0)
        answer = await tested.controller.flush_caches((), force=True)
        assert answer.workers == (CacheFlush("w0"), CacheFlush("w1", "blocks are in use"), CacheFlush("w2"))
        assert "flush True 0.1" in tested.launcher.latest("w2").commands, "beside its change of role"
        tested.launcher.latest("w2").may_drain.set()
        await changing
        answer = await tested.controller.flush_caches(("w2", "w0", "w2"), force=False)
        assert answer.workers == (CacheFlush("w2"), CacheFlush("w0"))
        assert tested.launcher.latest("w0").commands == ["flush True 0.1", "flush False 0.1"]
        with pytest.raises(UnknownWorker, match="there is no worker 'w9'; the fleet has w0, w1, w2"):
            await tested.controller.flush_caches(("w0", "w9"), force=True)
        tested.launcher.room.clear()
        tested.launcher.latest("w0").kill()
        await tested.state_becomes("w0", "placing")
        answer = await tested.controller.flush_caches((), force=True)
        assert CacheFlush("w0") in answer.workers, "it has no cache before it serves"


async def test_a_fleet_grows_and_shrinks_by_the_least_busy() -> None:
    async with fleet(fleet_config()) as tested:
        await tested.all_serve(3)
        await tested.controller.scale(DECODE, 4)
        known = await tested.all_serve(5)
        assert {name for name, endpoint in known.items() if endpoint.role is DECODE} == {
            "w1",
            "w2",
            "w3",
            "w4",
        }
        for name, running in (("w1", 3), ("w2", 1), ("w3", 2), ("w4", 5)):
            incarnation = tested.launcher.latest(name)
            incarnation.running, incarnation.num_answers = running, 0
        for name in ("w1", "w2", "w3", "w4"):
            while tested.launcher.latest(name).num_answers < 2:  # so the first one was taken in
                await asyncio.sleep(0.005)
        await tested.controller.scale(DECODE, 2)
        assert set(await tested.all_serve(3)) == {"w0", "w1", "w4"}
        with pytest.raises(FleetError, match="at least one worker must decode"):
            await tested.controller.scale(DECODE, 0)
        await tested.controller.scale(PREFILL, 0)
        assert set(await tested.all_serve(2)) == {"w1", "w4"}


async def test_a_restarted_controller_adopts_serving_workers(caplog: pytest.LogCaptureFixture) -> None:
    launcher, store, config = FakeLauncher(), InMemoryStore(), fleet_config()
    async with fleet(config, launcher, store) as first:
        before = await first.all_serve(3)
        await first.controller.set_role("w1", PREFILL)
        await first.controller.scale(DECODE, 2)
        before = await first.all_serve(4)
        await first.cut_off()
        launcher.latest("w3").kill()
        async with fleet(config, launcher, store) as second:
            view = await second.controller.wait_view(WaitView(before["w0"].ref.incarnation, 0, 1.0))
            known = {endpoint.ref.name: endpoint for endpoint in view.endpoints}
            assert {name: known[name] for name in ("w0", "w1", "w2")} == {
                name: before[name] for name in ("w0", "w1", "w2")
            }
            after = await second.all_serve(4)
            assert after["w1"].role is PREFILL
            assert launcher.latest("w3").number == 2
            assert len(launcher.incarnations) == 5
            failures = {each.name: each.last_failure for each in second.controller.replicas()}
    reason = "it did not serve when this controller started: it had ended, or was not ready yet"
    assert failures == {"w0": "", "w1": "", "w2": "", "w3": reason}
    assert f"starting worker w3 (decode) again: {reason}" in caplog.messages


@in_virtual_time
async def test_a_fleet_without_calls_is_an_orphan() -> None:
    config = fleet_config(orphan_timeout_s=0.2, ray_address="auto")
    async with fleet(config) as tested:
        await tested.all_serve(3)
        view = tested.view
        orphaned = asyncio.create_task(tested.controller.orphaned())
        await tested.controller.wait_view(WaitView(view.controller_incarnation, view.version, 0.4))
        await asyncio.sleep(0.1)
        assert not orphaned.done()
        await orphaned
    async with fleet(config) as never_called:
        await never_called.controller.orphaned()


async def test_a_fleet_whose_start_is_waited_for_is_no_orphan() -> None:
    """Large models take minutes to load, and no gateway follows before they have."""
    async with fleet(fleet_config(orphan_timeout_s=0.2, ray_address="auto")) as tested:
        await tested.all_serve(3)
        report = await tested.controller.wait_start(WaitStart(-1, 1.0))
        orphaned = asyncio.create_task(tested.controller.orphaned())
        await tested.controller.wait_start(WaitStart(report.version, 0.4))
        assert not orphaned.done()
        await orphaned


async def test_shutdown_drains_all_and_leaves_nothing() -> None:
    async with fleet(fleet_config()) as tested:
        await tested.all_serve(3)
        await tested.controller.shutdown(may_drain=True)
        assert all(
            incarnation.commands[:2] == ["drain 0", "stop 5"] for incarnation in tested.launcher.incarnations
        )
        assert tested.store.load() is None
