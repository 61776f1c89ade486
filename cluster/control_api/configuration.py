"""Packs a fleet's configuration into a message, and unpacks it."""

import hashlib
import json
from pathlib import Path

from baton.config import BatonConfig, GatewayConfig
from baton.errors import ClusterError, ConfigError
from baton.messages.control import FleetConfiguration
from baton.system.curve import ClusterKeys

_OWN_SECTIONS = {"gateway", "logging"}


def pack_configuration(config: BatonConfig, model_path: Path, digest: str) -> FleetConfiguration:
    """Packs all sections except `gateway` and `logging`. `digest`: see `keys_digest`."""
    sections = config.model_dump(mode="json", exclude_unset=True, exclude=_OWN_SECTIONS)
    return FleetConfiguration(json.dumps(sections), str(model_path), digest)


def for_actors(config: BatonConfig) -> BatonConfig:
    """Without the section `gateway`, which holds hashes of keys and passwords in addresses: Ray keeps what it passes.

    Of this section, workers need only `max_in_flight`.
    """
    needed = {"max_in_flight"} & config.gateway.model_fields_set
    gateway = GatewayConfig(**{key: getattr(config.gateway, key) for key in needed})
    return config.model_copy(update={"gateway": gateway})


def unpack_configuration(packed: FleetConfiguration) -> tuple[BatonConfig, Path]:
    """Raises ClusterError if this version of Baton does not know all keys of the configuration, or refuses one: the
    fleet runs with it, so another version has accepted it."""
    try:
        config = BatonConfig.from_mapping(json.loads(packed.sections), "the fleet's configuration")
    except (ConfigError, ValueError) as error:
        raise ClusterError(
            f"{'; '.join(str(error).splitlines())}; the fleet runs another version of Baton, which accepts this; run "
            "the same version on both"
        ) from None
    return config, Path(packed.model_path)


def keys_digest(keys: ClusterKeys) -> str:
    """A digest of the keys: equal for keys of the same secret. It does not reveal the keys."""
    return hashlib.sha256(b"baton control API" + keys.prefix).hexdigest()
