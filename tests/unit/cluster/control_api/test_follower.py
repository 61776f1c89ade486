"""A gateway's workers follow the fleet's view, and stay while the controller is unreachable."""

import asyncio
import contextlib
import logging

import pytest

from baton.errors import ClusterError, FleetEnded
from baton.fleet import FleetView
from baton.kv import WorkerRef
from baton.worker import WorkerEndpoint, WorkerRole
from cluster.control_api import follower
from cluster.control_api.follower import ViewedWorkers, ViewFollower
from tests.factories.viewed_control import ViewedControl
from tests.factories.virtual_loop import in_virtual_time, virtual_loop


def endpoint(name: str, incarnation: str) -> WorkerEndpoint:
    ref = WorkerRef(name, incarnation, ("tcp://127.0.0.1:1",), 16)
    return WorkerEndpoint(ref, WorkerRole.DECODE, "tcp://127.0.0.1:2", "here", 1)


class Log:
    """A gateway's side."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def add_worker(self, endpoint: WorkerEndpoint) -> None:
        self.lines.append(f"+{endpoint.ref.name} {endpoint.ref.incarnation}")

    def remove_worker(self, name: str) -> None:
        self.lines.append(f"-{name}")

    def worker_died(self, name: str, reason: str) -> None:
        self.lines.append(f"lost {name} {reason}")


def follow(
    *answers: FleetView | ClusterError, is_beside_controller: bool = False
) -> tuple[list[str], list[tuple[str, int]]]:
    async def run() -> tuple[list[str], list[tuple[str, int]]]:
        script, log = ViewedControl(*answers), Log()
        workers = ViewedWorkers(log, is_beside_controller=is_beside_controller)
        following = asyncio.create_task(ViewFollower(script, workers.apply).run())
        async with asyncio.timeout(60):
            await script.is_over.wait()
        following.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await following
        return log.lines, script.asked

    return asyncio.run(run())


A1, A2, B1 = endpoint("w0", "a1"), endpoint("w0", "a2"), endpoint("w1", "b1")


def test_workers_come_are_replaced_and_go() -> None:
    lines, asked = follow(
        FleetView("c1", 1, (A1,)),
        FleetView("c1", 2, (A1, B1)),
        FleetView("c1", 3, (A2, B1)),
        FleetView("c1", 4, (A2,)),
    )
    assert lines == ["+w0 a1", "+w1 b1", "+w0 a2", "-w1"]
    assert asked == [("", -1), ("c1", 1), ("c1", 2), ("c1", 3), ("c1", 4)]


def test_who_died_is_reported_with_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        lines, _ = follow(FleetView("c1", 1, (A1,)), FleetView("c1", 2, (), (("a1", "out of memory"),)))
    assert lines == ["+w0 a1", "lost w0 out of memory"]
    (line,) = caplog.records
    assert line.getMessage() == "worker w0 (decode) died: out of memory"
    assert line.__dict__["worker"] == "w0"


def test_a_death_is_logged_once_if_the_controller_is_in_this_process(
    caplog: pytest.LogCaptureFixture,
) -> None:
    views = FleetView("c1", 1, (A1,)), FleetView("c1", 2, (), (("a1", "out of memory"),))
    with caplog.at_level(logging.ERROR):
        follow(*views, is_beside_controller=True)
    assert caplog.records == [], "the controller logs it"


def test_a_worker_that_died_is_reported_before_its_next_incarnation() -> None:
    lines, _ = follow(FleetView("c1", 1, (A1,)), FleetView("c1", 2, (A2,), (("a1", "out of memory"),)))
    assert lines == ["+w0 a1", "lost w0 out of memory", "+w0 a2"]


def test_while_the_controller_is_away_everything_known_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower, "RETRY_S", 0.0)
    lines, asked = follow(
        FleetView("c1", 7, (A1, B1)), ClusterError("away"), ClusterError("away"), FleetView("c2", 2, (A1, B1))
    )
    assert lines == ["+w0 a1", "+w1 b1"]
    assert asked == [("", -1), ("c1", 7), ("c1", 7), ("c1", 7), ("c2", 2)]


def test_one_absence_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(follower, "RETRY_S", 0.0)
    away, back = ClusterError("away"), FleetView("c1", 7, (A1,))
    with caplog.at_level(logging.WARNING):
        follow(away, back, away, away, away, back, away)
    assert caplog.text.count("keeping the last known worker list: away") == 3


@in_virtual_time
async def test_a_controller_that_is_away_is_not_asked_without_a_pause() -> None:
    script = ViewedControl(ClusterError("away"), ClusterError("away"))
    following = asyncio.create_task(ViewFollower(script, lambda _: None).run())
    await script.is_over.wait()
    assert virtual_loop().now() == pytest.approx(2 * follower.RETRY_S, abs=0.1)
    following.cancel()


def test_a_fleet_that_has_ended_is_not_asked_again() -> None:
    async def run() -> None:
        async with asyncio.timeout(60):
            script = ViewedControl(FleetView("c1", 7, (A1,)), FleetEnded("it was left alone"))
            await ViewFollower(script, lambda _: None).run()

    with pytest.raises(FleetEnded, match="it was left alone"):
        asyncio.run(run())


def test_a_worker_that_only_changed_its_role_stays_connected() -> None:
    changed = WorkerEndpoint(A1.ref, WorkerRole.PREFILL, A1.request_address, A1.node, A1.pid)
    assert follow(FleetView("c1", 1, (A1,)), FleetView("c1", 2, (changed,)))[0] == ["+w0 a1"]
