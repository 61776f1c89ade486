"""The fleet that a command starts or adopts, and ends: on Ray, or as child processes; listens on no port."""

import asyncio
import os
from collections import Counter
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Protocol

from baton.config import BatonConfig
from baton.errors import ConfigError
from baton.hub_name import HubName, leaves_revision_open
from baton.messages.control import ControlApi, GetConfiguration
from baton.system.curve import ClusterSecret, derive_keys
from baton.worker import WorkerRole
from cluster.control_api.configuration import keys_digest, unpack_configuration
from cluster.control_api.owner import OnProgress, OnServing
from cluster.controller.desired import worker_names
from cluster.serve.screen import Screen
from engine.loading.commit import commit_of, pinned, source_of, with_commit
from engine.loading.draft_check import check_draft, check_served, errors_of_draft
from engine.loading.dtype import choose_dtype, dtype_of, with_chosen_dtype, with_dtype
from engine.loading.footprint import check_room, check_small_files, footprint
from engine.loading.gguf_folder import gguf_of
from engine.loading.model_files import weight_files
from engine.loading.pretrained import default_cache_dir, resolve
from engine.model_config import read_architecture

ADAPTER = "adapter_config.json"
"""In a folder with this file, transformers would apply an adapter to the weights. Baton has no adapters."""


class Fleet(Protocol):
    """Workers and their controller. `end` may be called after any outcome of `start`."""

    async def start(self, on_progress: OnProgress, on_serving: OnServing | None = None) -> ControlApi:
        """Returns once every worker of a new fleet serves. An adopted fleet serves already, and is only scaled. Raises
        BatonError on failure.

        Calls `on_serving` as soon as workers of each role serve; after that, missing workers are no error (see
        `first_start`).
        """
        ...

    async def end(self, hurry: asyncio.Event) -> None:
        """Drains the workers for a bounded time, unless `hurry` is set, and ends them. No process remains. Does nothing
        to a fleet that was adopted and could not be scaled: another command may adopt it."""
        ...


def check_owner(config: BatonConfig, command: str) -> None:
    """Raises ConfigError for a key that only `baton gateway` uses, or, if `command` is "serve", only `baton fleet`."""
    address, port = config.cluster.fleet_address, config.cluster.fleet_port
    if address is not None:
        raise ConfigError(
            f"cluster.fleet_address: got '{address}', which is only for `baton gateway`; `baton {command}` starts its "
            "own fleet, so remove the key"
        )
    if port and command == "serve":
        raise ConfigError(
            f"cluster.fleet_port: got {port}, which is only for `baton fleet`; no gateway can join the fleet of "
            "`baton serve` at an address, so remove the key, or use `baton fleet` and `baton gateway`"
        )


def make_fleet(
    config: BatonConfig, secret: ClusterSecret | None, model_path: Path, screen: Screen, stack: ExitStack
) -> Fleet:
    """The fleet, not started yet; connected to Ray, if necessary, until `stack` is closed."""
    if config.cluster.ray_address == "none":
        from cluster.processes.fleet import ProcessFleet

        chosen = with_commit(with_chosen_dtype(config, model_path), model_path)
        return ProcessFleet(chosen, secret, model_path)
    from cluster.on_ray.fleet import RayFleet  # not at the top: a machine may have no Ray
    from cluster.on_ray.session import connect

    address = config.cluster.ray_address
    with screen.stage("ray", f"connecting to {address}") as outcome:
        logs = stack.enter_context(connect(config.cluster, most_ranks(config), config.engine.device))
        outcome(f"joined {address}" if logs is None else f"private, loopback only; logs in {logs}")
    return RayFleet(config, keys_digest(derive_keys(secret)), model_path, partial(screen.line, "fleet"))


def most_ranks(config: BatonConfig) -> int:
    """The most ranks that all workers together may ever have."""
    workers = Counter(role for _, role in worker_names(config.cluster))
    if config.autoscaling.mode == "on":
        workers = Counter({role: config.worker_bounds(role)[1] for role in WorkerRole})
    return sum(config.num_ranks(role) * count for role, count in workers.items())


def resolve_model(config: BatonConfig, screen: Screen) -> tuple[BatonConfig, Path]:
    """The configuration and the model's folder, which is downloaded now if necessary. A draft model is downloaded, too.

    On a Ray cluster that this command joins, each worker's host downloads the weights itself. The returned
    configuration names the draft model's commit, so that all workers guess the same drafts. Prints how much memory the
    models need. Raises ModelError if a model cannot be served. If files other than the weights show this, raises the
    error before the weights are downloaded. Also raises ModelError if the workers on this machine have no room for the
    models.
    """
    draft, draft_folder, cache_dir = config.speculation.draft_model, None, default_cache_dir(os.environ)
    is_here = config.cluster.ray_address in ("none", "local")
    with screen.bar() as progress:
        path = resolve(config.model.path, cache_dir, progress, weights=False)
        architecture = check_small_files(config, path)
        check_served(config.speculation, architecture)
        if draft is not None:
            with errors_of_draft():
                draft_folder = resolve(draft, cache_dir, progress, weights=False)
                check_draft(read_architecture(draft_folder), draft_folder, architecture, path)
            draft = pinned(draft, draft_folder)
            speculation = config.speculation.with_values("draft", draft_model=draft)
            config = config.model_copy(update={"speculation": speculation})
        if is_here and config.model.load_format == "auto":
            path = resolve(pinned(config.model.path, path), cache_dir, progress)
            draft_folder = None if draft is None else resolve(draft, cache_dir, progress)
            for folder in filter(None, (path, draft_folder)):
                if gguf_of(folder) is None:
                    weight_files(folder)  # raises the error before Ray is started
    dtype = choose_dtype(config, path)
    screen.line("model", f"{source_of(path)} in {dtype}")
    if (path / ADAPTER).is_file():
        screen.line("", f"without the adapter of {ADAPTER}: Baton serves the weights as they are stored")
    takes = footprint(with_dtype(config, dtype), path, draft_folder)
    screen.line("", str(takes))
    if is_here:
        check_room(takes, config)
    return config, path


async def with_choices_of(
    control: ControlApi, config: BatonConfig, model_path: Path, screen: Screen
) -> BatonConfig:
    """`config` with the fleet's data types and commit, which another command may have chosen on another machine."""
    theirs, _ = unpack_configuration(await control.call(GetConfiguration()))
    dtype = dtype_of(theirs)
    if dtype != choose_dtype(config, model_path)._replace(reason=""):
        screen.line("model", f"in {dtype}, as the fleet was started")
    chosen = with_dtype(config, dtype)
    if not leaves_revision_open(config.model.path, theirs.model.path):
        return chosen
    return chosen.model_copy(update={"model": chosen.model.with_values("model", path=theirs.model.path)})


def fleets_folder(agreed: BatonConfig, model_path: Path, screen: Screen) -> Path:
    """`model_path`, or the folder of the commit that an adopted fleet serves, without its weights."""
    name = HubName.parse(agreed.model.path)
    if name is None or name.commit in (None, commit_of(model_path)):
        return model_path
    screen.line("model", f"{name}, as the fleet was started")
    return resolve(agreed.model.path, default_cache_dir(os.environ), weights=False)


def fleet_text(config: BatonConfig) -> str:
    return f"{config.cluster.prefill} prefill and {config.cluster.decode} decode on {config.engine.device}"
