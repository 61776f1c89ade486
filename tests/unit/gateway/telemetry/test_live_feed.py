"""LiveFeed: one snapshot a second, made once for all viewers."""

import asyncio
from collections.abc import AsyncGenerator
from typing import cast

import pytest

from baton.clock import SystemClock
from baton.errors import Overloaded
from gateway.telemetry import live_feed
from gateway.telemetry.cluster_view import ClusterView
from gateway.telemetry.live_feed import MAX_VIEWERS, Edition, LiveFeed
from gateway.telemetry.snapshot import ClusterSnapshot, GatewaySeen, LastMinute, NodeSeen, WorkerSeen


def snapshot() -> ClusterSnapshot:
    minute = LastMinute(
        newest=1,
        tokens=(0,),
        finished=(0,),
        ttft_p50_s=(None,),
        ttft_p99_s=(None,),
        itl_p50_s=(None,),
        itl_p99_s=(None,),
        ttft_s=(0.0, 0.0),
        itl_s=(0.0, 0.0),
    )
    return ClusterSnapshot(
        model="tiny",
        version="1",
        workers=(
            WorkerSeen(name="w0", role="decode", state="ready", node="10.0.0.9", failure="at 10.0.0.9"),
        ),
        handovers=(),
        gateway=GatewaySeen(in_flight=0, queued=0, oldest_queued_s=0.0, paths={}, outcomes={}),
        last_minute=minute,
        controller="answering",
        nodes=(NodeSeen(name="n1", address="10.0.0.9", is_alive=True, is_head=True),),
    )


class View:
    """Counts its snapshots."""

    def __init__(self) -> None:
        self.num_looks = 0
        self.is_stopped = False

    def snapshot(self) -> ClusterSnapshot:
        self.num_looks += 1
        return snapshot()

    async def ask_controller(self) -> None:
        pass

    async def stop(self) -> None:
        self.is_stopped = True


def feed_of(view: View) -> LiveFeed:
    return LiveFeed(cast("ClusterView", view), SystemClock())


async def take(editions: AsyncGenerator[Edition, None], number: int) -> list[Edition]:
    return [await anext(editions) for _ in range(number)]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_feed, "INTERVAL_S", 0.05)


async def test_ten_viewers_see_the_same_editions_each_made_once() -> None:
    view = View()
    feed = feed_of(view)
    watching = [feed.watch() for _ in range(10)]
    seen = await asyncio.gather(*[take(editions, 4) for editions in watching])
    assert all(editions == seen[0] for editions in seen)
    assert len(set(map(id, seen[0]))) == 4
    assert view.num_looks == 4
    for editions in watching:
        await editions.aclose()
    assert feed._viewers.num_taken == 0
    await asyncio.sleep(0.15)
    assert view.num_looks == 4, "a snapshot was made without viewers"


async def test_a_slow_viewer_misses_editions_and_none_is_kept() -> None:
    view = View()
    feed = feed_of(view)
    slow, quick = feed.watch(), feed.watch()
    await anext(slow)
    passed = await take(quick, 4)
    assert await anext(slow) is passed[-1]


async def test_one_viewer_too_many_is_refused_until_another_leaves() -> None:
    feed = feed_of(View())
    watching = [feed.watch() for _ in range(MAX_VIEWERS)]
    for editions in watching:
        await anext(editions)
    with pytest.raises(Overloaded):
        await anext(feed.watch())
    await watching[0].aclose()
    await anext(feed.watch())


async def test_stop_ends_every_watch_at_once() -> None:
    view = View()
    feed = feed_of(view)
    editions = feed.watch()
    await anext(editions)
    waiting = asyncio.create_task(anext(editions, None))
    await asyncio.sleep(0)
    await feed.stop()
    async with asyncio.timeout(60):
        assert await waiting is None
    assert view.is_stopped


def test_only_administrators_see_where_workers_are() -> None:
    edition = Edition(snapshot(), 0.0)
    assert b"10.0.0.9" in edition.json(for_administrators=True)
    assert b"10.0.0.9" not in edition.json(for_administrators=False)
    assert b'"w0"' in edition.json(for_administrators=False)
