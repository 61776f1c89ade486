"""Deployment: one gateway and the fleet behind it, from nothing to ready and back to nothing."""

import asyncio
import os
from collections import Counter
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from baton.clock import SystemClock
from baton.config import BatonConfig
from baton.curve import ClusterKeys, derive_keys
from baton.worker import WorkerEndpoint, WorkerRole
from cluster.fleet.desired import worker_names
from cluster.fleet.first_start import OnProgress
from cluster.fleet.follower import Follower, ReportSink, ViewSource, keep_reporting
from cluster.fleet.spec import served_model
from cluster.loading import Loading
from cluster.process_fleet import ProcessFleet
from cluster.screen import Screen
from cluster.secret import load_secret
from cluster.signals import StopSignals, unless
from engine.loading.pretrained import default_cache_dir, resolve
from gateway import Gateway, Tokenizer
from gateway.fleet_control import FleetControl


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
        secret = load_secret(config.network, os.environ, may_create=True)
        keys = derive_keys(secret)
        model_path = _resolve_model(config, screen)
        # Importing what reads a tokenizer takes seconds, most of which Ray's start leaves unused.
        loading = stack.enter_context(Loading(lambda: Tokenizer(model_path)))
        if config.cluster.ray_address == "none":
            fleet: Fleet = ProcessFleet(config, secret, model_path)
        else:
            fleet = _fleet_on_ray(config, keys, model_path, screen, stack)
        deployment = _Deployment(config, keys, model_path, fleet, loading.result)
        signals.run(_run(deployment, config, screen, while_ready, signals))


def _fleet_on_ray(
    config: BatonConfig, keys: ClusterKeys, model_path: Path, screen: Screen, stack: ExitStack
) -> "Fleet":
    """Connected until the stack is left."""
    from cluster.on_ray.fleet import RayFleet  # not above: a machine may do without Ray
    from cluster.on_ray.session import connect

    address = config.cluster.ray_address
    with screen.stage("ray", f"connecting to {address}") as outcome:
        stack.enter_context(connect(config.cluster, most_ranks(config), config.engine.device))
        outcome("private, loopback only" if address == "local" else f"joined {address}")
    return RayFleet(config, keys, model_path)


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
        await deployment.use(while_ready(service))

    try:
        await unless(signals.stop, start_and_use())
    finally:
        grace_s = config.cluster.drain_timeout_s
        screen.line("stopping", f"running requests have {grace_s:g} s to end; Ctrl-C again cuts them off")
        await deployment.stop(signals.hurry)


class Control(FleetControl, ViewSource, ReportSink, Protocol):
    """What a gateway needs of a fleet's controller, wherever that runs."""


class Fleet(Protocol):
    """Workers and their controller: on Ray, or child processes of this one. `end` is right whatever `start` did."""

    async def start(self, on_progress: OnProgress) -> Control:
        """Returns once every worker serves; raises BatonError if that cannot be."""
        ...

    async def end(self, hurry: asyncio.Event) -> None:
        """Workers have a bounded time to give away what they have, unless `hurry` is set; then nothing is left."""
        ...


class _Deployment:
    """A gateway, and the fleet that it follows. `stop` is right whatever `start` did."""

    def __init__(
        self,
        config: BatonConfig,
        keys: ClusterKeys,
        model_path: Path,
        fleet: Fleet,
        loading: Future[Tokenizer],
    ) -> None:
        self._config = config
        self._keys = keys
        self._model_path = model_path
        self._fleet = fleet
        self._loading = loading
        self._gateway: Gateway | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, on_progress: OnProgress) -> Service:
        """Opens the door once the workers serve and the tokenizer is there."""
        control = await self._fleet.start(on_progress)
        self._gateway = gateway = Gateway(
            self._config.gateway,
            self._config.network,
            self._keys.request,
            self._keys.prefix,
            self._config.kv_transfer.load_failure_policy,
            served_model(self._config, self._model_path),
            await asyncio.wrap_future(self._loading),
            SystemClock(),
            control,
        )
        await gateway.start()
        follower = Follower(control, gateway)
        endpoints = await follower.catch_up(0.0)
        await asyncio.gather(*[gateway.wait_for_worker(endpoint.ref.name) for endpoint in endpoints])
        self._tasks.append(asyncio.create_task(follower.run(), name="follow the fleet"))
        scaling = self._config.autoscaling
        if scaling.mode != "off":
            report = partial(gateway.report, scaling.grow_after_s)
            reporting = keep_reporting(control, report, scaling.interval_s)
            self._tasks.append(asyncio.create_task(reporting, name="report to the fleet"))
        return Service(f"{self._config.gateway.host}:{gateway.grpc_port}", endpoints)

    async def use(self, work: Awaitable[None]) -> None:
        """Returns when `work` does; FleetEnded if the fleet ends first."""
        working = asyncio.ensure_future(work)
        try:
            await asyncio.wait([working, *self._tasks], return_when=asyncio.FIRST_COMPLETED)
            for task in (working, *self._tasks):
                if task.done():
                    task.result()
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)

    async def stop(self, hurry: asyncio.Event) -> None:
        """No new requests; running ones get their time unless `hurry` is set; then nothing is left."""
        if self._gateway is not None:
            grace_s = self._config.cluster.drain_timeout_s
            if not await unless(hurry, self._gateway.stop(grace_s)):
                await self._gateway.stop(0.0)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._fleet.end(hurry)


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
