"""A control server over real sockets: which calls it takes, from whom, and what happens when either end is away."""

import asyncio
import logging
from contextlib import AsyncExitStack
from pathlib import Path

import msgpack
import pytest
import zmq

from baton.config import BatonConfig
from baton.errors import ClusterError, ConfigError, FleetEnded, FleetError
from baton.fleet import CacheFlush, FleetDescription, GatewayReport
from baton.messages.control import (
    BeginRollout,
    CachesFlushed,
    CallFailure,
    ControlRequest,
    DescribeFleet,
    DrainNode,
    DrainWorker,
    EndFleet,
    FlushCaches,
    GetConfiguration,
    ReportLoad,
    ScaleRole,
    SetWorkerRole,
    WaitRolloutStep,
    WaitStart,
    WaitView,
    follow_rollout,
)
from baton.messages.control_codec import CallFrame, FailureFrame, write_call
from baton.system.curve import derive_fleet_keys
from baton.worker import WorkerRole
from cluster.control_api import zmq_carrier
from cluster.control_api.calls import CONTROL_CODEC, ControlClient
from cluster.control_api.configuration import unpack_configuration
from cluster.control_api.zmq_carrier import control_client
from cluster.controller.supervisor import Patience
from cluster.serve.joining import AnotherFleet, find_at_control_server
from tests.factories.control_api import MODEL_PATH, client_of, control_server, port_of
from tests.factories.fleet import FleetUnderTest, fleet, fleet_config
from tests.factories.security import FLEET_KEYS, OTHER_SECRET

DOUBT = "the fleet may still carry out the command; see `baton status`"

REPORT = GatewayReport(
    gateway="g",
    oldest_queued_s=0.5,
    oldest_without_prefill_s=0.4,
    num_first_tokens=4,
    ttft_s=(0.1, 0.2),
    itl_s=(0.01, 0.02),
    workers=(),
)


async def test_a_gateway_follows_the_fleet_and_sends_commands() -> None:
    config = fleet_config()
    async with fleet(config) as tested:
        before = await tested.all_serve(3)
        async with control_server(config, tested.controller) as server, client_of(server, config) as client:
            assert unpack_configuration(await client.call(GetConfiguration())) == (config, MODEL_PATH)
            view = await client.call(WaitView("", -1, 5.0))
            assert {endpoint.ref.name: endpoint for endpoint in view.endpoints} == before
            assert await client.call(DescribeFleet()) == await tested.controller.describe()
            await client.call(ReportLoad(REPORT))
            # This call waits for a change of the view, and returns after the change.
            news = asyncio.create_task(client.call(WaitView(view.controller_incarnation, view.version, 30.0)))
            await client.call(SetWorkerRole("w1", WorkerRole.PREFILL))
            assert "w1" in {e.ref.name for e in (await news).endpoints if e.role is WorkerRole.PREFILL}
            await client.call(SetWorkerRole("w1", WorkerRole.DECODE))
            steps = [step async for step in follow_rollout(client, ("w0", "w2"))]
            assert [(step.worker, step.done, step.count) for step in steps] == [("w0", 1, 2), ("w2", 2, 2)]
            tested.launcher.addresses["there"] = "10.0.0.2"
            await client.call(DrainNode("10.0.0.2", 5.0))
            assert [node.is_draining for node in (await client.call(DescribeFleet())).nodes] == [False, True]
            with pytest.raises(FleetError, match="no node of the fleet has the address or name 'nowhere'"):
                await client.call(DrainNode("nowhere", 5.0))
            flushed = await client.call(FlushCaches(("w2",), force=True))
            assert flushed == CachesFlushed((CacheFlush("w2"),))
            await client.call(ScaleRole(WorkerRole.DECODE, 3))
            await tested.all_serve(4)
            await client.call(DrainWorker("w3"))
            assert set(await tested.states()) == {"w0", "w1", "w2"}
            with pytest.raises(FleetError, match="there is no worker 'w9'"):
                await client.call(DrainWorker("w9"))


async def test_a_report_reaches_the_autoscaler() -> None:
    sections = fleet_config().model_dump(exclude_unset=True)
    config = BatonConfig.from_mapping({**sections, "autoscaling": {"mode": "dry_run", "max_decode": 4}})
    reports: list[GatewayReport] = []

    async def note(report: GatewayReport) -> None:
        reports.append(report)

    async with fleet(config) as tested:
        await tested.all_serve(3)
        tested.controller.report = note  # type: ignore[method-assign]
        async with control_server(config, tested.controller) as server, client_of(server, config) as client:
            await client.call(ReportLoad(REPORT))
    assert reports == [REPORT]


async def test_while_the_fleet_starts_the_control_server_says_so() -> None:
    config = fleet_config()
    async with control_server(config, None) as server, client_of(server, config) as client:
        with pytest.raises(ClusterError, match="still starting"):
            await client.call(GetConfiguration())


async def test_who_has_another_secret_is_refused_and_told_why(caplog: pytest.LogCaptureFixture) -> None:
    config = fleet_config()
    async with fleet(config) as tested, control_server(config, tested.controller) as server:
        for keys in (derive_fleet_keys(OTHER_SECRET), None):
            async with control_client(server.address, keys, config.network) as client:
                with pytest.raises(
                    AnotherFleet, match=r"cannot join the fleet at .*: it refused .* cluster secret"
                ):
                    await find_at_control_server(client)
                assert client.carrier.refusal is not None
        async with client_of(server, config) as client:
            await client.call(DescribeFleet())
    assert "the control server denied 1 connection(s) so far" in caplog.text


async def test_a_control_server_without_a_secret_refuses_who_has_one() -> None:
    config = fleet_config()
    async with (
        fleet(config) as tested,
        control_server(config, tested.controller, keys=None) as server,
        control_client(server.address, FLEET_KEYS, config.network) as client,
    ):
        with pytest.raises(AnotherFleet, match=r"network\.security"):
            await find_at_control_server(client)


async def test_the_wait_for_an_absent_control_server_is_short(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(zmq_carrier, "CONNECT_S", 0.05)
    config = fleet_config()
    async with control_client("127.0.0.1:1", None, config.network) as client:
        with pytest.raises(
            ClusterError,
            match=r"no connection to the control server at 127\.0\.0\.1:1: no answer for 0\.05 s$",
        ):
            await client.call(DrainWorker("w1"))


@pytest.mark.in_order
async def test_a_restarted_control_server_is_missed_at_once_and_found_again() -> None:
    config = fleet_config()
    async with fleet(config) as tested, AsyncExitStack() as stack:
        await tested.all_serve(3)
        async with control_server(config, tested.controller) as server:
            fixed = _on_port(config, port_of(server))
            client = await stack.enter_async_context(client_of(server, config))
            await client.call(GetConfiguration())
            view = await client.call(WaitView("", -1, 5.0))
            step = asyncio.create_task(client.call(WaitRolloutStep("nowhere", 0)))
            with pytest.raises(FleetError, match="start the rollout again"):
                await step
            pending = asyncio.create_task(
                client.call(WaitView(view.controller_incarnation, view.version, 1000.0))
            )
            await everything_sent(client)
            server._socket.close()  # as if its process was killed: no client is notified
            with pytest.raises(ClusterError, match=r"broke$"):
                await pending
            server._socket.close = lambda: None  # type: ignore[method-assign]
        async with control_server(fixed, tested.controller):
            assert await _until_answered(client) == await tested.controller.describe()
            assert await client.call(WaitView("", -1, 5.0)) == view


@pytest.mark.in_order
async def test_a_command_whose_control_server_closes_may_be_carried_out_and_its_error_says_so() -> None:
    config = fleet_config()
    async with fleet(config) as tested:
        await tested.all_serve(3)
        tested.launcher.latest("w1").may_drain.clear()
        async with control_server(config, tested.controller) as server, client_of(server, config) as client:
            running = asyncio.create_task(client.call(DrainWorker("w1")))
            await everything_sent(client)
            for task in server._tasks:
                task.cancel()  # as `close` does
            with pytest.raises(ClusterError, match=f"the control server was closed; {DOUBT}$"):
                await running
        tested.launcher.latest("w1").may_drain.set()


@pytest.mark.in_order
async def test_a_command_whose_connection_breaks_may_be_carried_out_and_its_error_says_so() -> None:
    config = fleet_config()
    async with fleet(config) as tested:
        await tested.all_serve(3)
        for name in ("w0", "w1"):
            tested.launcher.latest(name).may_drain.clear()
        async with control_server(config, tested.controller) as server, client_of(server, config) as client:
            rollout = await client.call(BeginRollout(("w0",)))
            calls: list[ControlRequest[object]] = [DrainWorker("w1"), WaitRolloutStep(rollout.rollout_id, 0)]
            running = [asyncio.create_task(client.call(call)) for call in calls]
            await everything_sent(client)
            server._socket.close()  # as if its process was killed
            for call in running:
                with pytest.raises(ClusterError, match=f"broke; {DOUBT}$"):
                    await call
            server._socket.close = lambda: None  # type: ignore[method-assign]
        for name in ("w0", "w1"):
            tested.launcher.latest(name).may_drain.set()
        await _until_gone(tested, "w1")


async def test_another_fleet_at_the_same_address_is_not_followed() -> None:
    config = fleet_config(name="blue")
    async with fleet(config) as tested, AsyncExitStack() as stack:
        await tested.all_serve(3)
        async with control_server(config, tested.controller) as server:
            port = port_of(server)
            client = await stack.enter_async_context(client_of(server, config))
            await client.call(GetConfiguration())
            await client.call(WaitView("", -1, 5.0))
        other = _on_port(fleet_config(name="green"), port)
        async with control_server(other, tested.controller, model_path=Path("/models/other")):
            await _until_answered(client)
            for _ in range(2):  # a second call gets the same error
                with pytest.raises(
                    FleetEnded, match=r"another fleet .* cluster\.name is 'blue' in the former fleet, 'green'"
                ):
                    await client.call(WaitView("", -1, 5.0))


async def test_the_end_of_the_fleet_is_told_to_who_waits_and_to_who_asks_a_moment_later() -> None:
    config = fleet_config()
    async with fleet(config) as tested:
        await tested.all_serve(3)
        async with control_server(config, tested.controller) as server, client_of(server, config) as client:
            view = await client.call(WaitView("", -1, 5.0))
            waiting = asyncio.create_task(
                client.call(WaitView(view.controller_incarnation, view.version, 1000.0))
            )
            await client.call(DescribeFleet())
            closing = asyncio.create_task(server.close(1000.0))
            with pytest.raises(FleetEnded, match="ended by its owner"):
                await waiting
            with pytest.raises(FleetEnded, match="ended by its owner"):
                await client.call(WaitView("", -1, 5.0))
            closing.cancel()
            await asyncio.gather(closing, return_exceptions=True)


@pytest.mark.in_order
async def test_an_order_is_carried_out_whoever_still_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmq_carrier, "ANSWER_S", 0.2)
    config = fleet_config(drain_timeout_s=50.0)
    async with fleet(config) as tested:
        await tested.all_serve(3)
        incarnation = tested.launcher.latest("w1")
        incarnation.may_drain.clear()
        async with control_server(config, tested.controller) as server:
            async with client_of(server, config) as client:
                client.patience = Patience.of(fleet_config())
                with pytest.raises(ClusterError, match=f"did not answer within .* s; {DOUBT}$"):
                    await client.call(DrainWorker("w1"))
                client.patience = Patience.of(config)
                again = asyncio.create_task(client.call(DrainWorker("w1")))
                await everything_sent(client)
                again.cancel()
                await asyncio.gather(again, return_exceptions=True)
            assert (await tested.states())["w1"] == "draining"
            incarnation.may_drain.set()
            await _until_gone(tested, "w1")


async def test_a_controller_that_does_not_answer_is_not_waited_for_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(zmq_carrier, "ANSWER_S", 0.05)
    config = fleet_config()

    async def never() -> FleetDescription:
        await asyncio.Event().wait()
        raise AssertionError

    async with fleet(config) as tested:
        tested.controller.describe = never  # type: ignore[method-assign]
        async with control_server(config, tested.controller) as server, client_of(server, config) as client:
            with pytest.raises(ClusterError, match=r"did not answer within 0\.05 s"):
                await client.call(DescribeFleet())


async def test_what_fails_in_the_control_server_is_said_without_its_inside(
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = fleet_config()

    async def broken() -> FleetDescription:
        raise ValueError("at 10.1.2.3")

    async with fleet(config) as tested:
        tested.controller.describe = broken  # type: ignore[method-assign]
        async with control_server(config, tested.controller) as server, client_of(server, config) as client:
            with caplog.at_level(logging.CRITICAL), pytest.raises(ClusterError) as caught:
                await client.call(DescribeFleet())
    assert str(caught.value) == "the control server failed: ValueError"


async def test_who_asks_too_much_or_nonsense_harms_nobody_else() -> None:
    config = fleet_config()
    async with fleet(config) as tested:
        await tested.all_serve(3)
        async with (
            control_server(config, tested.controller, keys=None) as server,
            client_of(server, config, None) as client,
        ):
            with zmq.Context() as context, context.socket(zmq.DEALER) as rude:
                rude.setsockopt(zmq.LINGER, 0)
                rude.setsockopt(zmq.SNDHWM, 0)
                rude.connect(f"tcp://{server.address}")
                for number in range(2000):
                    rude.send(write_call(CONTROL_CODEC.frame(number, 5.0, DescribeFleet())))
                    rude.send_multipart([b"not", b"a", b"call"])
                rude.send(b"\xc1" * 5_000_000)
                async with asyncio.timeout(30.0):
                    while server._open_calls.num_bad_messages < 2000:
                        await client.call(DescribeFleet())
                        await asyncio.sleep(0.01)
            assert await client.call(DescribeFleet()) == await tested.controller.describe()


async def test_calls_that_are_unknown_or_for_the_owner_are_refused_in_words() -> None:
    config = fleet_config()
    async with fleet(config) as tested:
        await tested.all_serve(3)
        async with control_server(config, tested.controller) as server, client_of(server, config) as client:
            owners: list[ControlRequest[object]] = [
                EndFleet(may_drain=False),
                WaitStart(-1, 1.0),
            ]
            for request in owners:
                with pytest.raises(FleetError, match="is only for the fleet's owner"):
                    await client.call(request)
            unknown = CallFrame(99, 5.0, msgpack.packb(["PauseWorker", "w1"]))
            reply = await client.carrier.exchange(unknown)
            assert isinstance(reply, FailureFrame)
            assert reply.failure == CallFailure("WireError", "unknown message kind 'PauseWorker'")
            torn = CallFrame(100, 5.0, msgpack.packb(["DrainWorker", 7]))
            reply = await client.carrier.exchange(torn)
            assert isinstance(reply, FailureFrame)
            assert reply.failure.reason == "DrainWorker.worker: expected str, got 7"
            assert len(await tested.states()) == 3


async def test_a_port_that_is_taken_is_named() -> None:
    config = fleet_config()
    async with control_server(config, None) as server:
        with pytest.raises(ConfigError, match=r"cluster\.fleet_port: cannot listen on port \d+"):
            async with control_server(_on_port(config, port_of(server)), None):
                raise AssertionError


def _on_port(config: BatonConfig, port: int) -> BatonConfig:
    return config.model_copy(update={"cluster": config.cluster.model_copy(update={"fleet_port": port})})


async def everything_sent(client: ControlClient) -> None:
    """Returns when the server has all calls of the tasks that exist now."""
    await asyncio.sleep(0)  # they send in their first turn
    await client.call(DescribeFleet())


async def _until_answered(client: ControlClient) -> FleetDescription:
    while True:
        try:
            return await client.call(DescribeFleet())
        except ClusterError:
            await asyncio.sleep(0.05)


async def _until_gone(tested: FleetUnderTest, name: str) -> None:
    while name in await tested.states():
        await asyncio.sleep(0.01)
