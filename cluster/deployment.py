"""Deployment: Ray, one gateway and the fleet behind it, from nothing to ready and back to nothing."""

import asyncio
import logging
import os
from collections import Counter
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from baton.clock import SystemClock
from baton.config import BatonConfig
from baton.curve import ClusterKeys, derive_keys
from baton.errors import ClusterError
from baton.worker import WorkerEndpoint, WorkerRole
from cluster.fleet.desired import worker_names
from cluster.fleet.first_start import OnProgress, first_start
from cluster.fleet.follower import Follower, keep_reporting
from cluster.fleet.spec import served_model
from cluster.loading import Loading
from cluster.on_ray.controller import ControllerHandle, begin_fleet, find_fleet
from cluster.on_ray.placement import bundle_of, check_room, labels_text, no_room
from cluster.on_ray.session import connect
from cluster.screen import Screen
from cluster.secret import load_secret
from cluster.signals import StopSignals, unless
from engine.loading.pretrained import default_cache_dir, resolve
from gateway import Gateway, Tokenizer

logger = logging.getLogger(__name__)

_ABSENT_TIMEOUT_S = 5.0
_KILL_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Service:
    """A deployment that answers requests."""

    target: str
    """Where its gRPC listens, as `host:port`."""
    endpoints: tuple[WorkerEndpoint, ...]


WhileReady = Callable[[Service], Awaitable[None]]


def run_deployment(config: BatonConfig, screen: Screen, while_ready: WhileReady) -> None:
    """Starts everything, runs `while_ready`, stops everything; a signal cancels whichever is under way but the last.

    Raises BatonError if it could not start, KeyboardInterrupt if SIGINT comes before there is a loop. Either way no
    process, port or shared memory is left.
    """
    with ExitStack() as stack:
        signals = stack.enter_context(StopSignals())
        keys = derive_keys(load_secret(config.network, os.environ, may_create=True))
        model_path = _resolve_model(config, screen)
        # Importing what reads a tokenizer takes seconds, most of which Ray's start leaves unused.
        loading = stack.enter_context(Loading(lambda: Tokenizer(model_path)))
        with screen.stage("ray", f"connecting to {config.cluster.ray_address}") as outcome:
            stack.enter_context(connect(config.cluster, most_ranks(config), config.engine.device))
            is_private = config.cluster.ray_address == "local"
            outcome("private, loopback only" if is_private else f"joined {config.cluster.ray_address}")
        deployment = _Deployment(config, keys, model_path, loading.result)
        signals.run(_run(deployment, config, screen, while_ready, signals))


async def _run(
    deployment: "_Deployment",
    config: BatonConfig,
    screen: Screen,
    while_ready: WhileReady,
    signals: StopSignals,
) -> None:
    async def start_and_use() -> None:
        with screen.stage("workers", f"starting {_fleet_text(config)}") as stage:
            service = await deployment.start(
                lambda name, progress: stage.report(name, progress.what, progress.done / progress.count)
            )
            stage(_workers_text(service))
        await while_ready(service)

    try:
        await unless(signals.stop, start_and_use())
    finally:
        grace_s = config.cluster.drain_timeout_s
        screen.line("stopping", f"running requests have {grace_s:g} s to end; Ctrl-C again cuts them off")
        await deployment.stop(signals.hurry)


class _Deployment:
    """A gateway, and a handle to the fleet that it follows. `stop` is right whatever `start` did."""

    def __init__(
        self,
        config: BatonConfig,
        keys: ClusterKeys,
        model_path: Path,
        loading: Future[Tokenizer],
    ) -> None:
        self._config = config
        self._keys = keys
        self._model_path = model_path
        self._loading = loading
        self._fleet: ControllerHandle | None = None
        self._gateway: Gateway | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, on_progress: OnProgress) -> Service:
        """Opens the door once the workers serve and the tokenizer is there."""
        fleet = await find_fleet(self._config, self._keys, self._model_path)
        if fleet is None:
            bundles = [bundle_of(self._config, role) for _, role in worker_names(self._config)]
            if self._config.cluster.ray_address == "local":
                check_room(bundles)
            shortage = no_room(bundles) + labels_text(
                self._config
            )  # as it would be said now, before there are workers
            self._fleet = fleet = begin_fleet(self._config, self._keys, self._model_path)
            await first_start(fleet, self._config.cluster.start_timeout_s, shortage, on_progress)
        self._fleet = fleet
        self._gateway = gateway = Gateway(
            self._config.gateway,
            self._config.network,
            self._keys.request,
            self._keys.prefix,
            self._config.kv_transfer.load_failure_policy,
            served_model(self._config, self._model_path),
            await asyncio.wrap_future(self._loading),
            SystemClock(),
            fleet,
        )
        await gateway.start()
        follower = Follower(fleet, gateway)
        endpoints = await follower.catch_up(0.0)
        await asyncio.gather(*[gateway.wait_for_worker(endpoint.ref.name) for endpoint in endpoints])
        self._tasks.append(asyncio.create_task(follower.run(), name="follow the fleet"))
        scaling = self._config.autoscaling
        if scaling.mode != "off":
            report = partial(gateway.report, scaling.grow_after_s)
            reporting = keep_reporting(fleet, report, scaling.interval_s)
            self._tasks.append(asyncio.create_task(reporting, name="report to the fleet"))
        return Service(f"{self._config.gateway.host}:{gateway.grpc_port}", endpoints)

    async def stop(self, hurry: asyncio.Event) -> None:
        """No new requests; running ones get their time unless `hurry` is set; then nothing is left."""
        if self._gateway is not None:
            grace_s = self._config.cluster.drain_timeout_s
            if not await unless(hurry, self._gateway.stop(grace_s)):
                await self._gateway.stop(0.0)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._fleet is not None:
            await self._end(self._fleet, hurry)

    async def _end(self, fleet: ControllerHandle, hurry: asyncio.Event) -> None:
        try:
            if not self._tasks or not await unless(hurry, fleet.shutdown(may_drain=True)):
                async with asyncio.timeout(self._forced_end_s(fleet)):
                    await fleet.shutdown(may_drain=False)
        except (TimeoutError, ClusterError) as error:
            logger.debug("the controller did not end the fleet: %s", error)
        finally:
            fleet.end()

    def _forced_end_s(self, fleet: ControllerHandle) -> float:
        """What the controller gets to end all workers in; what is left then is ended by force."""
        cluster = self._config.cluster
        if fleet.has_answered:
            return cluster.unresponsive_timeout_s + _KILL_TIMEOUT_S
        # It may have no process yet, and take minutes to get one. On a private Ray nothing of it can be left behind.
        return 0.0 if cluster.ray_address == "local" else _ABSENT_TIMEOUT_S


def most_ranks(config: BatonConfig) -> int:
    """Of all workers together, as many as there may ever be at once."""
    workers = Counter(role for _, role in worker_names(config))
    if config.autoscaling.mode == "on":
        workers = Counter({role: config.worker_bounds(role)[1] for role in WorkerRole})
    return sum(config.num_ranks(role) * count for role, count in workers.items())


def _resolve_model(config: BatonConfig, screen: Screen) -> Path:
    with screen.bar() as progress:
        path = resolve(config.model.path, default_cache_dir(os.environ), progress)
    screen.line("model", f"{path} in {config.model.dtype}")
    return path


def _fleet_text(config: BatonConfig) -> str:
    return f"{config.cluster.prefill} prefill and {config.cluster.decode} decode on {config.engine.device}"


def _workers_text(service: Service) -> str:
    return ", ".join(f"{e.ref.name} ({e.role.value}, pid {e.pid})" for e in service.endpoints)
