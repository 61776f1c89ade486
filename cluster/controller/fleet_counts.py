"""How many workers there are to be, as the fleet's file says: it may change while the fleet runs."""

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
"""Nobody tells of a change: what Kubernetes mounts is exchanged by a link to another folder."""


async def scale_to(config: BatonConfig, before: BatonConfig, control: ControlApi) -> None:
    """As many workers of each role as one configuration says, where another one said otherwise.

    With autoscaling both say only where that begins, and nothing is done.
    """
    if config.autoscaling.mode == "on":
        return
    for role in WorkerRole:
        count = getattr(config.cluster, role.value)
        if count != getattr(before.cluster, role.value):
            logger.info("the fleet's file asks for %d workers to %s", count, role.value)
            await control.call(ScaleRole(role, count))


async def follow_counts(
    read: Callable[[], BatonConfig],
    config: BatonConfig,
    control: ControlApi,
    look_every_s: float = LOOK_EVERY_S,
) -> None:
    """Scales the fleet, which was begun with `config`, whenever `read` tells of other counts; runs until cancelled.

    Whatever else is different is said once: it counts when the fleet is begun anew. What cannot be done now is tried
    again.
    """
    done = seen = config
    while True:
        await asyncio.sleep(look_every_s)
        wanted = await asyncio.to_thread(read)
        if wanted is not seen:
            seen = wanted
            for difference in differences(config, wanted):
                logger.warning(
                    "the fleet's file has changed: %s; this counts when the fleet is started anew", difference
                )
        try:
            await scale_to(wanted, done, control)
        except BatonError as error:
            logger.warning("the fleet cannot be scaled as its file says, it is tried again: %s", error)
        else:
            done = wanted
