"""A fleet's door over real sockets: what may be asked there, by whom, and what becomes of either's absence."""

import asyncio
import logging
from pathlib import Path

import pytest
import zmq

from baton.config import BatonConfig
from baton.errors import ClusterError, ConfigError, FleetEnded, FleetError
from baton.fleet import FleetDescription, GatewayReport
from baton.system.curve import derive_fleet_keys
from baton.worker import WorkerRole
from cluster.control_api import client as client_module
from cluster.control_api.client import FleetClient
from cluster.control_api.messages import TO_DOOR, Call, Describe
from cluster.serve.fleet_source import AnotherFleet, DoorSource
from tests.factories.control_api import MODEL_PATH, client_of, door_of, in_loop, port_of
from tests.factories.fleet import FleetUnderTest, fleet, fleet_config
from tests.factories.security import FLEET_KEYS, OTHER_SECRET

REPORT = GatewayReport(
    gateway="g",
    window_s=1.0,
    num_queued=1,
    oldest_queued_s=0.5,
    num_in_flight=2,
    num_finished=3,
    ttft_s=(0.1, 0.2),
    itl_s=(0.01, 0.02),
    workers=(),
)


@in_loop
async def test_a_gateway_follows_the_fleet_and_gives_it_orders() -> None:
    config = fleet_config()
    async with fleet(config) as tested:
        before = await tested.all_serve(3)
        async with door_of(config, tested.controller) as door, client_of(door, config) as client:
            assert await client.configuration() == (config, MODEL_PATH)
            view = await client.next_view("", -1, 5.0)
            assert {endpoint.ref.name: endpoint for endpoint in view.endpoints} == before
            assert await client.describe() == await tested.controller.describe()
            await client.report(REPORT)
            # Waits for news, and has it when there is some.
            news = asyncio.create_task(client.next_view(view.controller_incarnation, view.version, 30.0))
            await client.set_role("w1", WorkerRole.PREFILL)
            assert "w1" in {e.ref.name for e in (await news).endpoints if e.role is WorkerRole.PREFILL}
            await client.set_role("w1", WorkerRole.DECODE)
            steps = [step async for step in client.rollout(("w0", "w2"))]
            assert [(step.worker, step.done, step.count) for step in steps] == [("w0", 1, 2), ("w2", 2, 2)]
            tested.launcher.addresses["there"] = "10.0.0.2"
            await client.drain_node("10.0.0.2", 5.0)
            assert [node.is_leaving for node in (await client.describe()).nodes] == [False, True]
            with pytest.raises(FleetError, match="no node of the fleet has the address or name 'nowhere'"):
                await client.drain_node("nowhere", 5.0)
            await client.scale(WorkerRole.DECODE, 3)
            await tested.all_serve(4)
            await client.drain("w3")
            assert set(await tested.states()) == {"w0", "w1", "w2"}
            with pytest.raises(FleetError, match="there is no worker 'w9'"):
                await client.drain("w9")


@in_loop
async def test_a_report_reaches_the_autoscaler() -> None:
    sections = fleet_config().model_dump(exclude_unset=True)
    config = BatonConfig.from_mapping({**sections, "autoscaling": {"mode": "dry_run", "max_decode": 4}})
    reports: list[GatewayReport] = []

    async def note(report: GatewayReport) -> None:
        reports.append(report)

    async with fleet(config) as tested:
        await tested.all_serve(3)
        tested.controller.report = note  # type: ignore[method-assign]
        async with door_of(config, tested.controller) as door, client_of(door, config) as client:
            await client.report(REPORT)
    assert reports == [REPORT]


@in_loop
async def test_while_the_fleet_starts_the_door_says_so() -> None:
    config = fleet_config()
    async with door_of(config, None) as door, client_of(door, config) as client:
        with pytest.raises(ClusterError, match="still starting"):
            await client.configuration()


@in_loop
async def test_who_has_another_secret_is_refused_and_told_why() -> None:
    config = fleet_config()
    async with fleet(config) as tested, door_of(config, tested.controller) as door:
        for keys in (derive_fleet_keys(OTHER_SECRET), None):
            async with client_of(door, config, keys) as client:
                with pytest.raises(AnotherFleet, match=r"is not ours: it refused .* cluster secret"):
                    await DoorSource(client).look()
                assert client.refusal is not None
        async with client_of(door, config) as client:
            await client.describe()
        assert door.num_denied > 0


@in_loop
async def test_a_door_without_a_secret_refuses_who_has_one() -> None:
    config = fleet_config()
    async with (
        fleet(config) as tested,
        door_of(config, tested.controller, keys=None) as door,
        client_of(door, config) as client,
    ):
        with pytest.raises(AnotherFleet, match=r"network\.security"):
            await DoorSource(client).look()


@in_loop
async def test_nobody_waits_long_for_a_door_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "CONNECT_S", 0.05)
    config = fleet_config()
    async with FleetClient("127.0.0.1:1", None, config.network) as client:
        with pytest.raises(
            ClusterError, match=r"no connection to the fleet's door at 127\.0\.0\.1:1: nobody"
        ):
            await client.describe()


@in_loop
async def test_a_door_that_goes_and_comes_back_is_missed_at_once_and_found_again() -> None:
    config = fleet_config()
    async with fleet(config) as tested:
        await tested.all_serve(3)
        async with door_of(config, tested.controller) as door:
            fixed = _on_port(config, port_of(door))
            client = FleetClient(door.address, FLEET_KEYS, config.network)
            await client.__aenter__()
            await client.configuration()
            view = await client.next_view("", -1, 5.0)
            step = asyncio.create_task(client.rollout_step("nowhere", 0))
            with pytest.raises(FleetError, match="start it again"):
                await step
            pending = asyncio.create_task(client.next_view(view.controller_incarnation, view.version, 1000.0))
            await client.describe()  # what was sent before this is there
            door._port.close()  # as if its process was killed: nobody is told anything
            with pytest.raises(ClusterError, match="broke"):
                await pending
            door._port.close = lambda: None  # type: ignore[method-assign]
        try:
            async with door_of(fixed, tested.controller):
                assert await _until_answered(client) == await tested.controller.describe()
                assert await client.next_view("", -1, 5.0) == view
        finally:
            await client.__aexit__(None, None, None)


@in_loop
async def test_another_fleet_at_the_same_address_is_not_followed() -> None:
    config = fleet_config(name="blue")
    async with fleet(config) as tested:
        await tested.all_serve(3)
        async with door_of(config, tested.controller) as door:
            port = port_of(door)
            client = FleetClient(door.address, FLEET_KEYS, config.network)
            await client.__aenter__()
            await client.configuration()
            await client.next_view("", -1, 5.0)
        try:
            other = _on_port(fleet_config(name="green"), port)
            async with door_of(other, tested.controller, model_path=Path("/models/other")):
                await _until_answered(client)
                for _ in range(2):  # it does not get used to it
                    with pytest.raises(
                        FleetEnded, match=r"another fleet .* cluster\.name is 'blue' there, 'green'"
                    ):
                        await client.next_view("", -1, 5.0)
        finally:
            await client.__aexit__(None, None, None)


@in_loop
async def test_the_end_of_the_fleet_is_told_to_who_waits_and_to_who_asks_a_moment_later() -> None:
    config = fleet_config()
    async with fleet(config) as tested:
        await tested.all_serve(3)
        async with door_of(config, tested.controller) as door, client_of(door, config) as client:
            view = await client.next_view("", -1, 5.0)
            waiting = asyncio.create_task(client.next_view(view.controller_incarnation, view.version, 1000.0))
            await client.describe()
            closing = asyncio.create_task(door.close(1000.0))
            with pytest.raises(FleetEnded, match="ended by its owner"):
                await waiting
            with pytest.raises(FleetEnded, match="ended by its owner"):
                await client.next_view("", -1, 5.0)
            closing.cancel()
            await asyncio.gather(closing, return_exceptions=True)


@in_loop
async def test_an_order_is_carried_out_whoever_still_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "ANSWER_S", 0.2)
    config = fleet_config(drain_timeout_s=50.0)
    async with fleet(config) as tested:
        await tested.all_serve(3)
        life = tested.launcher.latest("w1")
        life.may_drain.clear()
        async with door_of(config, tested.controller) as door:
            async with client_of(door, config) as client:
                with pytest.raises(ClusterError, match="did not answer within"):
                    await client.with_config(fleet_config()).drain("w1")
                again = asyncio.create_task(client.drain("w1"))
                await client.describe()  # what was sent before this is there
                again.cancel()
                await asyncio.gather(again, return_exceptions=True)
            assert (await tested.states())["w1"] == "draining"
            life.may_drain.set()
            await _until_gone(tested, "w1")


@in_loop
async def test_a_controller_that_does_not_answer_is_not_waited_for_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client_module, "ANSWER_S", 0.05)
    config = fleet_config()

    async def never() -> FleetDescription:
        await asyncio.Event().wait()
        raise AssertionError

    async with fleet(config) as tested:
        tested.controller.describe = never  # type: ignore[method-assign]
        async with door_of(config, tested.controller) as door, client_of(door, config) as client:
            with pytest.raises(ClusterError, match=r"did not answer within 0\.05 s"):
                await client.describe()


@in_loop
async def test_what_fails_in_the_door_is_said_without_its_inside(caplog: pytest.LogCaptureFixture) -> None:
    config = fleet_config()

    async def broken() -> FleetDescription:
        raise ValueError("at 10.1.2.3")

    async with fleet(config) as tested:
        tested.controller.describe = broken  # type: ignore[method-assign]
        async with door_of(config, tested.controller) as door, client_of(door, config) as client:
            with caplog.at_level(logging.CRITICAL), pytest.raises(ClusterError) as caught:
                await client.describe()
    assert str(caught.value) == "the fleet's door failed: ValueError"


@in_loop
async def test_who_asks_too_much_or_nonsense_harms_nobody_else() -> None:
    config = fleet_config()
    async with fleet(config) as tested:
        await tested.all_serve(3)
        async with (
            door_of(config, tested.controller, keys=None) as door,
            client_of(door, config, None) as client,
        ):
            with zmq.Context() as context, context.socket(zmq.DEALER) as rude:
                rude.setsockopt(zmq.LINGER, 0)
                rude.setsockopt(zmq.SNDHWM, 0)
                rude.connect(f"tcp://{door.address}")
                for number in range(2000):
                    rude.send(TO_DOOR.encode(Call(number, 5.0, Describe())))
                    rude.send_multipart([b"not", b"a", b"call"])
                rude.send(b"\xc1" * 5_000_000)
                async with asyncio.timeout(30.0):
                    while door._desk.num_bad_messages < 2000:
                        await client.describe()
                        await asyncio.sleep(0.01)
            assert await client.describe() == await tested.controller.describe()


def test_a_port_that_is_taken_is_named() -> None:
    @in_loop
    async def test() -> None:
        config = fleet_config()
        async with door_of(config, None) as door:
            with pytest.raises(ConfigError, match=r"cluster\.fleet_port: cannot listen on port \d+"):
                async with door_of(_on_port(config, port_of(door)), None):
                    raise AssertionError

    test()


def _on_port(config: BatonConfig, port: int) -> BatonConfig:
    return config.model_copy(update={"cluster": config.cluster.model_copy(update={"fleet_port": port})})


async def _until_answered(client: FleetClient) -> FleetDescription:
    while True:
        try:
            return await client.describe()
        except ClusterError:
            await asyncio.sleep(0.05)


async def _state_becomes(tested: FleetUnderTest, name: str, state: str) -> None:
    while (await tested.states())[name] != state:
        await asyncio.sleep(0.01)


async def _until_gone(tested: FleetUnderTest, name: str) -> None:
    while name in await tested.states():
        await asyncio.sleep(0.01)
