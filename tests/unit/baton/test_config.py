"""The configuration: errors name the key and the value; nothing unknown passes."""

import math
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from baton.config import BatonConfig, merge
from baton.errors import ConfigError
from baton.worker import WorkerRole


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"scheduler": {"block_size": 2**20 + 1}}, "scheduler.block_size: got 1048577"),
        ({"scheduler": {"max_num_seqs": 0}}, "scheduler.max_num_seqs: got 0"),
        (
            {"scheduler": {"policy": "lifo"}},
            "scheduler.policy: got 'lifo'; Input should be 'fcfs' or 'priority'",
        ),
        ({"scheduler": {"max_seqs": 3}}, "scheduler.max_seqs: unknown key"),
        ({"shceduler": {}}, "shceduler: unknown key"),
        ({"cluster": {"prefill": "two"}}, "cluster.prefill: got 'two'"),
        ({"engine": {"trace_dir": ""}}, "engine.trace_dir: got ''"),
        ({"engine": {"trace_max_mib": 0}}, "engine.trace_max_mib: got 0"),
        ({"engine": {"cuda_graphs": False}}, r"engine: cuda_graphs \(false\) needs device 'cuda', not 'cpu'"),
        (
            {"engine": {"gpu_memory_utilization": 0.5, "device": "cpu"}},
            r"engine: gpu_memory_utilization \(0\.5\) needs device 'cuda', not 'cpu'",
        ),
        ({"network": {"security": "tls"}}, "network.security: got 'tls'; Input should be 'curve' or 'none'"),
        ({"network": {"secret_file": ""}}, "network.secret_file: got ''"),
        (
            {"network": {"security": "none", "secret_file": "a"}},
            r"network: secret_file \('a'\) needs security 'curve'",
        ),
        ({"gateway": {"grpc_port": 70000}}, "gateway.grpc_port: got 70000"),
        ({"gateway": {"isolate_prefix_cache": True}}, "gateway: isolate_prefix_cache needs API keys"),
        (
            {"logging": {"log_prompts": True}},
            "logging: log_prompts needs level 'info' or 'debug', not 'warning', since prompts are logged at level info",
        ),
        ({"kv_transfer": None}, "kv_transfer: got None"),
        ({"model": {"path": ""}}, "model.path: got ''"),
        ({"network": {"peer_timeout_s": math.inf}}, "network.peer_timeout_s: got inf; "),
        ({"gateway": {"placement_timeout_s": 1e300}}, "gateway.placement_timeout_s: got 1e.300; a time must"),
        ({"network": {"heartbeat_interval_s": 3.0}}, r"heartbeat_interval_s \(3\) must not be above half of"),
        ({"speculation": {"method": "medusa"}}, "speculation.method: got 'medusa'"),
        (
            {"speculation": {"num_speculative_tokens": 2}},
            r"speculation: num_speculative_tokens \(2\) has no effect with method 'off'; set method to 'ngram' or "
            "'draft_model'",
        ),
        (
            {"speculation": {"method": "ngram", "draft_layers": 2}},
            r"speculation: draft_layers \(2\) has no effect with method 'ngram'; set method to 'draft_model'",
        ),
        (
            {"speculation": {"method": "draft_model", "draft_layers": 2, "prompt_lookup_min": 2}},
            r"speculation: prompt_lookup_min \(2\) has no effect with method 'draft_model'; set method to 'ngram'",
        ),
        (
            {"speculation": {"method": "draft_model"}},
            "speculation: method 'draft_model' needs draft_model .* or draft_layers .*; set one of .*, not neither",
        ),
        (
            {"speculation": {"method": "draft_model", "draft_layers": 2, "draft_model": "smollm2"}},
            "speculation: method 'draft_model' needs .*; set one of the two keys, not both",
        ),
        (
            {"speculation": {"method": "draft_model", "draft_layers": 2, "draft_quantization": "int4"}},
            r"speculation: draft_quantization \(int4\) has no effect with draft_layers",
        ),
        ({"speculation": {"method": "draft_model", "draft_layers": 0}}, "speculation.draft_layers: got 0"),
        ({"speculation": {"method": "draft_model", "draft_model": ""}}, "speculation.draft_model: got ''"),
        (
            {"speculation": {"method": "draft_model", "draft_model": "a"}, "engine": {"device": "cuda"}},
            "speculation.method 'draft_model' needs engine.device 'cpu', got 'cuda'",
        ),
        (
            {
                "speculation": {"method": "draft_model", "draft_layers": 2},
                "cluster": {"decode_tensor_parallel": 2},
            },
            r"speculation.draft_layers \(2\) needs workers of one rank, but some workers have 2 ranks",
        ),
        (
            {"speculation": {"method": "ngram", "num_speculative_tokens": 17}},
            "speculation.num_speculative_tokens: got 17",
        ),
        (
            {"speculation": {"method": "ngram", "prompt_lookup_min": 5}},
            r"speculation: prompt_lookup_min \(5\) must not be above prompt_lookup_max \(4\)",
        ),
        (
            {
                "speculation": {"method": "ngram"},
                "scheduler": {"max_num_batched_tokens": 3, "max_num_seqs": 1},
            },
            r"scheduler.max_num_batched_tokens \(3\) leaves no room for the drafts of speculation.method 'ngram'",
        ),
        (
            {"speculation": {"method": "ngram"}, "scheduler": {"long_prefill_token_threshold": 1}},
            r"scheduler.long_prefill_token_threshold \(1\) leaves no room for the drafts",
        ),
        (
            {"speculation": {"forced_tokens": True}, "engine": {"device": "cuda"}},
            r"speculation.forced_tokens \(true\) needs engine.device 'cpu', got 'cuda'",
        ),
        (
            {"scheduler": {"enable_chunked_prefill": False, "max_num_batched_tokens": 5, "max_model_len": 9}},
            r"max_num_batched_tokens \(5\) must be at least max_model_len \(9\)",
        ),
    ],
)
def test_a_wrong_key_is_named_with_its_value(values: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        BatonConfig.from_mapping(values)


@pytest.mark.parametrize(("written", "method"), [("off", "off"), ("'off'", "off"), ("ngram", "ngram")])
def test_speculation_is_read_from_yaml(written: str, method: str, tmp_path: Path) -> None:
    (tmp_path / "baton.yaml").write_text(f"speculation: {{method: {written}}}\n")
    assert BatonConfig.from_yaml(tmp_path / "baton.yaml").speculation.method == method


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "*", "::", "10.1.2.3", "eth0", "node-1", "127.0.0.1.example.com"]
)
def test_planes_that_others_can_reach_need_security(host: str) -> None:
    with pytest.raises(
        ConfigError, match=f"network: security 'none' on bind_host '{re.escape(host)}' would let"
    ):
        BatonConfig.from_mapping({"network": {"security": "none", "bind_host": host}})
    assert BatonConfig.from_mapping({"network": {"bind_host": host}}).network.security == "curve"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.3.2.1", "::1", "localhost"])
def test_loopback_may_do_without_security(host: str) -> None:
    values = {"network": {"security": "none", "bind_host": host}}
    assert BatonConfig.from_mapping(values).network.security == "none"


@pytest.mark.parametrize(
    ("section", "key"), [("network", "bind_host"), ("network", "advertise_host"), ("gateway", "host")]
)
@pytest.mark.parametrize(
    "host",
    ["10.0.0.1:5000", "[::1]", "tcp://10.0.0.1", "", "node 1", "::1::2", "10.0.0..1", "n" * 64],
)
def test_what_is_no_host_is_refused_by_name(section: str, key: str, host: str) -> None:
    with pytest.raises(ConfigError, match=rf"{section}\.{key}: "):
        BatonConfig.from_mapping({section: {key: host}})


KEY = {"name": "a", "sha256": "0" * 64}
CERTIFICATE = {"cert_file": "a", "key_file": "b"}


@pytest.mark.parametrize(
    ("gateway", "complaint"),
    [
        ({}, "host 'HOST' would admit everyone .* `baton key NAME` .* allow_anonymous: true"),
        ({"tls": CERTIFICATE}, "host 'HOST' would admit everyone"),
        ({"api_keys": [KEY]}, r"be sent to host 'HOST' in plain text; set tls, or set allow_plaintext"),
        ({"api_keys_file": "k"}, "be sent to host 'HOST' in plain text"),
        ({"api_keys_file": "k", "allow_anonymous": True}, "in plain text"),
        ({"api_keys_file": "k", "tls": CERTIFICATE}, None),
        ({"api_keys_file": "k", "allow_plaintext": True}, None),
        ({"tls": {**CERTIFICATE, "client_ca_file": "c"}}, None),
        ({"allow_anonymous": True}, None),
    ],
)
@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "node-1"])
def test_a_gateway_that_others_can_reach_needs_access_control(
    host: str, gateway: dict[str, Any], complaint: str | None
) -> None:
    BatonConfig.from_mapping({"gateway": {**gateway, "host": "127.0.0.1"}})
    values = {"gateway": {**gateway, "host": host}}
    if complaint is None:
        BatonConfig.from_mapping(values)
    else:
        with pytest.raises(ConfigError, match="gateway: .*" + complaint.replace("HOST", host)):
            BatonConfig.from_mapping(values)


@pytest.mark.parametrize(
    ("keys", "complaint"),
    [
        (["baton-secret"], "gateway.api_keys.0: must be a mapping with `name` and `sha256`"),
        ([{"name": "a", "sha256": "baton-secret"}], "sha256: must be the hash that `baton key NAME` prints"),
        ([KEY, KEY], "'a' and 'a' have the same sha256"),
        ([KEY, {**KEY, "name": "a b"}], "api_keys.1.name: got a value of type str"),
        ([{**KEY, "scopes": []}], "api_keys.0.scopes: got"),
        ([{**KEY, "requests_per_minute": 0}], "api_keys.0.requests_per_minute: got 0"),
    ],
)
def test_keys_that_cannot_be_used_are_named_and_not_shown(keys: list[Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint) as caught:
        BatonConfig.from_mapping({"gateway": {"api_keys": keys}})
    assert "baton-secret" not in str(caught.value)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "*"])
def test_a_wildcard_address_cannot_be_advertised(host: str) -> None:
    with pytest.raises(ConfigError, match=rf"no process can connect to advertise_host '{re.escape(host)}'"):
        BatonConfig.from_mapping({"network": {"advertise_host": host}})


def test_overrides_lie_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "baton.yaml"
    path.write_text("cluster: {prefill: 2, decode: 3}\n")
    config = BatonConfig.from_yaml(path, {"cluster": {"decode": 5}})
    assert (config.cluster.prefill, config.cluster.decode) == (2, 5)


@pytest.mark.parametrize("text", ["[1, 2]", "a: [", "\x00"])
def test_a_file_that_is_not_a_mapping_is_refused_by_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "baton.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"baton\.yaml"):
        BatonConfig.from_yaml(path)


def test_a_key_may_replace_one_of_a_mapping_that_is_merged(tmp_path: Path) -> None:
    path = tmp_path / "baton.yaml"
    path.write_text("network: {peer_timeout_s: 9, <<: {peer_timeout_s: 7, reconnect_grace_s: 2}}\n")
    network = BatonConfig.from_yaml(path).network
    assert (network.peer_timeout_s, network.reconnect_grace_s) == (9, 2)


@pytest.mark.parametrize("number", ["1e-07", "1E-7", "1.0e-07", "0.0000001"])
def test_a_number_may_have_an_exponent(tmp_path: Path, number: str) -> None:
    """Helm writes small numbers as 1e-07."""
    path = tmp_path / "baton.yaml"
    path.write_text(f"gateway: {{otlp_endpoint: 'http://127.0.0.1:4318', trace_sample_ratio: {number}}}\n")
    assert BatonConfig.from_yaml(path).gateway.trace_sample_ratio == 1e-7


def test_a_missing_file_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml"):
        BatonConfig.from_yaml(tmp_path / "nowhere.yaml")


def test_a_configuration_cannot_be_changed() -> None:
    with pytest.raises(ValidationError):
        BatonConfig().gateway.grpc_port = 1  # type: ignore[misc]


def test_merge_changes_neither_side() -> None:
    values, overrides = {"a": {"x": 1}}, {"a": {"y": 2}, "b": {"z": 3}}
    assert merge(values, overrides) == {"a": {"x": 1, "y": 2}, "b": {"z": 3}}
    assert values == {"a": {"x": 1}}


def test_each_role_may_have_ranks_of_its_own() -> None:
    both = BatonConfig.from_mapping({"engine": {"tensor_parallel": 2}})
    assert [both.num_ranks(role) for role in WorkerRole] == [2, 2]
    unequal = BatonConfig.from_mapping(
        {"engine": {"tensor_parallel": 2}, "cluster": {"decode_tensor_parallel": 8}}
    )
    assert (unequal.num_ranks(WorkerRole.PREFILL), unequal.num_ranks(WorkerRole.DECODE)) == (2, 8)


def test_ranks_that_cannot_hand_kv_over_are_refused_unless_there_is_no_hand_over() -> None:
    ranks = {"prefill_tensor_parallel": 2, "decode_tensor_parallel": 3}
    with pytest.raises(
        ConfigError, match="prefill workers of 2 ranks cannot hand KV over to decode workers of 3"
    ):
        BatonConfig.from_mapping({"cluster": ranks})
    assert BatonConfig.from_mapping({"cluster": {**ranks, "prefill": 0}}).num_ranks(WorkerRole.DECODE) == 3


@pytest.mark.parametrize(
    ("autoscaling", "complaint"),
    [
        (
            {"min_decode": 3, "max_decode": 2},
            r"autoscaling: min_decode \(3\) must not be above max_decode \(2\)",
        ),
        ({"target_block_use": 1.5}, r"autoscaling\.target_block_use: got 1\.5"),
        ({"interval_s": 0.0}, r"autoscaling\.interval_s: got 0\.0"),
        ({"grow_after_s": 20.0, "shrink_after_s": 10.0}, r"shrink_after_s \(10\) must not be shorter than"),
        ({"max_decode": 4}, r"autoscaling: max_decode \(4\) has no effect with mode 'off'"),
        ({"mode": "on"}, "autoscaling.mode 'on' has nothing to change"),
        (
            {"mode": "dry_run", "max_decode": 4, "target_queue_time_s": None, "target_block_use": None},
            "mode 'dry_run' needs a target",
        ),
        (
            {"mode": "on", "min_decode": 3, "max_decode": 4},
            r"cluster\.decode \(2\) must be between autoscaling\.min_decode \(3\) and",
        ),
        ({"mode": "on", "max_decode": 1}, r"cluster\.decode \(2\) must be between .*max_decode \(1\)"),
    ],
)
def test_autoscaling_that_cannot_work_is_refused(autoscaling: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        BatonConfig.from_mapping({"cluster": {"decode": 2}, "autoscaling": autoscaling})


@pytest.mark.parametrize(
    ("cluster", "complaint"),
    [
        (
            {"prefill_labels": {"role": "prefill"}},
            r"prefill_labels .* selects nodes of an external Ray cluster",
        ),
        (
            {"decode_resources": {"decode": 1}},
            r"decode_resources .* selects nodes of an external Ray cluster",
        ),
        (
            {"ray_timeout_s": 60.0},
            r"ray_timeout_s \(60\) needs an external Ray cluster, but ray_address is 'local'",
        ),
        ({"ray_address": "none", "ray_timeout_s": 60.0}, r"ray_timeout_s .* ray_address is 'none'"),
        (
            {"ray_address": "auto", "decode_labels": {"a": "in(x"}},
            r"decode_labels: got .*'in\(x'; use a label value",
        ),
        ({"ray_address": "auto", "decode_labels": {"a": ""}}, r"decode_labels: got ''|decode_labels: got"),
        ({"ray_address": "auto", "decode_resources": {"decode": 0}}, r"decode_resources\.decode: got 0"),
    ],
)
def test_places_that_cannot_be_are_refused(cluster: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        BatonConfig.from_mapping({"cluster": cluster})


@pytest.mark.parametrize("value", ["x", "!x", "in(x)", "in(x,y)", "in(x, y.z)", "!in(x,y)", "H200-8"])
def test_a_label_may_be_a_condition(value: str) -> None:
    config = BatonConfig.from_mapping({"cluster": {"ray_address": "auto", "prefill_labels": {"node": value}}})
    assert config.cluster.prefill_labels == {"node": value}


def test_a_response_may_be_stored_for_a_month_which_is_longer_than_any_wait() -> None:
    month_s = 30 * 86400.0
    config = BatonConfig.from_mapping({"gateway": {"response_store_ttl_s": month_s}})
    assert config.gateway.response_store_ttl_s == month_s


def test_bounds_that_are_not_given_are_where_the_fleet_starts() -> None:
    values = {"cluster": {"decode": 2}, "autoscaling": {"mode": "on", "max_decode": 4}}
    config = BatonConfig.from_mapping(values)
    assert config.worker_bounds(WorkerRole.PREFILL) == (1, 1)
    assert config.worker_bounds(WorkerRole.DECODE) == (2, 4)


@pytest.mark.parametrize(
    ("grow_after_s", "interval_s", "window_s"), [(15.0, 5.0, 15.0), (0.0, 5.0, 5.0), (0.5, 0.1, 2.0)]
)
def test_latencies_cover_the_time_between_two_reports_and_some_seconds(
    grow_after_s: float, interval_s: float, window_s: float
) -> None:
    scaling = {"mode": "on", "max_decode": 4, "grow_after_s": grow_after_s, "interval_s": interval_s}
    assert BatonConfig.from_mapping({"autoscaling": scaling}).autoscaling.latency_window_s == window_s


@pytest.mark.parametrize("mode", ["off", "dry_run", "on"])
def test_the_mode_of_autoscaling_needs_no_quotes_in_yaml(tmp_path: Path, mode: str) -> None:
    path = tmp_path / "baton.yaml"
    path.write_text(f"autoscaling: {{mode: {mode}, max_decode: 3}}\n")
    assert BatonConfig.from_yaml(path).autoscaling.mode == mode


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"engine": {"device": "cuda"}}, "cluster.ray_address 'none' needs engine.device 'cpu'"),
        ({"cluster": {"decode_resources": {"decode": 1.0}}}, r"decode_resources .* ray_address is 'none'"),
        ({"cluster": {"prefill_labels": {"role": "prefill"}}}, r"prefill_labels .* ray_address is 'none'"),
    ],
)
def test_what_only_ray_can_do_is_refused_without_it(values: dict[str, Any], complaint: str) -> None:
    cluster = {"ray_address": "none", **values.get("cluster", {})}
    with pytest.raises(ConfigError, match=complaint):
        BatonConfig.from_mapping({**values, "cluster": cluster})
