"""Reports to the owner of a fleet during its first start."""

import asyncio
from typing import Any, TypeVar

import pytest

from baton.errors import BatonError, ClusterError, ModelError
from baton.messages.control import CallFailure, ControlRequest, StartReport, WaitStart
from baton.worker import StartProgress, WorkerRole
from cluster.controller.first_start import first_start

R = TypeVar("R")

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

    async def on_enough() -> None:
        await asyncio.sleep(0)
        reported.append("enough")

    asyncio.run(
        first_start(
            Script(*reports),
            0.05,
            "no room at all",
            lambda *progress: reported.append(progress),
            on_enough if opens_early else None,
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
