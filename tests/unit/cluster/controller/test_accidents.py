"""Races in a controller: deaths, commands and restarts that happen at the same time."""

import asyncio

import pytest

from baton.errors import ClusterError, FleetError
from baton.fleet import ReplicaState
from baton.messages.control import WaitView
from baton.worker import WorkerRole
from cluster.controller.desired import InMemoryStore
from tests.factories.fleet import FakeIncarnation, FakeLauncher, FleetUnderTest, fleet, fleet_config
from tests.factories.virtual_loop import in_virtual_time, virtual_loop

PREFILL, DECODE = WorkerRole.PREFILL, WorkerRole.DECODE


async def cut_off_during_a_drain(tested: FleetUnderTest) -> None:
    """Cuts off the controller while w1 drains."""
    tested.launcher.latest("w1").may_drain.clear()
    draining = asyncio.ensure_future(tested.controller.drain("w1"))
    await tested.state_becomes("w1", "draining")
    await tested.cut_off()
    await asyncio.gather(draining, return_exceptions=True)


async def test_a_restarted_controller_continues_the_drain_of_its_predecessor() -> None:
    launcher, store, config = FakeLauncher(), InMemoryStore(), fleet_config()
    async with fleet(config, launcher, store) as first:
        await first.all_serve(3)
        await cut_off_during_a_drain(first)
        async with asyncio.timeout(60.0):  # it answers before the worker has drained
            async with fleet(config, launcher, store) as second:
                assert {
                    endpoint.ref.name
                    for endpoint in (await second.controller.wait_view(WaitView("", 0, 0.0))).endpoints
                }
                assert (await second.states())["w1"] == "draining"
                launcher.latest("w1").may_drain.set()
                assert set(await second.all_serve(2)) == {"w0", "w2"}
                assert [incarnation.name for incarnation in launcher.alive] == ["w0", "w2"]


@in_virtual_time
async def test_a_worker_that_a_former_controllers_rollout_drained_is_replaced(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The worker refuses requests for good, and the rollout ended with its controller."""
    launcher, store, config = FakeLauncher(), InMemoryStore(), fleet_config()
    async with fleet(config, launcher, store) as first:
        before = await first.all_serve(3)
        launcher.latest("w1").may_drain.clear()
        await first.controller.rollouts.begin_rollout(("w1",))
        await first.state_becomes("w1", "draining")
        await first.cut_off()
        async with fleet(config, launcher, store) as second:
            assert await second.all_serve(3) == before
            after = await second.until(lambda known: "w1" in known and known["w1"] != before["w1"])
            assert {name: after[name] for name in ("w0", "w2")} == {
                name: before[name] for name in ("w0", "w2")
            }
            assert [(one.name, one.number) for one in launcher.alive] == [("w0", 1), ("w2", 1), ("w1", 2)]
            replica = (await second.controller.describe()).replicas[1]
            assert (replica.num_starts, replica.last_failure) == (2, "")
    assert "worker w1 drains, but no command waits for its end; replacing the worker" in caplog.messages


@in_virtual_time
@pytest.mark.parametrize("is_role_wanted", [False, True])
async def test_a_worker_that_a_former_controller_drained_is_replaced_as_soon_as_it_has_drained(
    is_role_wanted: bool,
) -> None:
    """This also holds if a change of the worker's role had to wait for the drain."""
    launcher, store, config = FakeLauncher(), InMemoryStore(), fleet_config(drain_timeout_s=30.0)
    async with fleet(config, launcher, store) as first:
        before = await first.all_serve(3)
        launcher.latest("w1").may_drain.clear()
        await first.controller.rollouts.begin_rollout(("w1",))
        await first.state_becomes("w1", "draining")
        waiting = [asyncio.ensure_future(first.controller.set_role("w1", PREFILL))] if is_role_wanted else []
        await asyncio.sleep(0.01)
        await first.cut_off()
        await asyncio.gather(*waiting, return_exceptions=True)
        async with fleet(config, launcher, store) as second:
            assert await second.all_serve(3) == before
            with pytest.raises(FleetError, match="w2 is drained, no decode worker serves"):
                await second.controller.drain("w2")
            begun = virtual_loop().now()
            launcher.latest("w1").may_drain.set()
            await second.until(lambda known: "w1" in known and known["w1"] != before["w1"])
            assert virtual_loop().now() - begun < 1.0, "no other timeout counts"
            assert (await second.controller.describe()).replicas[1].last_failure == ""


async def test_a_worker_that_ended_before_the_controller_restarted_is_not_started_again_to_be_drained() -> (
    None
):
    launcher, store, config = FakeLauncher(), InMemoryStore(), fleet_config()
    async with fleet(config, launcher, store) as first:
        await first.all_serve(3)
        await cut_off_during_a_drain(first)
        launcher.latest("w1").kill()
        async with fleet(config, launcher, store) as second:
            assert set(await second.all_serve(2)) == set(await second.states()) == {"w0", "w2"}


@pytest.mark.parametrize("error", [None, FleetError("3 blocks are leased")])
async def test_a_restarted_controller_continues_the_role_change_of_its_predecessor(
    error: FleetError | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Until the change is over, the worker does not count as a decode worker. A repeated command returns the
    true outcome."""
    launcher, store, config = FakeLauncher(), InMemoryStore(), fleet_config()
    async with fleet(config, launcher, store) as first:
        await first.all_serve(3)
        changes = launcher.latest("w2")
        changes.may_drain.clear()
        changes.role_error = error
        changing = asyncio.ensure_future(first.controller.set_role("w2", PREFILL))
        while not changes.is_draining:
            await asyncio.sleep(0)
        await first.cut_off()
        await asyncio.gather(changing, return_exceptions=True)
        async with asyncio.timeout(60.0), fleet(config, launcher, store) as second:
            with pytest.raises(FleetError, match="w1 is drained, no decode worker serves"):
                await second.controller.drain("w1")
            again = asyncio.ensure_future(second.controller.set_role("w2", PREFILL))
            await asyncio.sleep(0.05)
            assert not again.done()
            changes.may_drain.set()
            if error is None:
                await again
                assert (await second.all_serve(3))["w2"].role is PREFILL
            else:
                with pytest.raises(FleetError, match="w2 remains a decode worker: 3 blocks are leased"):
                    await again
                await second.controller.drain("w1")
            assert launcher.latest("w2") is changes
            assert changes.commands == ["prefill 0", "prefill 0"]
    assert ("3 blocks are leased" in caplog.text) == (error is not None)


@pytest.mark.in_order
async def test_a_restarted_controller_drains_a_worker_after_its_role_change() -> None:
    launcher, store, config = FakeLauncher(), InMemoryStore(), fleet_config()
    async with fleet(config, launcher, store) as first:
        await first.all_serve(3)
        changes = launcher.latest("w2")
        changes.may_drain.clear()
        running = [asyncio.ensure_future(first.controller.set_role("w2", PREFILL))]
        while not changes.is_draining:
            await asyncio.sleep(0)
        running.append(asyncio.ensure_future(first.controller.drain("w2")))
        await asyncio.sleep(0)
        await first.cut_off()
        await asyncio.gather(*running, return_exceptions=True)
        async with asyncio.timeout(60.0), fleet(config, launcher, store) as second:
            changes.may_drain.set()
            assert set(await second.all_serve(2)) == {"w0", "w1"}
            assert changes.commands == ["prefill 0", "prefill 0", "drain 0", "stop 5"]


async def test_a_role_change_that_had_failed_before_the_controller_restarted_is_not_tried_again() -> None:
    launcher, store, config = FakeLauncher(), InMemoryStore(), fleet_config()
    async with fleet(config, launcher, store) as first:
        await first.all_serve(3)
        changes = launcher.latest("w2")
        changes.may_drain.clear()
        changing = asyncio.ensure_future(first.controller.set_role("w2", PREFILL))
        while not changes.is_draining:
            await asyncio.sleep(0)
        await first.cut_off()
        await asyncio.gather(changing, return_exceptions=True)
        changes.is_draining, changes.target = False, None
        async with fleet(config, launcher, store) as second:
            await second.all_serve(3)
            assert b'"name": "w2", "role": "decode"' in (store.load() or b"")
            assert changes.commands == ["prefill 0"]
            changes.role = PREFILL  # the command reached the worker late
            await second.until(lambda known: known["w2"].role is PREFILL)
            assert b'"name": "w2", "role": "prefill"' in (store.load() or b"")


async def test_a_worker_that_a_rollout_or_its_engine_drains_is_no_decode_worker_to_count_on() -> None:
    async with fleet(fleet_config()) as tested:
        await tested.all_serve(3)
        leaves = tested.launcher.latest("w2")
        leaves.is_draining, leaves.num_answers = True, 0  # as after too many wrong steps
        while leaves.num_answers < 2:
            await asyncio.sleep(0.005)
        for command in (tested.controller.drain("w1"), tested.controller.set_role("w1", PREFILL)):
            with pytest.raises(FleetError, match="no decode worker serves"):
                await command
        leaves.may_drain.clear()
        await tested.controller.rollouts.begin_rollout(("w2",))
        await tested.state_becomes("w2", "draining")
        with pytest.raises(FleetError, match="w1 is drained, no decode worker serves"):
            await tested.controller.drain("w1")


async def test_a_fleet_that_shrinks_loses_first_what_takes_no_requests() -> None:
    async with fleet(fleet_config()) as tested:
        await tested.all_serve(3)
        leaves = tested.launcher.latest("w2")
        leaves.is_draining, leaves.num_answers = True, 0
        while leaves.num_answers < 2:
            await asyncio.sleep(0.005)
        await tested.controller.scale(DECODE, 1)
        assert set(await tested.states()) == {"w0", "w1"}


@in_virtual_time
async def test_who_asked_for_a_role_change_learns_why_the_worker_was_ended() -> None:
    """The worker's process knows only that it was ended."""
    async with fleet(fleet_config(drain_timeout_s=30.0)) as tested:
        await tested.all_serve(3)
        stopped = tested.launcher.latest("w1")
        stopped.may_drain.clear()
        changing = asyncio.ensure_future(tested.controller.set_role("w1", PREFILL))
        await asyncio.sleep(0.01)
        stopped.is_frozen = True
        reason = (
            r"w1 remains a decode worker: it did not answer for 0\.2 s \(cluster\.unresponsive_timeout_s\)"
        )
        with pytest.raises(FleetError, match=reason):
            await changing


@in_virtual_time
async def test_a_drain_that_a_hanging_worker_ends_says_why_the_worker_was_ended(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with fleet(fleet_config(drain_timeout_s=30.0)) as tested:
        await tested.all_serve(3)
        stopped = tested.launcher.latest("w1")
        stopped.may_drain.clear()
        draining = asyncio.ensure_future(tested.controller.drain("w1"))
        await asyncio.sleep(0.01)
        stopped.is_frozen = True
        await draining
    reason = "it did not answer for 0.2 s (cluster.unresponsive_timeout_s)"
    assert f"worker w1 did not drain: {reason}" in caplog.messages


@pytest.mark.parametrize("is_clean", [True, False])
async def test_a_drain_that_leaves_something_says_so(
    is_clean: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async with fleet(fleet_config()) as tested:
        await tested.all_serve(3)
        tested.launcher.latest("w1").drains_cleanly = is_clean
        await tested.controller.drain("w1")
    assert (
        any("worker w1 left before its transfers" in message for message in caplog.messages) is not is_clean
    )


async def test_after_a_role_change_and_not_before_a_worker_counts_at_once() -> None:
    async with fleet(fleet_config(prefill=2, decode=1)) as tested:
        await tested.all_serve(3)
        changes = tested.launcher.latest("w0")
        changes.may_drain.clear()
        changing = asyncio.ensure_future(tested.controller.set_role("w0", DECODE))
        await asyncio.sleep(0)
        with pytest.raises(FleetError, match="w2 is drained, no decode worker serves"):
            await tested.controller.drain("w2")
        await asyncio.sleep(0.05)  # its status says that it drains
        changes.may_drain.set()
        await changing
        await tested.controller.drain("w2")


@in_virtual_time
async def test_a_worker_that_drains_for_a_former_controller_is_replaced_after_the_time_for_a_drain() -> None:
    """Before this time is over, the worker may also be changing its role."""
    async with fleet(fleet_config(), FakeLauncher()) as tested:
        before = await tested.all_serve(3)
        worker = tested.launcher.latest("w1")
        for _ in range(3):  # together longer than a drain may take, but no single one is
            worker.is_draining = True
            await asyncio.sleep(0.2)
            virtual_loop().stand_still(60.0)
            await asyncio.sleep(0.02)
            worker.is_draining = False
            await asyncio.sleep(0.1)
        assert (await tested.states())["w1"] == "serving"
        assert tested.launcher.latest("w1").endpoint == before["w1"]
        worker.is_draining = True
        await tested.until(lambda known: "w1" in known and known["w1"] != before["w1"])
        assert (await tested.controller.describe()).replicas[1].last_failure == "", "it is no crash"


async def test_a_worker_that_is_no_longer_desired_is_ended_when_it_is_found() -> None:
    launcher, store, config = FakeLauncher(), InMemoryStore(), fleet_config()
    async with fleet(config, launcher, store) as first:
        await first.all_serve(3)
        await first.cut_off()
        stranger = await launcher.place("w7", DECODE, 1)
        async with fleet(config, launcher, store) as second:
            await second.all_serve(3)
            assert stranger.commands == ["stop 0"]


async def test_a_replica_survives_an_unexpected_error() -> None:
    launcher = FakeLauncher()
    async with fleet(fleet_config(), launcher) as tested:
        await tested.all_serve(3)

        def odd(incarnation: FakeIncarnation) -> None:
            if incarnation.number == 2:
                incarnation.kill()
                raise ValueError("this name is taken")

        launcher.prepare = odd
        launcher.latest("w1").kill()
        await tested.all_serve(2)
        known = await tested.all_serve(3)
        assert known["w1"].pid == launcher.latest("w1").pid
        replica = (await tested.controller.describe()).replicas[1]
        assert (replica.num_starts, replica.last_failure) == (3, "ValueError: this name is taken")


async def test_a_failure_is_shown_until_an_incarnation_was_drained() -> None:
    async with fleet(fleet_config()) as tested:
        before = await tested.all_serve(3)
        tested.launcher.latest("w0").kill("out of memory")
        await tested.until(lambda known: "w0" in known and known["w0"] != before["w0"])
        assert (await tested.controller.describe()).replicas[0].last_failure == "out of memory"
        await anext(tested.controller.rollout(("w0",)))
        replica = (await tested.controller.describe()).replicas[0]
        assert (replica.num_starts, replica.last_failure, replica.state) == (3, "", ReplicaState.SERVING)


@pytest.mark.parametrize("name", ["1", "w01", "w٣", "w-1", "", "w3"])
async def test_a_name_that_no_worker_ever_had_cannot_be_drained(name: str) -> None:
    async with fleet(fleet_config()) as tested:
        await tested.all_serve(3)
        with pytest.raises(FleetError, match="there is no worker"):
            await tested.controller.drain(name)


async def test_who_is_drained_while_it_crashes_on_and_on_is_gone() -> None:
    launcher = FakeLauncher()
    launcher.prepare = lambda incarnation: setattr(
        incarnation, "start_error", ClusterError("no driver") if incarnation.name == "w2" else None
    )
    async with fleet(fleet_config(), launcher) as tested:
        await tested.all_serve(2)
        await tested.state_becomes("w2", "crash_loop")
        await tested.controller.drain("w2")
        assert set(await tested.states()) == {"w0", "w1"}
        assert [incarnation.name for incarnation in launcher.alive] == ["w0", "w1"]
