"""Waiting for a fleet that starts for the first time: all of it serves, or its owner is told why not."""

import asyncio
from collections.abc import Callable
from typing import Protocol

from baton.errors import ClusterError
from baton.worker import StartProgress
from cluster.fleet.controller import StartReport

_POLL_S = 5.0

OnProgress = Callable[[str, StartProgress], None]
"""Of which worker, and how far it is."""


class StartSource(Protocol):
    """A controller, or a handle to one."""

    async def next_start(self, version: int, timeout_s: float) -> StartReport: ...


async def first_start(source: StartSource, timeout_s: float, no_room: str, on_progress: OnProgress) -> None:
    """Returns once every worker serves.

    Raises what no further try would change, and ClusterError once the time is over: `no_room` if some worker found
    none, else which ones are not ready.
    """
    report = await source.next_start(-1, timeout_s)  # at once, but a controller's process has to start, too
    try:
        async with asyncio.timeout(timeout_s):
            while report.unready and report.failure is None:
                for name, progress in report.progress:
                    on_progress(name, progress)
                report = await source.next_start(report.version, _POLL_S)
    except TimeoutError:
        raise ClusterError(_why(report, timeout_s, no_room)) from None
    if report.failure is not None:
        raise report.failure


def _why(report: StartReport, timeout_s: float, no_room: str) -> str:
    if report.placing:
        return f"{no_room}; waited {timeout_s:g} s"
    late = f"not every worker was ready within {timeout_s:g} s (cluster.start_timeout_s)"
    return "; ".join([late, *[f"{name}: {reason}" for name, reason in report.unready if reason]])
