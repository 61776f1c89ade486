"""Supervisor: starts the fleet's workers in parallel, watches every one, and stops them in order; sees no request."""

import asyncio
import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

from ray.util.placement_group import PlacementGroup, remove_placement_group

from baton.config import BatonConfig
from baton.curve import ClusterKeys
from baton.errors import BatonError, ClusterError
from baton.worker import StartProgress, WorkerEndpoint
from cluster.fleet.desired import worker_names
from cluster.on_ray.actors import WorkerHandle
from cluster.on_ray.placement import bundle_of, reserve
from cluster.signals import unless

logger = logging.getLogger(__name__)

_STOP_TIMEOUT_S = 5.0
"""A worker that does not close its ports in this time is killed."""


OnProgress = Callable[[str, StartProgress], None]
"""Of which worker, and how far it is."""


class Registry(Protocol):
    """Who wants to know the workers: the gateway."""

    def add_worker(self, endpoint: WorkerEndpoint) -> None: ...

    async def wait_for_worker(self, name: str) -> None: ...

    def remove_worker(self, name: str, reason: str) -> None: ...


class Supervisor:
    """Owns the workers of one fleet from their placement to their end. A dead worker is reported, not replaced."""

    def __init__(self, config: BatonConfig, keys: ClusterKeys, model_path: Path) -> None:
        self._config = config
        self._keys = keys
        self._model_path = model_path
        self._group: PlacementGroup | None = None
        self._handles: list[WorkerHandle] = []
        self._watchers: list[asyncio.Task[None]] = []

    async def start(self, on_progress: OnProgress) -> tuple[WorkerEndpoint, ...]:
        """Returns once every worker serves. Raises ClusterError, or what the first failing worker raised.

        Call `stop` either way.
        """
        timeout_s = self._config.cluster.start_timeout_s
        names = worker_names(self._config)
        bundles = [bundle_of(self._config, role) for _, role in names]
        may_grow = self._config.cluster.ray_address != "local"
        self._group = await reserve(bundles, timeout_s, may_grow)
        self._handles = [
            WorkerHandle(
                self._config, self._keys, self._model_path, role, name, self._group, index, bundles[index]
            )
            for index, (name, role) in enumerate(names)
        ]
        try:
            async with asyncio.timeout(timeout_s):
                return tuple(
                    await asyncio.gather(*[self._start(handle, on_progress) for handle in self._handles])
                )
        except TimeoutError:
            raise ClusterError(
                f"not every worker was ready within {timeout_s:g} s (cluster.start_timeout_s)"
            ) from None

    async def publish(self, endpoints: Iterable[WorkerEndpoint], registry: Registry) -> None:
        """Registers the workers and watches them from here on; returns when all can be given requests.

        Raises what the registry raises of a worker that it cannot talk to.
        """
        for endpoint in endpoints:
            registry.add_worker(endpoint)
        for handle in self._handles:
            watcher = asyncio.create_task(self._watch(handle, registry), name=f"watch {handle.name}")
            self._watchers.append(watcher)
        await asyncio.gather(*[registry.wait_for_worker(handle.name) for handle in self._handles])

    async def stop(self, hurry: asyncio.Event) -> None:
        """Drains all workers at once, for a bounded time or until `hurry` is set; then nothing of them is left."""
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
        serving = [handle for handle in self._handles if handle.has_started]
        await unless(hurry, asyncio.gather(*[self._drain(handle) for handle in serving]))
        await asyncio.gather(*[handle.stop(_STOP_TIMEOUT_S) for handle in self._handles])
        if self._group is not None:
            remove_placement_group(self._group)

    async def _start(self, handle: WorkerHandle, on_progress: OnProgress) -> WorkerEndpoint:
        return await handle.start(lambda progress: on_progress(handle.name, progress))

    async def _watch(self, handle: WorkerHandle, registry: Registry) -> None:
        reason = await handle.wait()
        logger.error("worker %s (%s) died: %s", handle.name, handle.role.value, reason)
        registry.remove_worker(handle.name, reason)

    async def _drain(self, handle: WorkerHandle) -> None:
        timeout_s = self._config.cluster.drain_timeout_s
        try:
            if not await handle.drain(timeout_s):
                logger.warning("worker %s still had work after %g s of draining", handle.name, timeout_s)
        except BatonError as error:  # dead: nothing to wait for
            logger.debug("worker %s cannot drain: %s", handle.name, error)
