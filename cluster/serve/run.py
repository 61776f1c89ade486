"""Runs a fleet from its start to its end: a deployment, with one gateway, or a fleet for gateways elsewhere."""

import asyncio
import os
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from baton.config import BatonConfig
from baton.messages.control import ControlApi, WaitView
from baton.system.curve import ClusterKeys, PlaneKeys, derive_fleet_keys, derive_keys
from baton.system.loading import Loading
from baton.system.secret import load_secret
from baton.system.signals import StopSignals, either, unless
from baton.system.tasks import end_tasks
from baton.worker import WorkerEndpoint
from cluster.control_api.owner import follow_counts
from cluster.control_api.server import FIRST_VIEW_S, ControlServer
from cluster.controller.desired import worker_names
from cluster.serve.following_gateway import FollowingGateway, WhileReady, stopping_text
from cluster.serve.gateway import check_access, load_tokenizer, make_gateway
from cluster.serve.owned_fleet import (
    Fleet,
    check_owner,
    fleet_text,
    fleets_folder,
    make_fleet,
    resolve_model,
    with_choices_of,
)
from cluster.serve.screen import Screen, workers_text
from engine.lent_cpus import remove_unused_files

if TYPE_CHECKING:
    from gateway import Tokenizer

_FAREWELL_S = 1.0
"""The time that gateways get to notice the fleet's end. After an answer, they call WaitView again at once; after an
error, a second later."""

A = TypeVar("A")
B = TypeVar("B")


def run_deployment(config: BatonConfig, screen: Screen, while_ready: WhileReady) -> None:
    """Starts everything, runs `while_ready`, and stops everything. A signal cancels the start or `while_ready`.

    Raises BatonError if the start fails, and KeyboardInterrupt for a signal before the event loop runs. In any case no
    process, port or shared memory remains, except for an adopted fleet that could not be scaled (`Fleet.end`).
    """
    with ExitStack() as stack:
        signals = stack.enter_context(StopSignals())
        check_owner(config, "serve")
        check_access(config)
        secret = load_secret(config.network, os.environ, may_create=True)
        keys = derive_keys(secret)
        config, model_path = resolve_model(config, screen)
        stack.callback(remove_unused_files)  # runs last: a worker killed while loading may have left some
        fleet = make_fleet(config, secret, model_path, screen, stack)
        # Loading begins only after Ray has started: otherwise Ray's start would wait for the interpreter's lock. From
        # now on, this process only waits for workers.
        loading = stack.push(Loading(partial(load_tokenizer, config, model_path)))
        loading.begin()
        signals.run(
            _run_deployment(config, keys, model_path, fleet, loading.result, screen, while_ready, signals)
        )


async def _run_deployment(
    config: BatonConfig,
    keys: ClusterKeys,
    model_path: Path,
    fleet: Fleet,
    loading: "Future[Tokenizer]",
    screen: Screen,
    while_ready: WhileReady,
    signals: StopSignals,
) -> None:
    async def start_and_use() -> None:
        """Opens the gateway once the workers serve and the tokenizer is loaded."""
        with screen.stage("workers", f"starting {fleet_text(config)}") as stage:
            control, tokenizer = await _both(fleet.start(stage.report), asyncio.wrap_future(loading))
            agreed = await with_choices_of(control, config, model_path, screen)
            folder = await asyncio.to_thread(fleets_folder, agreed, model_path, screen)
            if folder != model_path:
                tokenizer = await asyncio.to_thread(load_tokenizer, agreed, folder)
            gateway = make_gateway(agreed, keys, folder, tokenizer, control)
            is_beside_controller = config.cluster.ray_address == "none"
            following = FollowingGateway(agreed, gateway, control, is_beside_controller=is_beside_controller)
            ending.push_async_callback(following.stop, signals.hurry)
            service = await following.start()
            ending.callback(screen.line, "stopping", stopping_text(config))
            stage(workers_text(service.endpoints))
        await following.use(while_ready(service))

    async with AsyncExitStack() as ending:  # in reverse order, even if the screen cannot be written
        ending.push_async_callback(fleet.end, signals.hurry)
        await unless(signals.stop, start_and_use())


async def _both(one: Awaitable[A], other: Awaitable[B]) -> tuple[A, B]:
    """The results of `one` and `other`. As soon as one fails, raises its error, and cancels the other."""
    tasks = asyncio.ensure_future(one), asyncio.ensure_future(other)
    try:
        return await asyncio.gather(*tasks)
    finally:
        await end_tasks(*tasks)


@dataclass(frozen=True, slots=True)
class OpenFleet:
    """A fleet that serves gateways."""

    address: str
    """HOST:PORT of the control server, as others reach it."""
    endpoints: tuple[WorkerEndpoint, ...]


WhileOpen = Callable[[OpenFleet], Awaitable[None]]


def run_fleet(
    config: BatonConfig, screen: Screen, while_open: WhileOpen, reread: Callable[[], BatonConfig]
) -> None:
    """Starts a fleet, or adopts one without an owner, and ends it after `while_open` or a signal.

    `reread` returns the current configuration. This function calls `reread` every few seconds, and scales the
    fleet to the worker counts of that configuration.

    Raises BatonError if the start fails, FleetEnded if the fleet ends by itself, and KeyboardInterrupt for a signal
    before the event loop runs. In every case, no process of the fleet remains, except for an adopted fleet that could
    not be scaled (`Fleet.end`).
    """
    with ExitStack() as stack:
        signals = stack.enter_context(StopSignals())
        check_owner(config, "fleet")
        secret = load_secret(config.network, os.environ, may_create=True)
        config, model_path = resolve_model(config, screen)
        stack.callback(remove_unused_files)  # runs last: a worker killed while loading may have left some
        fleet = make_fleet(config, secret, model_path, screen, stack)
        keys = derive_fleet_keys(secret)
        signals.run(_run_fleet(config, keys, fleet, screen, while_open, reread, signals))


async def _run_fleet(
    config: BatonConfig,
    keys: PlaneKeys | None,
    fleet: Fleet,
    screen: Screen,
    while_open: WhileOpen,
    reread: Callable[[], BatonConfig],
    signals: StopSignals,
) -> None:
    # The port is bound before the workers start, which takes minutes: a port in use is an error at once.
    server = ControlServer(config.network, config.cluster.fleet_port, keys)
    server.open()

    async def start_and_serve() -> None:
        with screen.stage("workers", f"starting {fleet_text(config)}") as stage:

            async def open_to_gateways(control: ControlApi) -> None:
                ending.callback(screen.line, "stopping", ending_text)
                endpoints = (await server.serve(control)).endpoints
                if (num_missing := len(worker_names(config.cluster)) - len(endpoints)) > 0:
                    stage.note(
                        f"{workers_text(endpoints)} serve at {server.address}; {num_missing} more are starting"
                    )

            control = await fleet.start(stage.report, open_to_gateways)
            view = await control.call(WaitView("", -1, FIRST_VIEW_S))
            stage(workers_text(view.endpoints))
        await either(
            while_open(OpenFleet(server.address, view.endpoints)),
            server.until_ended(),
            follow_counts(reread, config, control),
        )

    async def close_server() -> None:
        await server.close(0.0 if signals.hurry.is_set() else _FAREWELL_S)

    ending_text = f"ending the fleet; its workers have {config.cluster.drain_timeout_s:g} s to end"
    async with AsyncExitStack() as ending:  # in reverse order, even if the screen cannot be written
        ending.push_async_callback(close_server)
        ending.push_async_callback(fleet.end, signals.hurry)
        await unless(signals.stop, start_and_serve())
