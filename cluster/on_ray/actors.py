"""Workers as Ray actors, behind typed handles; the only module that knows `ray.remote`.

`ray.remote` hides a class's types from checkers, so the class stays plain, is wrapped here once, and the one `Any` of
this package is the handle's actor.
"""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from baton.addresses import WILDCARDS
from baton.config import BatonConfig
from baton.curve import ClusterKeys
from baton.errors import BatonError, ClusterError
from baton.worker import StartProgress, WorkerEndpoint, WorkerRole, WorkerStatus
from cluster.on_ray.placement import Bundle

T = TypeVar("T")

# `wait` occupies one thread for the actor's whole life; the others answer status, drain and stop.
_ACTOR_THREADS = 4


class WorkerActor:
    """What runs inside the actor's process: a worker, and an event that ends with it."""

    def __init__(
        self, config: BatonConfig, keys: ClusterKeys, model_path: Path, role: WorkerRole, name: str
    ) -> None:
        self._config = config
        self._arguments = (keys, model_path, role, name)
        self._stopped = threading.Event()
        self._progress = Latest[StartProgress]()

    def start(self) -> WorkerEndpoint:
        # Not in the constructor, whose errors Ray reports as the actor's death; and imported here, so that the
        # driver, which only names this class, does not load torch.
        from cluster.worker_process import build_worker

        config = on_node(self._config, ray.util.get_node_ip_address())
        self._worker = build_worker(config, *self._arguments)
        try:
            return self._worker.start(self._progress.put)
        finally:
            self._progress.close()

    def next_progress(self) -> StartProgress | None:
        """Waits until `start` has got further than when last asked; None once it is over."""
        return self._progress.take()

    def status(self) -> WorkerStatus:
        return self._worker.status()

    def drain(self, timeout_s: float) -> bool:
        return self._worker.drain(timeout_s)

    def stop(self) -> None:
        self._worker.stop()
        self._stopped.set()

    def wait(self) -> None:
        """Returns once the worker was stopped; a process that dies instead fails this call at the caller."""
        self._stopped.wait()


class Latest(Generic[T]):
    """Hands the latest of many values from one thread to another; what nobody took in time is passed over."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._value: T | None = None
        self._is_closed = False

    def put(self, value: T) -> None:
        with self._changed:
            self._value = value
            self._changed.notify_all()

    def close(self) -> None:
        """Nothing follows."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def take(self) -> T | None:
        """The latest value since the last call, as soon as there is one; None after the last."""
        with self._changed:
            self._changed.wait_for(lambda: self._value is not None or self._is_closed)
            value, self._value = self._value, None
            return value


def on_node(config: BatonConfig, node_address: str) -> BatonConfig:
    """The configuration of a worker on one node: if it listens everywhere, others reach it where they reach its Ray."""
    network = config.network
    if network.advertise_host is not None or network.bind_host not in WILDCARDS:
        return config
    advertised = network.with_values("network", advertise_host=node_address)
    return config.model_copy(update={"network": advertised})


class WorkerHandle:
    """A worker's control plane, from the outside. Calls raise ClusterError, or what the worker itself raised."""

    def __init__(
        self,
        config: BatonConfig,
        keys: ClusterKeys,
        model_path: Path,
        role: WorkerRole,
        name: str,
        group: PlacementGroup,
        bundle_index: int,
        bundle: Bundle,
    ) -> None:
        self.role = role
        self.name = name
        self.has_started = False
        """Whether it ever served. Until then it has nothing to lose, nor may there be a process that could answer."""
        strategy = PlacementGroupSchedulingStrategy(
            placement_group=group, placement_group_bundle_index=bundle_index
        )
        remote_class: Any = ray.remote(WorkerActor)
        self._actor = remote_class.options(
            num_cpus=bundle["CPU"],
            num_gpus=bundle.get("GPU", 0.0),
            max_concurrency=_ACTOR_THREADS,
            scheduling_strategy=strategy,
        ).remote(config, keys, model_path, role, name)

    async def start(self, on_progress: Callable[[StartProgress], None]) -> WorkerEndpoint:
        """Loads the model and binds the ports, in the actor's process."""
        following = asyncio.create_task(self._follow(on_progress))
        try:
            endpoint: WorkerEndpoint = await self._call(self._actor.start.remote())
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
        self.has_started = True
        return endpoint

    async def _follow(self, on_progress: Callable[[StartProgress], None]) -> None:
        while (progress := await self._actor.next_progress.remote()) is not None:
            on_progress(progress)

    async def status(self) -> WorkerStatus:
        return await self._call(self._actor.status.remote())

    async def drain(self, timeout_s: float) -> bool:
        """Whether nothing was left to lose within the time."""
        return await self._call(self._actor.drain.remote(timeout_s))

    async def stop(self, timeout_s: float) -> None:
        """Ends the worker, then its process: gently within the time, else (or if it never served) by force.

        Never raises.
        """
        try:
            if self.has_started:
                async with asyncio.timeout(timeout_s):
                    await self._call(self._actor.stop.remote())
        except (TimeoutError, BatonError):
            pass
        finally:
            ray.kill(self._actor)

    async def wait(self) -> str:
        """Returns when the worker's process ends, with the reason in one line."""
        try:
            await self._actor.wait.remote()
        except RayActorError as error:
            return _one_line(error)
        return "it was stopped"

    async def _call(self, reference: Awaitable[T]) -> T:
        try:
            return await reference
        except RayTaskError as error:
            if isinstance(error.cause, BatonError):
                raise error.cause from None
            raise ClusterError(f"worker {self.name} failed: {error}") from None
        except RayError as error:
            raise ClusterError(f"worker {self.name} is gone: {_one_line(error)}") from None


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
