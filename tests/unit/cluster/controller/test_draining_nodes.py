"""A node that leaves: its workers give away what they have and begin anew elsewhere, and nothing comes there again."""

import asyncio
from typing import Any

import pytest

from baton.errors import ClusterError, FleetError
from cluster.controller.desired import DesiredFleet, InMemoryStore
from cluster.controller.launcher import NodeDrains
from tests.factories.fleet import FakeIncarnation, FakeLauncher, FleetUnderTest, fleet, fleet_config
from tests.factories.virtual_loop import in_virtual_time, virtual_loop


def two_nodes(**options: Any) -> FakeLauncher:
    """All workers are placed on n1 while that is allowed."""
    launcher = FakeLauncher(**options)
    launcher.addresses = {"n1": "10.0.0.1", "n2": "10.0.0.2"}
    return launcher


async def all_serve_on(tested: FleetUnderTest, node: str) -> None:
    await tested.until(lambda known: [endpoint.node for endpoint in known.values()] == [node] * 3)


@pytest.mark.parametrize("node", ["10.0.0.1", "n1"])
async def test_workers_give_away_what_they_have_and_begin_anew_elsewhere(node: str) -> None:
    launcher = two_nodes()
    async with fleet(fleet_config(drain_timeout_s=0.5), launcher) as tested:
        await all_serve_on(tested, "n1")
        former = list(launcher.incarnations)
        await tested.controller.drain_node(node, 10.0)
        # They have ended, the last decode worker included; their successors may take their time.
        assert all(
            incarnation.death.done() and incarnation.commands[0] == "drain 0.5" for incarnation in former
        )
        await all_serve_on(tested, "n2")
        described = {each.name: each for each in (await tested.controller.describe()).nodes}
        assert [described[name].is_draining for name in ("n1", "n2")] == [True, False]
        # A repeated command returns at once, and does no harm.
        await tested.controller.drain_node(node, 10.0)
        assert len(launcher.incarnations) == 6
        assert len(launcher.alive) == 3
        tested.launcher.latest("w0").kill()
        await tested.until(lambda known: len(known) == 3 and launcher.latest("w0").number == 3)
        assert launcher.latest("w0").node == "n2"


async def test_their_successors_are_not_waited_for() -> None:
    launcher = two_nodes()
    async with fleet(fleet_config(), launcher) as tested:
        await all_serve_on(tested, "n1")
        launcher.room.clear()
        await tested.controller.drain_node("n1", 10.0)
        assert set((await tested.states()).values()) == {"placing"}
        assert launcher.alive == []
        launcher.room.set()
        await all_serve_on(tested, "n2")


@pytest.mark.parametrize("has_loaded", [False, True])
@in_virtual_time
async def test_a_worker_that_is_still_starting_there_begins_at_once_elsewhere(
    has_loaded: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The worker has not crashed, so it begins without a delay, and no crash loop begins."""
    may_start = asyncio.Event()

    def hold(incarnation: FakeIncarnation) -> None:
        if incarnation.name == "w2" and incarnation.number == 1:
            incarnation.start_error = ClusterError("no driver")
        elif incarnation.name == "w2" and incarnation.node == "n1":
            incarnation.may_start = may_start

    launcher = two_nodes(prepare=hold)
    config = fleet_config(
        restart_delay_s=90.0, restart_delay_max_s=900.0, crash_loop_deaths=2, start_timeout_s=60.0
    )
    async with fleet(config, launcher) as tested:
        await tested.all_serve(2)
        while launcher.latest("w2").number < 2:
            await asyncio.sleep(0.01)
        await tested.state_becomes("w2", "starting")
        began = virtual_loop().now()
        if has_loaded:  # its endpoint arrives while the worker is ended
            may_start.set()
        await tested.controller.drain_node("n1", 10.0)
        await all_serve_on(tested, "n2")
        assert virtual_loop().now() - began < 1.0
        replica = (await tested.controller.describe()).replicas[2]
        assert (replica.num_starts, replica.last_failure) == (3, "no driver")
        assert tested.view.deaths == ()
        assert [message for message in caplog.messages if "died" in message] == [
            "worker w2 (decode) died: no driver"
        ]


@in_virtual_time
async def test_a_worker_whose_place_is_on_a_node_that_began_to_drain_is_placed_again_at_once() -> None:
    def drain_now(incarnation: FakeIncarnation) -> None:
        if incarnation.name == "w2" and incarnation.number in (1, 2, 4):
            incarnation.kill()
            raise NodeDrains("its node n1 began to drain while the worker waited for room there")

    launcher = two_nodes(prepare=drain_now)
    config = fleet_config(restart_delay_s=90.0, restart_delay_max_s=900.0, crash_loop_deaths=2)
    async with fleet(config, launcher) as tested:
        await tested.all_serve(3)
        assert virtual_loop().now() < 1.0
        replica = (await tested.controller.describe()).replicas[2]
        assert (replica.num_starts, replica.last_failure) == (3, "")
        launcher.has_spare_room = True
        assert (await anext(tested.controller.rollout(("w2",)))).worker == "w2"
        assert launcher.latest("w2").number == 5


async def test_a_rollouts_next_incarnation_that_still_loads_there_gives_way_to_another_one() -> None:
    launcher = two_nodes()
    launcher.addresses["n3"] = "10.0.0.3"
    async with fleet(fleet_config(start_timeout_s=60.0), launcher) as tested:
        await all_serve_on(tested, "n1")
        launcher.has_spare_room, launcher.avoided = True, ("n1",)
        may_start = asyncio.Event()
        launcher.prepare = lambda incarnation: setattr(incarnation, "may_start", may_start)
        rolling = asyncio.ensure_future(anext(tested.controller.rollout(("w1",))))
        while launcher.latest("w1").number < 2:
            await asyncio.sleep(0.005)
        loading = launcher.latest("w1")
        assert loading.node == "n2"
        with pytest.raises(FleetError, match=r"^w1 did not leave n2 within 0\.05 s"):
            await tested.controller.drain_node("n2", 0.05)
        draining = asyncio.create_task(tested.controller.drain_node("n2", 60.0))
        await asyncio.sleep(0)
        may_start.set()
        step = await rolling
        await draining
        assert loading.death.done()
        assert (launcher.latest("w1").number, launcher.latest("w1").node) == (3, "n1")
        assert step.incarnation == launcher.latest("w1").endpoint.ref.incarnation
        assert [incarnation for incarnation in launcher.alive if incarnation.node == "n2"] == []


async def test_a_next_incarnation_that_is_ready_there_moves_on_once_it_serves() -> None:
    launcher = two_nodes()
    async with fleet(fleet_config(), launcher) as tested:
        await all_serve_on(tested, "n1")
        launcher.has_spare_room, launcher.avoided = True, ("n1",)
        former = launcher.latest("w1")
        former.may_drain.clear()
        rolling = asyncio.ensure_future(anext(tested.controller.rollout(("w1",))))
        while "drain 0" not in former.commands:
            await asyncio.sleep(0.005)
        draining = asyncio.create_task(tested.controller.drain_node("n2", 60.0))
        await asyncio.sleep(0)
        former.may_drain.set()
        await rolling
        await draining
        assert [incarnation for incarnation in launcher.alive if incarnation.node == "n2"] == []
        await tested.until(lambda known: "w1" in known and launcher.latest("w1").number == 3)
        assert launcher.latest("w1").node == "n1"


async def test_a_next_incarnation_that_failed_there_is_not_waited_for() -> None:
    launcher = two_nodes()
    async with fleet(fleet_config(), launcher) as tested:
        await all_serve_on(tested, "n1")
        launcher.has_spare_room, launcher.avoided = True, ("n1",)
        launcher.prepare = lambda incarnation: setattr(incarnation, "start_error", ClusterError("no"))
        with pytest.raises(FleetError, match="no new incarnation of worker w1: no"):
            await anext(tested.controller.rollout(("w1",)))
        await tested.controller.drain_node("n2", 60.0)


async def test_a_late_drain_names_the_remaining_workers_and_continues() -> None:
    launcher = two_nodes()
    async with fleet(fleet_config(), launcher) as tested:
        await all_serve_on(tested, "n1")
        launcher.latest("w1").may_drain.clear()
        with pytest.raises(FleetError, match=r"^w1 did not leave n1 within 0\.05 s; their move continues"):
            await tested.controller.drain_node("n1", 0.05)
        assert [incarnation.name for incarnation in launcher.alive if incarnation.node == "n1"] == ["w1"]
        again = asyncio.create_task(tested.controller.drain_node("n1", 10.0))
        await asyncio.sleep(0)
        launcher.latest("w1").may_drain.set()
        await again
        await all_serve_on(tested, "n2")


@in_virtual_time
async def test_only_the_head_waits_for_other_nodes_that_drain() -> None:
    launcher = two_nodes()
    launcher.addresses |= {"idle": "10.0.0.3", "head": "10.0.0.4"}
    launcher.head = "head"
    async with fleet(fleet_config(drain_timeout_s=60.0), launcher) as tested:
        await all_serve_on(tested, "n1")
        launcher.latest("w1").may_drain.clear()
        draining = asyncio.create_task(tested.controller.drain_node("n1", 60.0))
        await asyncio.sleep(0.1)
        await tested.controller.drain_node("idle", 10.0)
        assert virtual_loop().now() < 5.0
        with pytest.raises(FleetError, match=r"^w1 did not leave n1, idle, head within 5 s"):
            await tested.controller.drain_node("head", 5.0)
        leaving = asyncio.create_task(tested.controller.drain_node("head", 60.0))
        await asyncio.sleep(1.0)
        assert not leaving.done()
        launcher.latest("w1").may_drain.set()
        await asyncio.gather(draining, leaving)


@in_virtual_time
async def test_a_move_that_failed_is_not_reported_as_late(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(timeout_s: float) -> None:
        raise OSError(f"no Ray, stopped after {timeout_s:g} s")

    launcher = two_nodes()
    async with fleet(fleet_config(), launcher) as tested:
        await all_serve_on(tested, "n1")
        launcher.latest("w2").may_drain.clear()
        with monkeypatch.context() as broken:
            broken.setattr(launcher.latest("w1"), "stop", fail)
            with pytest.raises(FleetError) as late:
                await tested.controller.drain_node("n1", 0.3)
        assert str(late.value) == (
            "w1 did not leave n1: OSError: no Ray, stopped after 5 s; "
            "w2 did not leave n1 within 0.3 s; their move continues"
        )
        draining = asyncio.create_task(tested.controller.drain_node("n1", 60.0))
        await asyncio.sleep(0.1)
        await tested.controller.shutdown(may_drain=False)
        with pytest.raises(FleetError, match=r"^w2 did not leave n1: the fleet is ending$"):
            await draining


async def test_a_node_that_is_not_there_or_the_only_one_cannot_leave() -> None:
    launcher = two_nodes()
    async with fleet(fleet_config(), launcher) as tested:
        await all_serve_on(tested, "n1")
        with pytest.raises(FleetError, match=r"name '10\.0\.0\.9'; its nodes are: n1 \(10\.0\.0\.1\), n2"):
            await tested.controller.drain_node("10.0.0.9", 10.0)
        launcher.addresses = {"n1": "10.0.0.1", "n2": "10.0.0.1"}
        with pytest.raises(FleetError, match="the fleet's only node"):
            await tested.controller.drain_node("10.0.0.1", 10.0)
        assert launcher.avoided == ()
        await all_serve_on(tested, "n1")


async def cut_off_while_it_drains(tested: FleetUnderTest, launcher: FakeLauncher, node: str) -> None:
    """The workers of the node `n1` do not end before the controller does."""
    await all_serve_on(tested, "n1")
    for worker in launcher.incarnations:
        worker.may_drain.clear()
    with pytest.raises(FleetError):
        await tested.controller.drain_node(node, 0.05)
    await tested.cut_off()


async def test_a_node_that_is_gone_is_forgotten() -> None:
    launcher = two_nodes()
    async with fleet(fleet_config(), launcher) as tested:
        await all_serve_on(tested, "n1")
        await tested.controller.drain_node("n1", 10.0)
        launcher.addresses = {"n2": "10.0.0.2", "n3": "10.0.0.1"}  # another one, at the same address
        await tested.controller.drain_node("n2", 10.0)
        assert launcher.avoided == ("n2",)
        await all_serve_on(tested, "n3")


@pytest.mark.parametrize("node", ["n1", "10.0.0.1"])
async def test_a_command_that_is_sent_again_ends_though_the_node_and_the_controller_have_died(
    node: str,
) -> None:
    launcher, store = two_nodes(), InMemoryStore()
    async with fleet(fleet_config(), launcher, store) as tested:
        await cut_off_while_it_drains(tested, launcher, node)
        for worker in launcher.incarnations:
            worker.kill()
        launcher.lost.add("n1")
        async with fleet(fleet_config(), launcher, store) as heir:
            await heir.controller.drain_node(node, 10.0)
            with pytest.raises(FleetError, match=r"'10\.0\.0\.9'; its nodes are: n2 \(10\.0\.0\.2\)$"):
                await heir.controller.drain_node("10.0.0.9", 10.0)
            await all_serve_on(heir, "n2")
            del launcher.addresses["n1"]
            await heir.controller.drain_node("n1", 10.0)


@pytest.mark.parametrize("node", ["n1", "10.0.0.1"])
async def test_a_command_that_is_sent_again_ends_though_its_node_has_died_and_another_one_drains(
    node: str,
) -> None:
    launcher = two_nodes()
    launcher.addresses["n3"] = "10.0.0.3"
    async with fleet(fleet_config(), launcher) as tested:
        await all_serve_on(tested, "n1")
        await tested.controller.drain_node(node, 10.0)
        await all_serve_on(tested, "n2")
        launcher.lost.add("n1")
        await tested.controller.drain_node("n2", 10.0)
        assert launcher.avoided == ("n2",)
        await tested.controller.drain_node(node, 10.0)
        await all_serve_on(tested, "n3")


async def test_only_the_last_nodes_that_drained_and_died_are_remembered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("cluster.controller.commands._NUM_GONE", 2)
    launcher, store = two_nodes(), InMemoryStore()
    launcher.addresses |= {f"n{n}": f"10.0.0.{n}" for n in range(3, 6)}
    async with fleet(fleet_config(), launcher, store) as tested:
        for n in range(1, 5):
            await all_serve_on(tested, f"n{n}")
            await tested.controller.drain_node(f"n{n}", 10.0)
            assert launcher.avoided == (f"n{n}",)
            launcher.lost.add(f"n{n}")
        assert DesiredFleet.from_json(store.load() or b"").draining_nodes == ("n2", "n3", "n4")
        await tested.controller.drain_node("n2", 10.0)
        with pytest.raises(FleetError, match="no node of the fleet has the address or name 'n1'"):
            await tested.controller.drain_node("n1", 10.0)


async def test_a_node_that_died_without_a_drain_is_not_taken_for_an_earlier_one_with_its_address() -> None:
    launcher = two_nodes()
    launcher.addresses = {"n0": "10.0.0.1", **launcher.addresses}
    launcher.lost.add("n0")
    async with fleet(fleet_config(), launcher) as tested:
        await all_serve_on(tested, "n1")
        await tested.controller.drain_node("10.0.0.1", 10.0)
        launcher.lost.add("n1")
        await tested.controller.drain_node("10.0.0.1", 10.0)
        launcher.addresses["n3"] = "10.0.0.1"
        launcher.lost.add("n3")
        with pytest.raises(FleetError, match="no node of the fleet has the address or name"):
            await tested.controller.drain_node("10.0.0.1", 10.0)
        await tested.controller.drain_node("n1", 10.0)


@pytest.mark.parametrize("has_begun", [False, True])
async def test_the_next_controller_continues_the_drain(has_begun: bool) -> None:
    launcher, store = two_nodes(), InMemoryStore()
    async with fleet(fleet_config(), launcher, store) as tested:
        await cut_off_while_it_drains(tested, launcher, "n1")
        for worker in launcher.incarnations:
            worker.is_draining = has_begun  # if not, the controller was killed before it commanded this
            worker.may_drain.set()
        async with fleet(fleet_config(), launcher, store) as heir:
            assert launcher.avoided == ("n1",)
            await heir.until(lambda known: {endpoint.node for endpoint in known.values()} == {"n2"})
