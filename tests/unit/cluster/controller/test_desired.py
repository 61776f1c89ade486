"""Which workers there are to be, and that a controller's next incarnation reads what the last one wrote."""

from baton.config import BatonConfig, ClusterConfig
from baton.worker import WorkerRole
from cluster.controller.desired import DesiredFleet, differences


def test_it_begins_as_configured_and_names_say_no_role() -> None:
    desired = DesiredFleet.of(ClusterConfig(prefill=1, decode=2))
    assert [(replica.name, replica.role) for replica in desired.replicas.values()] == [
        ("w0", WorkerRole.PREFILL),
        ("w1", WorkerRole.DECODE),
        ("w2", WorkerRole.DECODE),
    ]


def test_a_name_is_never_used_twice() -> None:
    desired = DesiredFleet.of(ClusterConfig())
    del desired.replicas["w1"]
    assert desired.add(WorkerRole.DECODE).name == "w2"
    assert [desired.was_there(name) for name in ("w0", "w1", "w2", "w3", "prefill-0")] == [
        False,
        True,
        False,
        False,
        False,
    ]


def test_what_is_written_is_what_is_read() -> None:
    desired = DesiredFleet.of(ClusterConfig())
    desired.add(WorkerRole.PREFILL).num_starts = 7
    desired.replicas["w1"].is_draining = True
    assert DesiredFleet.from_json(desired.to_json()) == desired
    assert [replica.name for replica in desired.with_role(WorkerRole.DECODE)] == []


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
    """It changes no token."""

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
