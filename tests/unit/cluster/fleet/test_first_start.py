"""What the owner of a fleet hears while it starts for the first time."""

import asyncio

import pytest

from baton.errors import BatonError, ClusterError, ModelError
from baton.worker import StartProgress
from cluster.fleet.controller import StartReport
from cluster.fleet.first_start import first_start

LOADING = (("w0", StartProgress("weights", 1, 2)),)


class Script:
    """Answers one report after the other, and then nothing new."""

    def __init__(self, *reports: StartReport) -> None:
        self.reports = list(reports)

    async def next_start(self, version: int, timeout_s: float) -> StartReport:
        assert version < (self.reports[0].version if self.reports else 99)
        if not self.reports:
            await asyncio.sleep(timeout_s)
        return self.reports.pop(0)


def start(*reports: StartReport) -> list[tuple[str, StartProgress]]:
    heard: list[tuple[str, StartProgress]] = []
    asyncio.run(first_start(Script(*reports), 0.05, "no room at all", lambda *news: heard.append(news)))
    return heard


def test_it_ends_when_nobody_is_missing() -> None:
    heard = start(StartReport(1, LOADING, (), (("w0", ""),), None), StartReport(2, (), (), (), None))
    assert heard == list(LOADING)


@pytest.mark.parametrize(
    ("report", "kind", "message"),
    [
        (StartReport(1, (), (), (("w0", "x"),), ModelError("no config.json")), ModelError, "no config.json"),
        (
            StartReport(1, (), ("w1",), (("w0", ""), ("w1", "")), None),
            ClusterError,
            "no room at all; waited 0.05 s",
        ),
        (
            StartReport(1, (), (), (("w0", ""), ("w1", "killed")), None),
            ClusterError,
            r"within 0.05 s \(cluster.start_timeout_s\); w1: killed",
        ),
    ],
)
def test_what_is_in_the_way_is_said(report: StartReport, kind: type[BatonError], message: str) -> None:
    with pytest.raises(kind, match=message):
        start(report)
