"""What a fleet's owner does with its control API: waits for the first start, and scales to the configured counts."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from baton.config import BatonConfig
from baton.errors import BatonError, ClusterError
from baton.messages.control import ControlApi, ScaleRole, StartReport, WaitStart
from baton.system.awake_timer import awake_timeout
from baton.worker import StartProgress, WorkerRole
from cluster.control_api.configuration import differences

logger = logging.getLogger(__name__)

CHECK_EVERY_S = 2.0
"""Pause between two readings of the configuration file. The file is polled, since Kubernetes replaces mounted files by
switching a symbolic link."""

_POLL_S = 5.0

OnProgress = Callable[[str, StartProgress], None]
"""Called with a worker's name and the progress of its start."""

OnServing = Callable[[ControlApi], Awaitable[None]]
"""Called with the fleet's control API once workers of each role serve."""


async def first_start(
    control: ControlApi,
    timeout_s: float,
    no_room: str,
    on_progress: OnProgress,
    on_serving: OnServing | None = None,
) -> None:
    """Returns once every worker serves.

    Raises an error at once if every other try would fail in the same way. Once `on_serving` was called, only logs such
    an error as a warning. After `timeout_s`, returns if `on_serving` was called, since the controller keeps trying to
    start the missing workers; otherwise raises ClusterError. The message is `no_room` if a worker found no room, else
    the list of workers that are not ready.
    """
    report = await control.call(WaitStart(-1, timeout_s))  # waits only for the controller's process to start
    left_s, is_enough, is_warned = timeout_s, False, False
    while True:
        if report.failure is not None and not is_enough:
            raise report.failure.to_error()
        if report.failure is not None and not is_warned:
            is_warned = True
            logger.warning(
                "the fleet serves, but a worker does not start; the controller keeps trying: %s",
                report.failure.reason,
            )
        if on_serving is not None and not is_enough and not report.lacking:
            is_enough = True
            await on_serving(control)
        if not report.unready:
            return
        for name, progress in report.progress:
            on_progress(name, progress)
        try:
            async with awake_timeout(left_s) as timer:
                report = await control.call(WaitStart(report.version, _POLL_S))
            left_s = timer.remaining_s
        except TimeoutError:
            if not is_enough:
                raise ClusterError(_why(report, timeout_s, no_room)) from None
            logger.warning(
                "the fleet serves, but some workers are missing: %s", _why(report, timeout_s, no_room)
            )
            return


def _why(report: StartReport, timeout_s: float, no_room: str) -> str:
    if report.placing:
        return f"{no_room}; waited {timeout_s:g} s"
    late = f"not every worker was ready within {timeout_s:g} s (cluster.start_timeout_s)"
    return "; ".join([late, *[f"{name}: {reason}" for name, reason in report.unready if reason]])


async def scale_to(config: BatonConfig, before: BatonConfig | None, control: ControlApi) -> None:
    """Sets the worker count of each role whose count differs from `before`; of every role if `before` is None.

    With `autoscaling.mode: on`, it does nothing: the configuration then has only the initial counts.
    """
    if config.autoscaling.mode == "on":
        return
    for role in WorkerRole:
        count = config.num_workers(role)
        if before is None or count != before.num_workers(role):
            logger.info("the configuration asks for %d %s workers", count, role.value)
            await control.call(ScaleRole(role, count))


async def follow_counts(read: Callable[[], BatonConfig], config: BatonConfig, control: ControlApi) -> None:
    """Scales the fleet whenever `read` returns other counts. Runs until cancelled.

    `config`: the configuration with which this command started the fleet or took it over.

    When the file changes, logs how it differs from `config` in other keys, such as those in `autoscaling`: these
    changes take effect when the fleet is started again. A failed call is retried.
    """
    done = seen = config
    while True:
        await asyncio.sleep(CHECK_EVERY_S)
        wanted = await asyncio.to_thread(read)
        if wanted is not seen:
            seen = wanted
            places = ("in this command's configuration", "in the file")
            for difference in differences(config, wanted, is_one_file=True, places=places):
                logger.warning(
                    "the configuration file has changed: %s; restart the fleet to apply this",
                    difference,
                )
        try:
            as_started = wanted.model_copy(update={"autoscaling": config.autoscaling})
            await scale_to(as_started, done, control)
        except BatonError as error:
            logger.warning(
                "could not scale the fleet to the counts in its configuration file; retrying: %s", error
            )
        else:
            done = wanted
