"""One WaitView at the controller serves all gateways; its silence changes nothing, and its end reaches all callers."""

import asyncio
from typing import Any, TypeVar

import pytest

from baton.errors import ClusterError, FleetEnded
from baton.fleet import FleetView
from baton.messages.control import ControlRequest, WaitView
from cluster.control_api.view_cache import ViewCache
from cluster.controller import follower

R = TypeVar("R")


class Controller:
    """Says what is put there, one thing for each question; remembers what it was asked."""

    def __init__(self) -> None:
        self.says: asyncio.Queue[FleetView | ClusterError] = asyncio.Queue()
        self.asked: list[tuple[str, int]] = []

    async def call(self, request: ControlRequest[R]) -> R:
        answer: R = await self._answer(request)
        return answer

    async def _answer(self, request: ControlRequest[Any]) -> Any:
        assert isinstance(request, WaitView)
        assert request.wait_s > 0
        self.asked.append((request.controller_incarnation, request.version))
        said = await self.says.get()
        if isinstance(said, ClusterError):
            raise said
        return said


def view(version: int) -> FleetView:
    return FleetView("life", version, ())


async def test_many_readers_are_one_question() -> None:
    controller = Controller()
    cache = ViewCache(controller)
    running = asyncio.create_task(cache.run())
    readers = [asyncio.create_task(cache.wait_view(WaitView("", -1, 10.0))) for _ in range(5)]
    controller.says.put_nowait(view(1))
    assert await asyncio.gather(*readers) == [view(1)] * 5
    assert await cache.wait_view(WaitView("", -1, 10.0)) == view(1)
    later = asyncio.create_task(cache.wait_view(WaitView("life", 1, 10.0)))
    await asyncio.sleep(0)
    assert not later.done()
    controller.says.put_nowait(view(1))  # no news
    controller.says.put_nowait(view(2))
    assert await later == view(2)
    assert controller.asked[:2] == [("", -1), ("life", 1)]
    running.cancel()


async def test_a_wait_without_a_change_returns_the_same_view() -> None:
    controller = Controller()
    cache = ViewCache(controller)
    running = asyncio.create_task(cache.run())
    with pytest.raises(ClusterError, match="not answered yet"):
        await cache.wait_view(WaitView("", -1, 0.01))
    controller.says.put_nowait(view(1))
    await cache.wait_view(WaitView("", -1, 10.0))
    assert await cache.wait_view(WaitView("life", 1, 0.01)) == view(1)
    running.cancel()


async def test_a_controller_that_is_away_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower, "RETRY_S", 0.0)

    controller = Controller()
    cache = ViewCache(controller)
    running = asyncio.create_task(cache.run())
    for said in (view(1), ClusterError("away"), ClusterError("away")):
        controller.says.put_nowait(said)
    assert await cache.wait_view(WaitView("", -1, 10.0)) == view(1)
    controller.says.put_nowait(view(2))
    assert await cache.wait_view(WaitView("life", 1, 10.0)) == view(2)
    running.cancel()


async def test_present_and_later_callers_get_the_end_of_a_fleet() -> None:
    controller = Controller()
    cache = ViewCache(controller)
    running = asyncio.create_task(cache.run())
    waiting = asyncio.create_task(cache.wait_view(WaitView("life", 1, 10.0)))
    controller.says.put_nowait(view(1))
    controller.says.put_nowait(FleetEnded("an orphan"))
    with pytest.raises(FleetEnded, match="an orphan"):
        await running
    for reader in (waiting, cache.wait_view(WaitView("", -1, 10.0))):
        with pytest.raises(FleetEnded, match="an orphan"):
            await reader
