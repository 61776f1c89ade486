"""WatchCluster: the fleet's description now, and whenever it changes."""

import asyncio
import math
from contextlib import AsyncExitStack, aclosing
from pathlib import Path

import pytest

from baton.worker import WorkerState
from gateway import GatewayError
from gateway.auth import callers
from gateway.grpc import cluster_service
from tests.factories.fleet_control import FakeFleetControl, fleet_of, replica
from tests.factories.gateway import answering, gateway_with, refusal


async def test_the_description_comes_at_once_and_again_when_it_has_changed(folder: Path) -> None:
    control = FakeFleetControl(fleet_of(replica("d0")))
    async with (
        gateway_with(folder, {}, {"d0": answering([3])}, control=control) as under_test,
        aclosing(under_test.client.watch(interval_s=0.1)) as watch,
    ):
        first = await anext(watch)
        assert first == await under_test.client.describe()
        second = asyncio.ensure_future(anext(watch))
        await asyncio.sleep(0.5)
        assert not second.done(), "nothing has changed"
        under_test.workers["d0"].state = WorkerState.DRAINING
        assert [worker["state"] for worker in (await second)["workers"]] == ["draining"]
        control.fleet = fleet_of(replica("d0"), replica("d1"))
        assert [worker["name"] for worker in (await anext(watch))["workers"]] == ["d0", "d1"]


async def test_watches_share_descriptions(folder: Path) -> None:
    control = FakeFleetControl(fleet_of(replica("d0")))
    async with (
        gateway_with(folder, {}, {"d0": answering([3])}, control=control) as under_test,
        AsyncExitStack() as stack,
    ):
        watches = [await stack.enter_async_context(aclosing(under_test.client.watch(60.0))) for _ in range(9)]
        descriptions = await asyncio.gather(*map(anext, watches))
        assert all([worker["name"] for worker in each["workers"]] == ["d0"] for each in descriptions)
        assert control.num_descriptions <= 2, "two if half a second passed meanwhile"


async def test_watches_share_descriptions_of_a_controller_that_takes_long(folder: Path) -> None:
    """The description is older than half a second when it comes, but all of them waited for it."""
    control = FakeFleetControl(fleet_of(replica("d0")))
    control.answers.clear()
    async with (
        gateway_with(folder, {}, {"d0": answering([3])}, control=control) as under_test,
        AsyncExitStack() as stack,
    ):
        watches = [await stack.enter_async_context(aclosing(under_test.client.watch(60.0))) for _ in range(9)]
        descriptions = asyncio.gather(*map(anext, watches))
        await asyncio.sleep(0.7)
        control.answers.set()
        await descriptions
        assert control.num_descriptions <= 2, "of which one is the client's before the watches"


async def test_what_changes_all_the_time_is_told_once_an_interval(folder: Path) -> None:
    async with gateway_with(folder, {}, {"d0": answering([3])}) as under_test:
        interval_s, num_responses = 0.2, 0
        loop = asyncio.get_running_loop()
        began = loop.time()
        async with aclosing(under_test.client.watch(interval_s)) as watch:
            async for _ in watch:
                num_responses += 1
                await under_test.ask()
                if num_responses == 4:
                    break
        assert loop.time() - began >= 3 * interval_s


async def test_an_interval_that_cannot_be_is_refused(folder: Path) -> None:
    async with gateway_with(folder, {}, {}) as under_test:
        for interval_s in (0.0, -1.0, 61.0, math.nan):
            error = await refusal(anext(under_test.client.watch(interval_s)))
            assert (error.code, error.details.field) == ("INVALID_ARGUMENT", "interval_s"), interval_s


async def test_a_watch_ends_some_time_so_that_its_key_is_asked_for_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(callers, "MAX_WATCH_S", 0.1)

    async with gateway_with(folder, {}, {}) as under_test:
        with pytest.raises(
            GatewayError, match=r"UNAVAILABLE: a watch lasts at most 0\.1 s; start another one"
        ):
            [description async for description in under_test.client.watch(interval_s=0.1)]
        async with (
            under_test.http() as client,
            client.stream("GET", "/cluster/events") as answer,
        ):
            lines = [line async for line in answer.aiter_lines()]
        assert lines[0] == "event: snapshot", "and then it ends"


async def test_so_many_may_watch_and_no_more(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_service, "MAX_WATCHES", 2)

    async with gateway_with(folder, {}, {}) as under_test:
        client, service = under_test.client, under_test.gateway._cluster
        for _ in range(2):  # watches that have ended do not count
            async with aclosing(client.watch()) as first, aclosing(client.watch()) as second:
                await anext(first)
                await anext(second)
                with pytest.raises(GatewayError, match="2 calls are watching already") as caught:
                    await anext(client.watch())
                assert caught.value.details.retry_after_s == 10.0
            await under_test.until(lambda: service._watches.num_taken == 0)


async def test_a_watch_does_not_hold_up_a_gateway_that_stops(folder: Path) -> None:
    async with gateway_with(folder, {}, {}) as under_test:
        watch = under_test.client.watch(interval_s=30.0)
        await anext(watch)
        end = asyncio.ensure_future(anext(watch))
        async with asyncio.timeout(60):
            await under_test.gateway.stop(grace_s=60.0)
        with pytest.raises(GatewayError, match="shutting down"):
            await end
