"""Scales a running fleet when the worker counts in its configuration file change."""

import asyncio
import logging
from collections.abc import Callable

from baton.config import BatonConfig
from baton.errors import BatonError
from baton.messages.control import ControlApi, ScaleRole
from baton.worker import WorkerRole
from cluster.controller.desired import differences

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 2.0
"""The file is polled: Kubernetes replaces mounted files by switching a symbolic link."""


async def scale_to(config: BatonConfig, before: BatonConfig | None, control: ControlApi) -> None:
    """Sets the worker count of each role whose count differs from `before`; of every role if `before` is None.

    With `autoscaling.mode: on`, it does nothing: the configuration then has only the initial counts.
    """
    if config.autoscaling.mode == "on":
        return
    for role in WorkerRole:
        count = getattr(config.cluster, role.value)
        if before is None or count != getattr(before.cluster, role.value):
            logger.info("the configuration asks for %d %s workers", count, role.value)
            await control.call(ScaleRole(role, count))


async def follow_counts(
    read: Callable[[], BatonConfig],
    config: BatonConfig,
    control: ControlApi,
    look_every_s: float = LOOK_EVERY_S,
) -> None:
    """Scales the fleet, which was started with `config`, whenever `read` returns other counts. Runs until cancelled.

    When the file changes, logs all other differences: they take effect when the fleet is started again. A
    failed call is retried.
    """
    done = seen = config
    while True:
        await asyncio.sleep(look_every_s)
        wanted = await asyncio.to_thread(read)
        if wanted is not seen:
            seen = wanted
            for difference in differences(config, wanted):
                logger.warning(
                    "the configuration file has changed: %s; restart the fleet to apply this",
                    difference,
                )
        try:
            await scale_to(wanted, done, control)
        except BatonError as error:
            logger.warning(
                "could not scale the fleet to the counts in its configuration file; retrying: %s", error
            )
        else:
            done = wanted
