"""Deployment: one gateway and the fleet behind it, from nothing to ready and back to nothing."""

import asyncio
import os
from collections.abc import Awaitable
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path

from baton.config import BatonConfig
from baton.system.curve import ClusterKeys, derive_keys
from baton.system.loading import Loading
from baton.system.secret import load_secret
from baton.system.signals import StopSignals, unless
from cluster.controller.first_start import OnProgress
from cluster.serve.following_gateway import FollowingGateway, Service, WhileReady, stopping_text
from cluster.serve.gateway import check_access, make_gateway
from cluster.serve.owned_fleet import Fleet, check_owner, fleet_text, make_fleet, resolve_model
from cluster.serve.screen import Screen, workers_text
from gateway import Tokenizer


def run_deployment(config: BatonConfig, screen: Screen, while_ready: WhileReady) -> None:
    """Starts everything, runs `while_ready`, stops everything; a signal cancels whichever is under way but the last.

    Raises BatonError if it could not start, KeyboardInterrupt if SIGINT comes before there is a loop. Either way no
    process, port or shared memory is left.
    """
    with ExitStack() as stack:
        signals = stack.enter_context(StopSignals())
        check_owner(config, "serve")
        check_access(config)
        secret = load_secret(config.network, os.environ, may_create=True)
        keys = derive_keys(secret)
        model_path = resolve_model(config, screen)
        # Importing what reads a tokenizer takes seconds, most of which Ray's start leaves unused.
        loading = stack.push(Loading(lambda: Tokenizer(model_path)))
        loading.begin()
        fleet = make_fleet(config, secret, model_path, screen, stack)
        deployment = _Deployment(config, keys, model_path, fleet, loading.result)
        signals.run(_run(deployment, config, screen, while_ready, signals))


async def _run(
    deployment: "_Deployment",
    config: BatonConfig,
    screen: Screen,
    while_ready: WhileReady,
    signals: StopSignals,
) -> None:
    async def start_and_use() -> None:
        with screen.stage("workers", f"starting {fleet_text(config)}") as stage:
            service = await deployment.start(
                lambda name, progress: stage.report(name, progress.what, progress.done / progress.count)
            )
            stage(workers_text(service.endpoints))
        await deployment.use(while_ready(service))

    try:
        await unless(signals.stop, start_and_use())
    finally:
        screen.line("stopping", stopping_text(config))
        await deployment.stop(signals.hurry)


class _Deployment:
    """A fleet, and a gateway that follows it. `stop` is right whatever `start` did."""

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
        self._gateway: FollowingGateway | None = None

    async def start(self, on_progress: OnProgress) -> Service:
        """Opens the gateway once the workers serve and the tokenizer is loaded."""
        control = await self._fleet.start(on_progress)
        tokenizer = await asyncio.wrap_future(self._loading)
        gateway = make_gateway(self._config, self._keys, self._model_path, tokenizer, control)
        self._gateway = FollowingGateway(self._config, gateway, control, is_owner=True)
        return await self._gateway.start()

    async def use(self, work: Awaitable[None]) -> None:
        """Returns when `work` does; FleetEnded if the fleet ends first."""
        assert self._gateway is not None
        await self._gateway.use(work)

    async def stop(self, hurry: asyncio.Event) -> None:
        """No new requests; running ones get their time unless `hurry` is set; then nothing is left."""
        if self._gateway is not None:
            await self._gateway.stop(hurry)
        await self._fleet.end(hurry)
