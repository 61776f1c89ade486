"""The fleet's configuration on its way to gateways and actors, and the keys in which two configurations of one fleet
may differ."""

from pathlib import Path

import pytest

from baton.config import BatonConfig
from baton.errors import ClusterError
from baton.messages.control import FleetConfiguration
from baton.system.curve import derive_keys
from cluster.control_api.configuration import (
    differences,
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


def test_two_configurations_of_one_fleet_may_differ_in_their_gateways() -> None:
    there = BatonConfig.from_mapping({"gateway": {"grpc_port": 1}, "cluster": {"ray_address": "auto"}})
    here = BatonConfig.from_mapping({"gateway": {"grpc_port": 2}, "cluster": {"ray_address": "head:6379"}})
    assert differences(there, here) == []
    here = BatonConfig.from_mapping({"model": {"dtype": "float16"}, "cluster": {"cpus_per_worker": 3}})
    assert differences(there, here) == [
        "model.dtype is 'auto' in the running fleet, 'float16' in this configuration",
        "cluster.cpus_per_worker is 1.0 in the running fleet, 3.0 in this configuration",
    ]


def test_a_data_type_that_is_left_to_the_fleet_agrees_with_the_one_chosen_there() -> None:
    there, here = ({"model": {"dtype": dtype}} for dtype in ("bfloat16", "auto"))
    assert differences(BatonConfig.from_mapping(there), BatonConfig.from_mapping(here)) == []
    assert differences(BatonConfig.from_mapping(there), BatonConfig.from_mapping(here), only_set=True) == []
    assert differences(BatonConfig.from_mapping(here), BatonConfig.from_mapping(there)) == [
        "model.dtype is 'auto' in the running fleet, 'bfloat16' in this configuration"
    ]


def test_the_type_of_kv_is_left_to_the_fleet_with_the_models_type() -> None:
    there = BatonConfig.from_mapping(
        {"model": {"dtype": "float32"}, "engine": {"kv_cache_dtype": "bfloat16"}}
    )
    assert differences(there, BatonConfig()) == []
    assert differences(there, BatonConfig.from_mapping({"model": {"dtype": "float32"}})) == [
        "engine.kv_cache_dtype is 'bfloat16' in the running fleet, 'auto' in this configuration"
    ]
    assert differences(there, BatonConfig.from_mapping({"engine": {"kv_cache_dtype": "fp8"}})) == [
        "engine.kv_cache_dtype is 'bfloat16' in the running fleet, 'fp8' in this configuration"
    ]
    in_8_bits = BatonConfig.from_mapping({"engine": {"kv_cache_dtype": "fp8"}})
    assert differences(in_8_bits, BatonConfig()) == [
        "engine.kv_cache_dtype is 'fp8' in the running fleet, 'auto' in this configuration"
    ]


def test_a_draft_models_commit_may_differ() -> None:
    """The commit changes no token."""

    def config_of(draft_model: str) -> BatonConfig:
        return BatonConfig.from_mapping(
            {"speculation": {"method": "draft_model", "draft_model": draft_model}}
        )

    there = config_of(f"acme/tiny@{'a' * 40}")
    for name in ("acme/tiny", "acme/tiny@main", f"acme/tiny@{'b' * 40}"):
        assert differences(there, config_of(name)) == []
    for name in ("acme/other", "acme/tiny:Q8_0", "/models/tiny"):
        assert differences(there, config_of(name)) == [
            f"speculation.draft_model is 'acme/tiny@{'a' * 40}' in the running fleet, '{name}' in this configuration"
        ]


def test_a_name_of_the_hub_leaves_its_commit_to_the_fleet_unless_it_names_a_revision() -> None:
    there = BatonConfig.from_mapping({"model": {"path": f"acme/tiny@{'a' * 40}"}})
    assert differences(there, BatonConfig.from_mapping({"model": {"path": "acme/tiny"}})) == []
    for path in ("acme/tiny@main", f"acme/tiny@{'b' * 40}", "acme/other", "acme/tiny:Q8_0"):
        assert differences(there, BatonConfig.from_mapping({"model": {"path": path}})) == [
            f"model.path is 'acme/tiny@{'a' * 40}' in the running fleet, {path!r} in this configuration"
        ]


def test_with_other_numbers_of_workers_a_fleet_stays_the_same() -> None:
    there = BatonConfig.from_mapping({"cluster": {"prefill": 1, "decode": 1}})
    assert differences(there, BatonConfig.from_mapping({"cluster": {"prefill": 4, "decode": 8}})) == []


def test_a_gateway_is_contradicted_only_by_keys_set_for_it() -> None:
    there = BatonConfig.from_mapping(
        {
            "model": {"path": "/there", "dtype": "float32"},
            "cluster": {"decode": 3, "name": "blue"},
            "network": {"secret_file": "/there/secret", "peer_timeout_s": 2.0},
        }
    )
    here = BatonConfig.from_mapping(
        {
            "model": {"path": "/here"},
            "network": {"secret_file": "/here/secret"},
            "cluster": {"name": "blue", "ray_address": "head:6379", "ray_timeout_s": 60.0},
            "gateway": {"max_in_flight": 7},
        }
    )
    assert differences(there, here, only_set=True) == []
    here = BatonConfig.from_mapping({"model": {"dtype": "bfloat16"}, "network": {"peer_timeout_s": 5.0}})
    assert differences(there, here, only_set=True) == [
        "model.dtype is 'float32' in the running fleet, 'bfloat16' in this configuration",
        "network.peer_timeout_s is 2.0 in the running fleet, 5.0 in this configuration",
    ]
