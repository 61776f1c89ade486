"""What the errors of a configuration say, and what they must not quote."""

import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from baton.config import BatonConfig
from baton.errors import ConfigError


@pytest.mark.parametrize(
    "gateway",
    [
        {"response_store": "redis:/:hush@h/0"},
        {"otlp_endpoint": "grpc://u:hush@h"},
        {"api_keys": "hush"},
        {"api_keys": {"alice": "hush"}},
    ],
)
def test_a_value_that_may_have_a_secret_is_not_quoted(gateway: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=rf"gateway\.{next(iter(gateway))}: got a value of type") as caught:
        BatonConfig.from_mapping({"gateway": gateway})
    assert "hush" not in str(caught.value)


def test_every_problem_is_reported_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        BatonConfig.from_mapping({"gateway": {"grpc_port": -1}, "cluster": {"decode": 0}})
    assert len(str(caught.value).splitlines()) == 2


@pytest.mark.parametrize(
    ("sections", "complaint"),
    [
        ({}, r"cluster.prefill is 0; raise cluster.prefill, or remove gateway.require_disaggregated"),
        ({"autoscaling": {"mode": "dry_run", "max_prefill": 1}}, "cluster.prefill is 0"),
        ({"autoscaling": {"mode": "on", "max_decode": 2}}, "cluster.prefill is 0"),
        ({"autoscaling": {"mode": "on", "max_prefill": 1}}, None),
        ({"cluster": {"prefill": 0, "fleet_address": "fleet:6390"}}, None),
    ],
)
def test_hand_overs_need_a_prefill_worker(sections: dict[str, object], complaint: str | None) -> None:
    values = {"gateway": {"require_disaggregated": True}, "cluster": {"prefill": 0}} | sections
    with pytest.raises(ConfigError, match=complaint) if complaint else nullcontext():
        BatonConfig.from_mapping(values)


def test_the_gateways_two_ports_differ() -> None:
    with pytest.raises(
        ConfigError, match="gateway: grpc_port and http_port are both 8000; choose another port"
    ):
        BatonConfig.from_mapping({"gateway": {"grpc_port": 8000}})
    BatonConfig.from_mapping({"gateway": {"grpc_port": 0, "http_port": 0}})


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("gateway:\n  - api_keys:\n    - {name: a, sha256: hush}\n", "gateway: got a value of type list"),
        ("gateway: 'api_keys hush'\n", "gateway: got a value of type str"),
        ("gateway:\n  api_keys: [ hush: : } \n", "in line 2, column"),
        ('gateway:\n  api_keys:\n    - sha256: "hush\n', "unexpected end of stream in line"),
        (
            "gateway:\n  api_keys:\n    - {name: hush}\ngateway: {}\n",
            "found the key 'gateway' a second time in line 4, column 1",
        ),
        (
            "gateway:\n  http_port: 1\n  host: hush\n  'http_port': 2\n",
            "found the key 'http_port' a second time in line 4, column 3",
        ),
        ("gateway: hush\ncluster: {name: 2026-02-30}\n", "found no valid timestamp in line 2, column 17"),
        ("gateway:\n  http_port: !!int hush\n", "found no valid int in line 2, column 14"),
        ("gateway: !!bool hush\n", "found no valid bool in line 1, column 10"),
        ("gateway: !!timestamp hush\n", "found no valid timestamp in line 1, column 10"),
        ("gateway: hush\ncluster: {name: !!float ''}\n", "found no valid float in line 2, column 17"),
        ("gateway: hush\ncluster: " + 5000 * "[", "found too many levels"),
    ],
)
def test_a_file_at_fault_is_not_quoted_where_keys_may_be(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "baton.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=complaint) as caught:
        BatonConfig.from_yaml(path)
    assert "hush" not in str(caught.value)


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"engine": {"trace_max_mib": 9}}, r"engine: trace_max_mib \(9\) needs trace_dir"),
        (
            {"engine": {"swap_space_mib": 512}},
            r"engine\.swap_space_mib \(512\) needs scheduler\.preemption 'swap', not 'recompute'",
        ),
        (
            {"engine": {"swap_space_mib": 512}, "scheduler": {"preemption": "swap", "num_swap_blocks": 4}},
            r"engine\.swap_space_mib \(512\) has no effect with scheduler\.num_swap_blocks \(4\); remove",
        ),
        (
            {"gateway": {"http_port": None, "allowed_hosts": ["baton.example"]}},
            "gateway: allowed_hosts .* is only for HTTP, but http_port: null turns HTTP off",
        ),
        (
            {"gateway": {"http_port": None, "response_store": "redis://:hush@a"}},
            "gateway: response_store is only for HTTP, but http_port: null turns HTTP off",
        ),
        (
            {"gateway": {"response_store": "none", "response_store_ttl_s": 60.0}},
            r"gateway: response_store_ttl_s \(60\) needs a store, but response_store is 'none'",
        ),
        (
            {"gateway": {"response_store": "redis://:hush@a", "response_store_mib": 8}},
            r"gateway: response_store_mib \(8\) is only for a store in memory; remove the key",
        ),
        (
            {"gateway": {"response_store_file": "hush", "response_store_mib": 8}},
            r"gateway: response_store_mib \(8\) is only for a store in memory",
        ),
        (
            {"gateway": {"grpc_connection_grace_s": 5.0}},
            r"gateway: grpc_connection_grace_s \(5\) needs grpc_max_connection_age_s",
        ),
        (
            {"cluster": {"restart_delay_s": 40.0}},
            r"cluster: restart_delay_s \(40\) must not be above restart_delay_max_s \(30\)",
        ),
        ({"cluster": {"orphan_timeout_s": 20.0}}, r"orphan_timeout_s \(20\) needs an external Ray cluster"),
        (
            {"cluster": {"allow_ray_without_token": True}},
            r"allow_ray_without_token \(true\) needs an external",
        ),
        (
            {"cluster": {"ray_address": "none", "cpus_per_worker": 2.0}},
            r"cpus_per_worker \(2\) is a request to Ray, but ray_address is 'none'",
        ),
    ],
)
def test_a_key_without_effect_is_named(values: dict[str, dict[str, object]], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint) as caught:
        BatonConfig.from_mapping(values)
    assert "hush" not in str(caught.value)


@pytest.mark.parametrize(
    ("section", "key", "number", "complaint"),
    [
        ("gateway", "max_message_mib", 2048, "got 2048; .*less than or equal to 2047"),
        ("gateway", "grpc_max_streams", 2**31, "got 2147483648; .*less than or equal to 2147483647"),
        ("engine", "num_threads", 4097, "got 4097; .*less than or equal to 4096"),
        ("scheduler", "max_num_seqs", 2**63, "got 9223372036854775808; a number must fit into 64 bits"),
        ("cluster", "crash_loop_deaths", 2**63, "got 9223372036854775808; a number must fit into 64 bits"),
    ],
)
def test_a_number_that_no_process_can_use_is_refused(
    section: str, key: str, number: int, complaint: str
) -> None:
    with pytest.raises(ConfigError, match=rf"{section}\.{key}: {complaint}"):
        BatonConfig.from_mapping({section: {key: number}})
    BatonConfig.from_mapping({section: {key: number - 1}})


def test_a_number_that_python_does_not_write_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"cluster\.drain_timeout_s: got a huge number; "):
        BatonConfig.from_mapping({"cluster": {"drain_timeout_s": 16**5000}})


@pytest.mark.parametrize(
    ("section", "key"), [("model", "path"), ("network", "secret_file"), ("gateway", "api_keys_file")]
)
def test_a_text_with_a_zero_byte_is_refused(section: str, key: str) -> None:
    """No system call takes a path with one."""
    with pytest.raises(ConfigError, match=rf"{section}\.{key}: must not contain a zero byte"):
        BatonConfig.from_mapping({section: {key: "a\0b"}})


PRINT_THE_MODEL = """
import pathlib, sys
from baton.config import BatonConfig
print(ascii(BatonConfig.from_yaml(pathlib.Path(sys.argv[1])).model.path))
"""


@pytest.mark.slow
def test_a_file_is_utf_8_in_any_locale(tmp_path: Path) -> None:
    path = tmp_path / "baton.yaml"
    path.write_text("model: {path: Zürich}\n", encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-X", "utf8=0", "-c", PRINT_THE_MODEL, path],
        env={**os.environ, "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.stdout, done.stderr) == (r"'Z\xfcrich'" + "\n", "")
