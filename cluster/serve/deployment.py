"""Runs a deployment, which is one gateway and the fleet behind it, from its start to its end."""

import asyncio
import os
from collections.abc import Awaitable
from concurrent.futures import Future
from contextlib import AsyncExitStack, ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from baton.config import BatonConfig
from baton.system.curve import ClusterKeys, derive_keys
from baton.system.loading import Loading
from baton.system.secret import load_secret
from baton.system.signals import StopSignals, unless
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

if TYPE_CHECKING:
    from gateway import Tokenizer

A = TypeVar("A")
B = TypeVar("B")


def run_deployment(config: BatonConfig, screen: Screen, while_ready: WhileReady) -> None:
    """Starts everything, runs `while_ready`, and stops everything. A signal cancels the start or `while_ready`.

    Raises BatonError if the start fails, and KeyboardInterrupt for a signal before the event loop runs. In any case no
    process, port or shared memory is left.
    """
    with ExitStack() as stack:
        signals = stack.enter_context(StopSignals())
        check_owner(config, "serve")
        check_access(config)
        secret = load_secret(config.network, os.environ, may_create=True)
        keys = derive_keys(secret)
        config, model_path = resolve_model(config, screen)
        fleet = make_fleet(config, secret, model_path, screen, stack)
        # Loading begins only once Ray runs: otherwise Ray's start would wait for the interpreter's lock. From
        # now on, this process only waits for workers.
        loading = stack.push(Loading(partial(load_tokenizer, config, model_path)))
        loading.begin()
        signals.run(_run(config, keys, model_path, fleet, loading.result, screen, while_ready, signals))


async def _run(
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
            control, tokenizer = await _both(
                fleet.start(
                    lambda name, progress: stage.report(name, progress.what, progress.done / progress.count)
                ),
                asyncio.wrap_future(loading),
            )
            agreed = await with_choices_of(control, config, model_path, screen)
            folder = await asyncio.to_thread(fleets_folder, agreed, model_path, screen)
            if folder != model_path:
                tokenizer = await asyncio.to_thread(load_tokenizer, agreed, folder)
            gateway = make_gateway(agreed, keys, folder, tokenizer, control)
            is_beside_controller = config.cluster.ray_address == "none"
            following = FollowingGateway(agreed, gateway, control, is_beside_controller=is_beside_controller)
            ending.push_async_callback(following.stop, signals.hurry)
            service = await following.start()
            stage(workers_text(service.endpoints))
        await following.use(while_ready(service))

    async with (
        AsyncExitStack() as ending
    ):  # all of it, in reverse order, even if the screen cannot be written
        ending.push_async_callback(fleet.end, signals.hurry)
        try:
            await unless(signals.stop, start_and_use())
        finally:
            ending.callback(screen.line, "stopping", stopping_text(config))


async def _both(one: Awaitable[A], other: Awaitable[B]) -> tuple[A, B]:
    """The results of both. As soon as one fails, raises its error, and cancels the other one."""
    tasks = asyncio.ensure_future(one), asyncio.ensure_future(other)
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
