"""The fleet's configuration on its way to a gateway."""

from pathlib import Path

import pytest

from baton.config import BatonConfig
from baton.errors import ClusterError
from baton.messages.control import FleetConfiguration
from baton.system.curve import derive_keys
from cluster.control_api.configuration import (
    for_actors,
    keys_digest,
    pack_configuration,
    unpack_configuration,
)
from tests.factories.security import OTHER_SECRET, SECRET


def test_the_configuration_crosses_as_it_was_set_without_what_is_each_process_own() -> None:
    config = BatonConfig.from_mapping(
        {
            "model": {"path": "/models/tiny"},
            "network": {"bind_host": "0.0.0.0"},
            "cluster": {"name": "blue", "ray_address": "auto", "prefill_labels": {"role": "prefill"}},
            "gateway": {"max_in_flight": 3, "api_keys_file": "/secret"},
            "logging": {"level": "debug"},
        }
    )
    packed = pack_configuration(config, Path("/models/tiny"), keys_digest(derive_keys(SECRET)))
    assert "secret" not in packed.sections
    crossed, path = unpack_configuration(packed)
    assert path == Path("/models/tiny")
    assert crossed == config.model_copy(
        update={"gateway": BatonConfig().gateway, "logging": BatonConfig().logging}
    )
    assert crossed.model.model_fields_set == {"path"}


@pytest.mark.parametrize("keys", [{"max_in_flight": 3}, {}])
def test_actors_get_nothing_of_the_gateway_but_what_workers_need(keys: dict[str, int]) -> None:
    """Ray keeps the arguments of an actor in its head, where others may read them."""
    secrets = {
        "api_keys": [{"name": "alice", "sha256": "a" * 64}],
        "response_store": "redis://:password@redis:6379",
    }
    sections = {"cluster": {"name": "blue"}, "logging": {"level": "debug"}}
    config = BatonConfig.from_mapping({**sections, "gateway": {**secrets, **keys}})
    passed = for_actors(config)
    assert passed == BatonConfig.from_mapping({**sections, "gateway": keys})
    assert passed.gateway.model_fields_set == set(keys)
    assert "password" not in repr(passed)


@pytest.mark.parametrize(
    ("sections", "found"),
    [
        ("{", "property name"),
        ("[]", "got "),
        ('{"cluster": {"flavour": 1, "taste": 2}}', "flavour: unknown key; .*taste: unknown key"),
    ],
)
def test_a_configuration_that_cannot_be_read_is_said_to_be_of_another_version(
    sections: str, found: str
) -> None:
    with pytest.raises(ClusterError, match=rf"{found}.*; the fleet runs another version of Baton"):
        unpack_configuration(FleetConfiguration(sections, "/m", ""))


def test_digests_of_different_secrets_differ_and_hold_no_key() -> None:
    keys = derive_keys(SECRET)
    assert keys_digest(keys) == keys_digest(derive_keys(SECRET))
    assert (
        len({keys_digest(keys), keys_digest(derive_keys(OTHER_SECRET)), keys_digest(derive_keys(None))}) == 3
    )
    assert keys.prefix.hex() not in keys_digest(keys)
