"""Waiting for the first start of a fleet: until all of it serves, or its owner gets the reason why not."""

import logging
from collections.abc import Awaitable, Callable

from baton.errors import ClusterError
from baton.messages.control import ControlApi, StartReport, WaitStart
from baton.system.awake_timer import awake_timeout
from baton.worker import StartProgress

logger = logging.getLogger(__name__)

_POLL_S = 5.0

OnProgress = Callable[[str, StartProgress], None]
"""Of which worker, and how far it is."""

OnEnough = Callable[[], Awaitable[None]]
"""Workers of each role serve."""

OnServing = Callable[[ControlApi], Awaitable[None]]
"""The same of a fleet, with its controller."""


async def first_start(
    control: ControlApi,
    timeout_s: float,
    no_room: str,
    on_progress: OnProgress,
    on_enough: OnEnough | None = None,
) -> None:
    """Returns once every worker serves. With `on_enough`, which is called first, also when the time is over: whoever is
    still missing then is no error, and its controller goes on trying.

    Raises what no further try would change, and ClusterError once the time is over: `no_room` if some worker found
    none, else which ones are not ready.
    """
    report = await control.call(
        WaitStart(-1, timeout_s)
    )  # at once, but a controller's process has to start, too
    left_s, is_enough = timeout_s, False
    while report.failure is None:
        if on_enough is not None and not is_enough and not report.lacking:
            is_enough = True
            await on_enough()
        if not report.unready:
            return
        for name, progress in report.progress:
            on_progress(name, progress)
        try:
            async with awake_timeout(left_s) as timer:
                report = await control.call(WaitStart(report.version, _POLL_S))
            left_s = timer.left_s
        except TimeoutError:
            if not is_enough:
                raise ClusterError(_why(report, timeout_s, no_room)) from None
            logger.warning("the fleet serves, but not all of it: %s", _why(report, timeout_s, no_room))
            return
    raise report.failure.to_error()


def _why(report: StartReport, timeout_s: float, no_room: str) -> str:
    if report.placing:
        return f"{no_room}; waited {timeout_s:g} s"
    late = f"not every worker was ready within {timeout_s:g} s (cluster.start_timeout_s)"
    return "; ".join([late, *[f"{name}: {reason}" for name, reason in report.unready if reason]])
