"""A fleet on Ray for the command that owns it: finds or begins the fleet, waits for it, and ends it."""

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

from ray.exceptions import RayError

from baton.config import BatonConfig
from baton.errors import BatonError, ClusterError
from baton.messages.control import ControlApi
from baton.system.awake_timer import awake_timeout
from baton.system.signals import unless
from cluster.control_api.calls import ControlClient
from cluster.control_api.owner import OnProgress, OnServing, first_start, scale_to
from cluster.controller.desired import worker_names
from cluster.on_ray.controller import OwnedController, begin_fleet, find_fleet
from cluster.on_ray.placement import bundle_of, check_room, labels_text, no_room
from cluster.on_ray.session import lost_process
from engine.loading.commit import with_commit
from engine.loading.dtype import with_chosen_dtype

logger = logging.getLogger(__name__)

_ABSENT_TIMEOUT_S = 5.0
_KILL_TIMEOUT_S = 5.0


class RayFleet:
    """See cluster.serve.owned_fleet.Fleet. Needs a connection to Ray."""

    def __init__(
        self, config: BatonConfig, digest: str, model_path: Path, say: Callable[[str], None]
    ) -> None:
        """`digest`: the digest of the cluster's keys. Each node derives the keys itself. `say` tells the user
        that a running fleet was adopted."""
        self._config = config
        self._digest = digest
        self._model_path = model_path
        self._say = say
        self._is_private = config.cluster.ray_address == "local"
        self._owned: OwnedController | None = None
        self._has_started = False

    async def start(self, on_progress: OnProgress, on_serving: OnServing | None = None) -> ControlClient:
        """Adopts a fleet of this name without an owner and scales it, or begins a new fleet."""
        owned = await find_fleet(self._config, self._digest, self._model_path)
        if owned is None:
            bundles = [bundle_of(self._config, role) for _, role in worker_names(self._config.cluster)]
            if self._is_private:
                check_room(bundles)
            # Computed now, while no worker takes up room.
            shortage = no_room(bundles) + labels_text(self._config)
            config = with_commit(with_chosen_dtype(self._config, self._model_path), self._model_path)
            self._owned = owned = begin_fleet(config, self._digest, self._model_path)
            timeout_s = self._config.cluster.start_timeout_s
            on_enough = on_serving and partial(self._on_enough, on_serving)
            await first_start(owned.control, timeout_s, shortage, on_progress, on_enough)
        else:
            self._say(
                f"took over the running fleet '{self._config.cluster.name}', which had no owner; its workers keep the "
                "`logging` and `gateway.max_in_flight` that they started with"
            )
            # A drain may take long. If a signal ends this command meanwhile, it ends the adopted fleet, too.
            self._owned, self._has_started = owned, True
            try:
                await scale_to(self._config, None, owned.control)
            except BatonError:  # the fleet still serves; another command may adopt it
                self._owned = None
                raise
            if on_serving is not None:
                await on_serving(owned.control)
        self._has_started = True
        return owned.control

    async def _on_enough(self, on_serving: OnServing, control: ControlApi) -> None:
        self._has_started = True
        await on_serving(control)

    async def end(self, hurry: asyncio.Event) -> None:
        if (owned := self._owned) is None or lost_process() is not None:
            return  # a private Ray whose process has ended takes no more calls; the rest ends with this command
        try:
            if not self._has_started or not await unless(hurry, owned.shutdown(may_drain=True)):
                async with awake_timeout(self._forced_end_s(owned)):
                    await owned.shutdown(may_drain=False)
        except (TimeoutError, ClusterError) as error:
            logger.debug("the controller did not end the fleet: %s", error)
        finally:
            try:
                owned.end()
            except RayError as error:  # Ray's head ended or restarted, and the fleet with it
                logger.debug("Ray did not end the rest of the fleet: %s", error)

    def _forced_end_s(self, owned: OwnedController) -> float:
        """How long the controller may take to end all workers; the rest is ended by force."""
        if owned.has_answered:
            return self._config.cluster.unresponsive_timeout_s + _KILL_TIMEOUT_S
        # The controller may have no process for minutes. A private Ray leaves nothing behind anyway.
        return 0.0 if self._is_private else _ABSENT_TIMEOUT_S
