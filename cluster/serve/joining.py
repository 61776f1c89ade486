"""Runs one more gateway for a running fleet: finds the fleet, follows it, and leaves it running."""

import asyncio
import os
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from baton.config import BatonConfig
from baton.errors import ClusterError, ConfigError, FleetEnded
from baton.hub_name import leaves_revision_open
from baton.messages.control import ControlApi, GetConfiguration
from baton.system.awake_timer import awake_timeout
from baton.system.curve import ClusterKeys, derive_fleet_keys, derive_keys
from baton.system.loading import Loading
from baton.system.secret import load_secret
from baton.system.signals import StopSignals, unless
from cluster.control_api.calls import ControlClient
from cluster.control_api.configuration import differences, keys_digest, unpack_configuration
from cluster.control_api.zmq_carrier import control_client
from cluster.serve.following_gateway import FollowingGateway, WhileReady, stopping_text
from cluster.serve.gateway import check_access, load_tokenizer, make_gateway
from cluster.serve.screen import Screen, ScreenStage, workers_text
from engine.loading.commit import with_commit
from engine.loading.pretrained import default_cache_dir, folder_here, resolve

if TYPE_CHECKING:
    from gateway import Tokenizer

_TRY_AGAIN_S = 1.0
"""Pause between two tries to find the fleet."""


class AnotherFleet(ClusterError):
    """The fleet that was found is not the requested one; waiting longer does not help."""


class FoundFleet(NamedTuple):
    """A fleet that was found."""

    control: ControlApi
    config: BatonConfig
    """The owner's configuration; `_find` adds this gateway's section."""
    model_path: Path
    """The model's folder on the owner's machine."""
    keys_digest: str


class FleetSource(NamedTuple):
    """A place where a gateway looks for its fleet."""

    absence: str
    """The message if no fleet was found."""
    find_fleet: Callable[[], Awaitable[FoundFleet]]
    """Finds the fleet at this place. Raises ClusterError, with the reason, if no fleet answers yet; AnotherFleet if
    a fleet refuses the connection.
    """


def run_gateway(config: BatonConfig, screen: Screen, while_ready: WhileReady) -> None:
    """Runs a gateway for the fleet `cluster.name` while `while_ready` runs; the fleet outlives the gateway.

    A signal cancels `while_ready`. The sections `gateway` and `logging` are those of `config`, and so are keys that
    concern only one command, such as its timeouts. Other keys that are set in `config` must have the same values in the
    fleet (see `differences`); all keys that are not set are taken from the fleet. Raises BatonError if there is no such
    fleet within `cluster.start_timeout_s`, if the fleet differs, or when the fleet ends. Raises KeyboardInterrupt for a
    signal before the event loop runs.
    """
    address = config.cluster.ray_address
    uses_ray = config.cluster.fleet_address is None
    if uses_ray and address in ("local", "none"):
        raise ConfigError(
            f"cluster.ray_address: got {address!r}, which only `baton serve` itself can reach. Set the address of a "
            "Ray cluster, such as head:6379, or `auto` for the cluster on this machine. To join a `baton fleet`, set "
            "cluster.fleet_address instead"
        )
    check_access(config)
    with ExitStack() as stack:
        signals = stack.enter_context(StopSignals())
        if uses_ray:
            _connect_ray(config, screen, stack)
        signals.run(_run(config, screen, while_ready, signals))


def _connect_ray(config: BatonConfig, screen: Screen, stack: ExitStack) -> None:
    from cluster.on_ray.session import connect  # imported here: a gateway's machine may have no Ray

    address = config.cluster.ray_address
    with screen.stage("ray", f"connecting to {address}") as outcome:
        stack.enter_context(connect(config.cluster, 0, config.engine.device))
        outcome(f"joined {address}")


async def _run(config: BatonConfig, screen: Screen, while_ready: WhileReady, signals: StopSignals) -> None:
    async def find_and_open() -> None:
        found, keys = await _find(config, await _source(config, stack), screen)
        with (
            screen.stage("workers", "waiting for workers") as stage,
            Loading(partial(_load, config, found)) as loading,
        ):
            model_path, tokenizer = await asyncio.wrap_future(loading.result)
            gateway = make_gateway(found.config, keys, model_path, tokenizer, found.control)
            following = FollowingGateway(found.config, gateway, found.control)
            stack.push_async_callback(following.stop, signals.hurry)
            service = await following.start()
            stack.push(say_stopping)
            stage(workers_text(service.endpoints))
        await following.use(while_ready(service))

    def say_stopping(kind: type[BaseException] | None, *_: object) -> None:
        fleet = "" if kind is FleetEnded else "; the fleet continues"
        screen.line("stopping", f"{stopping_text(config)}{fleet}")

    async with AsyncExitStack() as stack:  # ends everything, even if the screen cannot be written
        await unless(signals.stop, find_and_open())


async def _source(config: BatonConfig, stack: AsyncExitStack) -> FleetSource:
    """The place to look for the fleet; usable until `stack` is closed."""
    address = config.cluster.fleet_address
    if address is None:
        absence = f"no fleet named '{config.cluster.name}' (cluster.name) answers on this Ray cluster"
        return FleetSource(absence, partial(_find_on_ray, config))
    keys = derive_fleet_keys(load_secret(config.network, os.environ, may_create=False))
    client = await stack.enter_async_context(control_client(address, keys, config.network))
    absence = f"no fleet answers at {address} (cluster.fleet_address)"
    return FleetSource(absence, partial(find_at_control_server, client))


async def _find_on_ray(config: BatonConfig) -> FoundFleet:
    """See FleetSource. Needs a connection to Ray."""
    from cluster.on_ray.controller import running_fleet  # imported here: other gateways need no Ray

    control = await asyncio.to_thread(running_fleet, config)
    if control is None:
        raise ClusterError("the Ray cluster has no controller of a fleet with this name")
    return await _ask_fleet(control)


async def find_at_control_server(client: ControlClient) -> FoundFleet:
    """See FleetSource."""
    try:
        return await _ask_fleet(client)
    except ClusterError:
        carrier = client.carrier
        if carrier.refusal is None:
            raise
        raise AnotherFleet(
            f"cannot join the fleet at {carrier.address} (cluster.fleet_address): {carrier.refusal}"
        ) from None


async def _ask_fleet(control: ControlApi) -> FoundFleet:
    """Reads the fleet's configuration. Raises ClusterError if the fleet does not answer yet."""
    configuration = await control.call(GetConfiguration())
    return FoundFleet(control, *unpack_configuration(configuration), configuration.keys_digest)


async def _find(config: BatonConfig, source: FleetSource, screen: Screen) -> tuple[FoundFleet, ClusterKeys]:
    """Waits for the fleet, and compares it with `config`. Returns the fleet with this gateway's section, and the
    cluster's keys."""
    name = config.cluster.name
    with screen.stage("fleet", f"looking for '{name}'") as stage:
        found = await _wait_for(config, source, stage)
        theirs = found.config
        if contradictions := differences(theirs, config, only_set=True):
            raise _another_fleet(theirs.cluster.name, contradictions)
        merged = _with_gateway_of(config, theirs)
        keys = derive_keys(load_secret(merged.network, os.environ, may_create=False))
        if found.keys_digest != keys_digest(keys):
            raise _another_fleet(name, ["its cluster secret differs"])
        stage(f"found '{merged.cluster.name}'")
    return found._replace(config=merged), keys


async def _wait_for(config: BatonConfig, source: FleetSource, stage: ScreenStage) -> FoundFleet:
    """Waits for a fleet whose controller answers."""
    timeout_s = config.cluster.start_timeout_s
    reason, told = "", set[str]()
    try:
        async with awake_timeout(timeout_s):
            while True:
                try:
                    return await source.find_fleet()
                except AnotherFleet:
                    raise
                except ClusterError as error:  # the fleet is ending, or still starting
                    reason = str(error)
                    if not told:
                        stage.note(f"{source.absence} yet; waiting {timeout_s:g} s at most: {reason}")
                    elif reason not in told:
                        stage.note(f"still waiting: {reason}")
                    told.add(reason)
                await asyncio.sleep(_TRY_AGAIN_S)
    except TimeoutError:
        raise ClusterError(
            f"{source.absence}; waited {timeout_s:g} s (cluster.start_timeout_s) for a `baton serve` or `baton fleet` "
            f"to start one: {reason or 'no answer'}"
        ) from None


def _load(config: BatonConfig, found: FoundFleet) -> "tuple[Path, Tokenizer]":
    """The model's folder on this machine, which may differ from the owner's, and its tokenizer."""
    asked_for, served = config.model.path, found.config.model.path
    cache_dir = default_cache_dir(os.environ)
    if "path" in config.model.model_fields_set and not leaves_revision_open(asked_for, served):
        path = resolve(asked_for, cache_dir, weights=False)
        is_another = path != found.model_path and asked_for != served
        if is_another and with_commit(config, path).model.path != served:
            raise _another_fleet(
                config.cluster.name,
                [
                    f"model.path is {str(found.model_path)!r} in the running fleet, {str(path)!r} in this configuration"
                ],
            )
    else:
        path = folder_here(served, found.model_path, cache_dir, weights=False)
    return path, load_tokenizer(config, path)


def _with_gateway_of(config: BatonConfig, theirs: BatonConfig) -> BatonConfig:
    """The fleet's configuration, with the keys of this gateway and this machine."""
    network = theirs.network.model_copy(update={"secret_file": config.network.secret_file})
    ours = {
        "ray_address",
        "ray_timeout_s",
        "fleet_address",
        "start_timeout_s",
        "drain_timeout_s",
    } & config.cluster.model_fields_set
    cluster = theirs.cluster.model_copy(update={key: getattr(config.cluster, key) for key in ours})
    ours_alone = {"gateway": config.gateway, "logging": config.logging}
    return theirs.model_copy(update={**ours_alone, "network": network, "cluster": cluster})


def _another_fleet(name: str, differences: list[str]) -> AnotherFleet:
    return AnotherFleet(
        f"the fleet named '{name}' differs from this configuration: {'; '.join(differences)}. Remove these keys, "
        "or use another cluster.name"
    )
