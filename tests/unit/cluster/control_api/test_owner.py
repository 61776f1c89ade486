"""What the owner of a fleet learns during its first start, and does when the fleet's file asks for other numbers."""

import asyncio
import logging
from typing import Any, TypeVar
from unittest.mock import patch

import pytest

from baton.config import BatonConfig
from baton.errors import BatonError, ClusterError, FleetError, ModelError
from baton.messages.control import (
    CallFailure,
    ControlApi,
    ControlRequest,
    Done,
    ScaleRole,
    StartReport,
    WaitStart,
)
from baton.worker import StartProgress, WorkerRole
from cluster.control_api.owner import first_start, follow_counts, scale_to

R = TypeVar("R")

SCALING = {"mode": "on", "min_decode": 1, "max_decode": 8}
LOADING = (("w0", StartProgress("weights", 1, 2)),)


def report(
    version: int,
    *unready: tuple[str, str],
    lacking: tuple[WorkerRole, ...] = (),
    placing: tuple[str, ...] = (),
    failure: BatonError | None = None,
) -> StartReport:
    return StartReport(
        version,
        LOADING if unready else (),
        placing,
        unready,
        lacking,
        None if failure is None else CallFailure.of(failure),
    )


class Script:
    """Answers one report after the other, and then nothing new."""

    def __init__(self, *reports: StartReport) -> None:
        self.reports = list(reports)

    async def call(self, request: ControlRequest[R]) -> R:
        answer: R = await self._answer(request)
        return answer

    async def _answer(self, request: ControlRequest[Any]) -> Any:
        assert isinstance(request, WaitStart)
        assert request.version < (self.reports[0].version if self.reports else 99)
        if not self.reports:
            await asyncio.sleep(request.wait_s)
        return self.reports.pop(0)


def start(*reports: StartReport, opens_early: bool = False) -> list[object]:
    """All reports in order."""
    reported: list[object] = []

    script = Script(*reports)

    async def on_serving(control: ControlApi) -> None:
        assert control is script
        await asyncio.sleep(0)
        reported.append("enough")

    asyncio.run(
        first_start(
            script,
            0.05,
            "no room at all",
            lambda *progress: reported.append(progress),
            on_serving if opens_early else None,
        )
    )
    return reported


def test_it_ends_when_no_worker_is_missing() -> None:
    assert start(report(1, ("w0", ""), lacking=(WorkerRole.PREFILL,)), report(2)) == list(LOADING)


def test_it_reports_workers_of_each_role_and_continues() -> None:
    starting = report(1, ("w0", ""), ("w1", ""), lacking=(WorkerRole.PREFILL,))
    assert start(starting, report(2, ("w0", "")), report(3, ("w0", "")), report(4), opens_early=True) == [
        *LOADING,
        "enough",
        *LOADING,
        *LOADING,
    ]
    assert start(report(1), opens_early=True) == ["enough"]


def test_workers_missing_after_that_are_awaited_but_no_error(caplog: pytest.LogCaptureFixture) -> None:
    starting, partly = report(1, ("w0", ""), ("w1", "")), report(2, ("w1", "killed"))
    assert start(starting, partly, opens_early=True)[0] == "enough"
    assert [record.getMessage() for record in caplog.records] == [
        "the fleet serves, but some workers are missing: "
        "not every worker was ready within 0.05 s (cluster.start_timeout_s); "
        "w1: killed"
    ]


def test_a_failure_after_that_is_a_warning_and_ends_no_fleet_that_serves(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The failure stays in all later reports; the controller starts the worker again."""
    failed = [report(n, ("w1", "no weights"), failure=ModelError("no weights")) for n in (2, 3)]
    whole = report(4, failure=ModelError("no weights"))
    reported = start(report(1, ("w1", "")), *failed, whole, opens_early=True)
    assert reported == ["enough", *LOADING * 3]
    assert [record.getMessage() for record in caplog.records] == [
        "the fleet serves, but a worker does not start; the controller keeps trying: no weights"
    ]
    with pytest.raises(ModelError, match="no weights"):
        start(report(1, ("w1", "")), *failed)


@pytest.mark.parametrize("opens_early", [False, True])
@pytest.mark.parametrize(
    ("report", "kind", "message"),
    [
        (report(1, ("w0", "x"), failure=ModelError("no config.json")), ModelError, "no config.json"),
        (
            report(1, ("w0", ""), ("w1", ""), placing=("w1",), lacking=(WorkerRole.DECODE,)),
            ClusterError,
            "no room at all; waited 0.05 s",
        ),
        (
            report(1, ("w0", ""), ("w1", "killed"), lacking=(WorkerRole.DECODE,)),
            ClusterError,
            r"within 0.05 s \(cluster.start_timeout_s\); w1: killed",
        ),
    ],
)
def test_what_is_in_the_way_is_said(
    report: StartReport, kind: type[BatonError], message: str, opens_early: bool
) -> None:
    with pytest.raises(kind, match=message):
        start(report, opens_early=opens_early)


def test_without_a_callback_all_workers_must_serve() -> None:
    with pytest.raises(ClusterError, match="w1: killed"):
        start(report(1, ("w1", "killed")))


class Fleet:
    """Notes what it is scaled to; refuses as often as `refusals` says."""

    def __init__(self, refusals: int = 0) -> None:
        self.commands: list[tuple[WorkerRole, int]] = []
        self._refusals = refusals

    async def call(self, request: ControlRequest[R]) -> R:
        assert isinstance(request, ScaleRole)
        self.commands.append((request.role, request.count))
        if self._refusals:
            self._refusals -= 1
            raise FleetError("not now")
        return Done()  # type: ignore[return-value]


def config(prefill: int, decode: int, **sections: object) -> BatonConfig:
    return BatonConfig.from_mapping({"cluster": {"prefill": prefill, "decode": decode}, **sections})


def follow(fleet: Fleet, begun_as: BatonConfig, *later: BatonConfig) -> None:
    """Follows the counts until it has read each of these twice."""

    async def run() -> None:
        looks = iter([look for each in later for look in (each, each)])
        is_over = asyncio.Event()
        loop = asyncio.get_running_loop()
        last = begun_as

        def read() -> BatonConfig:
            nonlocal last
            try:
                last = next(looks)
            except StopIteration:
                loop.call_soon_threadsafe(is_over.set)
            return last

        following = asyncio.create_task(follow_counts(read, begun_as, fleet))
        async with asyncio.timeout(60.0):
            await is_over.wait()
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)

    with patch("cluster.control_api.owner.CHECK_EVERY_S", 0.001):
        asyncio.run(run())


def test_the_fleet_is_scaled_once_for_each_change() -> None:
    fleet = Fleet()
    follow(fleet, config(1, 1), config(1, 1), config(2, 4), config(2, 3))
    assert fleet.commands == [(WorkerRole.PREFILL, 2), (WorkerRole.DECODE, 4), (WorkerRole.DECODE, 3)]


def test_an_adopted_fleet_gets_all_counts_whatever_it_began_with() -> None:
    """The fleet may have grown or shrunk since."""
    fleet, scaled = Fleet(), Fleet()
    asyncio.run(scale_to(config(1, 2), None, fleet))
    assert fleet.commands == [(WorkerRole.PREFILL, 1), (WorkerRole.DECODE, 2)]
    scaling = {"mode": "on", "min_decode": 1, "max_decode": 8}
    asyncio.run(scale_to(config(1, 2, autoscaling=scaling), None, scaled))
    assert scaled.commands == []


def test_what_is_refused_is_tried_again() -> None:
    fleet = Fleet(refusals=1)
    follow(fleet, config(1, 1), config(1, 2))
    assert fleet.commands == [(WorkerRole.DECODE, 2)] * 2


@pytest.mark.parametrize(
    "in_the_file", [{"autoscaling": SCALING}, {}], ids=["goes on", "is turned off there"]
)
def test_autoscaling_begins_there_and_decides_the_counts_from_then_on(in_the_file: dict[str, Any]) -> None:
    fleet = Fleet()
    follow(fleet, config(1, 1, autoscaling=SCALING), config(1, 4, **in_the_file))
    assert fleet.commands == []


@pytest.mark.parametrize(
    ("sections", "difference"),
    [
        (
            {"model": {"dtype": "float32"}},
            "model.dtype is 'auto' in this command's configuration, 'float32' in the file",
        ),
        (
            {"logging": {"level": "info"}},
            "logging.level is 'warning' in this command's configuration, 'info' in the file",
        ),
        (
            {"cluster": {"decode": 2, "fleet_port": 7}},
            "cluster.fleet_port is 0 in this command's configuration, 7 in the file",
        ),
        (
            {"gateway": {"max_queued": 9, "max_in_flight": 9}},
            "file has changed: gateway.max_in_flight is 1024 in this command's configuration, 9 in the file",
        ),
        (
            {"autoscaling": SCALING},
            "autoscaling.mode is 'off' in this command's configuration, 'on' in the file",
        ),
    ],
)
def test_every_other_change_is_said_and_counts_later(
    sections: dict[str, object], difference: str, caplog: pytest.LogCaptureFixture
) -> None:
    fleet = Fleet()
    with caplog.at_level(logging.WARNING):
        follow(fleet, config(1, 1), config(1, 2, **sections))
    assert fleet.commands == [(WorkerRole.DECODE, 2)]
    assert caplog.text.count(f"{difference}; restart the fleet to apply this") == 1
    assert "max_queued" not in caplog.text
