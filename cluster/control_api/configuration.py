"""Packs a fleet's configuration into a message, unpacks it, and compares it with another one."""

import hashlib
import json
from pathlib import Path

from baton.config import BatonConfig, GatewayConfig
from baton.errors import ClusterError, ConfigError
from baton.hub_name import is_same_repository, leaves_revision_open
from baton.messages.control import FleetConfiguration
from baton.system.curve import ClusterKeys
from baton.worker import WorkerRole

_OWN_SECTIONS = {"gateway", "logging"}
"""Sections in which each process of a cluster has its own configuration."""

_OF_ONE_COMMAND = {
    ("cluster", "drain_timeout_s"),
    ("cluster", "start_timeout_s"),
    ("engine", "trace_dir"),
    ("model", "path"),
    ("network", "secret_file"),
}
"""Keys that concern only one command: its timeouts, and paths on its machine. Each machine may store the model under
another path."""

_ADDRESSES = {("cluster", key) for key in ("ray_address", "ray_timeout_s", "fleet_address", "fleet_port")}
"""Keys of addresses: different addresses may lead to the same fleet."""

_COUNTS = {("cluster", role.value) for role in WorkerRole}
"""Keys of the initial numbers of workers, which may change while the fleet runs."""

_CHOSEN = {
    ("model", "dtype"): ("float32", "bfloat16", "float16"),
    ("engine", "kv_cache_dtype"): ("bfloat16",),
}
"""Values that the command which started the fleet may have chosen for `auto`, if `model.dtype` is `auto`. That command
also decided the commit of a model that is named without a commit (`leaves_revision_open`)."""


def pack_configuration(config: BatonConfig, model_path: Path, digest: str) -> FleetConfiguration:
    """Packs all sections except `gateway` and `logging`. `digest`: see `keys_digest`."""
    sections = config.model_dump(mode="json", exclude_unset=True, exclude=_OWN_SECTIONS)
    return FleetConfiguration(json.dumps(sections), str(model_path), digest)


def for_actors(config: BatonConfig) -> BatonConfig:
    """A copy that is passed to Ray's actors. Ray stores the copy, so it must not contain the secrets of the section
    `gateway`: hashes of keys, and passwords in addresses.

    Of this section, the copy has only `max_in_flight`, which workers need.
    """
    needed = {"max_in_flight"} & config.gateway.model_fields_set
    gateway = GatewayConfig(**{key: getattr(config.gateway, key) for key in needed})
    return config.model_copy(update={"gateway": gateway})


def unpack_configuration(packed: FleetConfiguration) -> tuple[BatonConfig, Path]:
    """The configuration, and the model's folder. Raises ClusterError if this version of Baton does not know all keys of
    the configuration, or refuses a value. The fleet's version has accepted them, so it is another version."""
    try:
        config = BatonConfig.from_mapping(json.loads(packed.sections), "the fleet's configuration")
    except (ConfigError, ValueError) as error:
        raise ClusterError(
            f"{'; '.join(str(error).splitlines())}; the fleet runs another version of Baton, which accepts this "
            "configuration; run the same version here"
        ) from None
    return config, Path(packed.model_path)


def keys_digest(keys: ClusterKeys) -> str:
    """A digest of the keys: equal for keys of the same secret. It does not reveal the keys."""
    return hashlib.sha256(b"baton control API" + keys.prefix).hexdigest()


def differences(
    there: BatonConfig,
    here: BatonConfig,
    *,
    only_set: bool = False,
    is_one_file: bool = False,
    places: tuple[str, str] = ("in the running fleet", "in this configuration"),
) -> list[str]:
    """One line for each key whose two values mean different fleets. `places`: the words after each value.

    The sections `gateway` and `logging`, addresses and the initial numbers of workers may differ. `is_one_file`:
    `there` and `here` are two versions of one command's configuration file. Then only the initial numbers of workers,
    and keys that only gateways use, may differ. `only_set` compares only keys that are set in `here`, and skips keys
    that concern only one command.
    """
    found = []
    may_differ = _COUNTS if is_one_file else _ADDRESSES | _COUNTS
    for section in BatonConfig.model_fields:
        if section in _OWN_SECTIONS and not is_one_file:
            continue
        values, others = getattr(there, section), getattr(here, section)
        for key in type(values).model_fields:
            if (section, key) in may_differ or (section == "gateway" and key != "max_in_flight"):
                continue
            if only_set and (key not in others.model_fields_set or (section, key) in _OF_ONE_COMMAND):
                continue
            value, other = getattr(values, key), getattr(others, key)
            if (section, key) == ("model", "path") and leaves_revision_open(other, value):
                continue
            if (section, key) == ("speculation", "draft_model") and is_same_repository(other, value):
                continue  # another commit guesses other drafts; the answer stays the same
            if here.model.dtype == other == "auto" and value in _CHOSEN.get((section, key), ()):
                continue
            if value != other:
                found.append(f"{section}.{key} is {value!r} {places[0]}, {other!r} {places[1]}")
    return found
