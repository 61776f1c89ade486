"""The control API beside its controller: commands whose callers leave, and a fleet that its owner ends."""

import asyncio

import pytest

from baton.errors import ClusterError, FleetEnded, FleetError
from baton.messages.control import (
    BeginRollout,
    DescribeFleet,
    DrainWorker,
    EndFleet,
    GetConfiguration,
    ScaleRole,
    SetWorkerRole,
    WaitView,
)
from baton.worker import WorkerRole
from cluster.control_api import calls
from cluster.control_api.calls import InProcessControl
from tests.factories.control_api import in_process
from tests.factories.fleet import FleetUnderTest, fleet, fleet_config


async def drain_and_leave(tested: FleetUnderTest, control: InProcessControl) -> None:
    """The caller of a drain of w1 leaves before the drain has ended."""
    calling = asyncio.create_task(control.call(DrainWorker("w1")))
    await tested.state_becomes("w1", "draining")
    calling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await calling


async def test_a_drain_continues_though_its_caller_left() -> None:
    config = fleet_config()
    async with fleet(config) as tested:
        await tested.all_serve(3)
        control, worker = in_process(tested.controller, config), tested.launcher.latest("w1")
        worker.may_drain.clear()
        await drain_and_leave(tested, control)
        worker.may_drain.set()
        assert set(await tested.all_serve(2)) == {"w0", "w2"}
        assert worker.commands == ["drain 0", "stop 5"]


async def test_so_many_commands_run_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "MAX_COMMANDS", 1)
    config = fleet_config()
    async with fleet(config) as tested:
        await tested.all_serve(3)
        control, worker = in_process(tested.controller, config), tested.launcher.latest("w1")
        worker.may_drain.clear()
        await drain_and_leave(tested, control)
        # A command without a caller counts, too.
        with pytest.raises(ClusterError, match="1 commands are running"):
            await control.call(DrainWorker("w2"))
        assert len((await control.call(DescribeFleet())).replicas) == 3
        worker.may_drain.set()
        async with asyncio.timeout(60.0):
            while control.num_commands > 0:
                await asyncio.sleep(0.005)
        await control.call(DrainWorker("w0"))


async def test_an_error_that_no_caller_hears_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    config = fleet_config()
    async with fleet(config) as tested:
        await tested.all_serve(3)
        control, worker = in_process(tested.controller, config), tested.launcher.latest("w1")
        with pytest.raises(FleetError, match="there is no worker 'w9'"):
            await control.call(DrainWorker("w9"))
        assert caplog.messages == [], "its caller has heard it"
        worker.may_drain.clear()
        worker.role_error = FleetError("3 leases are held")
        calling = asyncio.create_task(control.call(SetWorkerRole("w1", WorkerRole.PREFILL)))
        while not worker.is_draining:
            await asyncio.sleep(0.005)
        calling.cancel()
        worker.may_drain.set()
        async with asyncio.timeout(60.0):
            while not caplog.messages:
                await asyncio.sleep(0.005)
        assert caplog.messages == [
            "a command was refused or failed, and its caller had left: "
            "worker w1 remains a decode worker: 3 leases are held"
        ]


async def test_a_fleet_that_was_ended_says_so_to_all_who_call_later() -> None:
    """The controller's process may still answer if the owner died before it could end this process, too."""
    config = fleet_config()
    async with fleet(config) as tested:
        await tested.all_serve(3)
        control = in_process(tested.controller, config)
        for worker in tested.launcher.alive:
            worker.may_drain.clear()
        ending = asyncio.create_task(control.call(EndFleet(may_drain=True)))
        await tested.state_becomes("w0", "draining")
        # Gateways need the workers until they have drained, and no command may adopt or join a fleet that ends.
        assert len((await control.call(WaitView("", -1, 1.0))).endpoints) == 3
        # A worker that a command starts could begin when all others have ended.
        commands = (
            ScaleRole(WorkerRole.DECODE, 9),
            SetWorkerRole("w1", WorkerRole.PREFILL),
            BeginRollout(()),
        )
        for refused in (GetConfiguration(), *commands):
            with pytest.raises(ClusterError, match="the fleet is ending; try again when it has ended"):
                await control.call(refused)
        assert len(tested.launcher.incarnations) == 3
        for worker in tested.launcher.alive:
            worker.may_drain.set()
        await ending
        for request in (GetConfiguration(), WaitView("", -1, 60.0), DescribeFleet()):
            with pytest.raises(FleetEnded, match="the fleet was ended by its owner"):
                await control.call(request)
        await control.call(EndFleet(may_drain=False))  # as an owner in a hurry does


async def test_a_fleet_that_could_not_be_ended_has_not_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    config = fleet_config()
    async with fleet(config) as tested:
        await tested.all_serve(3)
        control = in_process(tested.controller, config)

        async def fail(*, may_drain: bool) -> None:
            raise ClusterError(f"drain: {may_drain}")

        with monkeypatch.context() as patched:
            patched.setattr(tested.controller, "shutdown", fail)
            with pytest.raises(ClusterError):
                await control.call(EndFleet(may_drain=True))
        assert await control.call(GetConfiguration()) == control.configuration
