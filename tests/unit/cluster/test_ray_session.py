"""What Ray reads from the environment before it is imported, and where it may be."""

import socket
from pathlib import Path

import pytest

from baton.cluster_config import ClusterConfig
from baton.errors import ClusterError
from cluster.on_ray.session import _probe, _root_cause, _short_folder, prepare_environment

JOINED = ClusterConfig(ray_address="head:6379")


def test_a_private_ray_stays_on_loopback_behind_a_fresh_secret(tmp_path: Path) -> None:
    environments: list[dict[str, str]] = [{}, {}]
    for environment in environments:
        prepare_environment(ClusterConfig(), environment, tmp_path)
    tokens = {environment.pop("RAY_AUTH_TOKEN") for environment in environments}
    assert len(tokens) == 2
    assert environments[0] == {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DEDUP_LOGS_SKIP_REGEX": ".",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_AUTH_MODE": "token",
    }


def test_a_joined_cluster_may_span_hosts_and_keeps_its_owners_choice(tmp_path: Path) -> None:
    environment = {"RAY_USAGE_STATS_ENABLED": "1", "RAY_DEDUP_LOGS_SKIP_REGEX": "quiet"}
    prepare_environment(JOINED, environment, tmp_path)
    assert environment == {"RAY_USAGE_STATS_ENABLED": "1", "RAY_DEDUP_LOGS_SKIP_REGEX": "quiet"}


def test_a_joined_cluster_gets_the_token_that_is_there(tmp_path: Path) -> None:
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("secret")
    environment: dict[str, str] = {}
    prepare_environment(JOINED, environment, tmp_path)
    assert environment["RAY_AUTH_MODE"] == "token"
    environment = {"RAY_AUTH_MODE": "disabled"}
    prepare_environment(JOINED, environment, tmp_path)
    assert environment["RAY_AUTH_MODE"] == "disabled"


def test_an_address_where_nobody_listens_is_known_at_once() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(
            ClusterError, match=rf"no Ray cluster answers at {address} \(cluster\.ray_address\)"
        ):
            _probe(address)
        taken.listen()
        _probe(address)


def test_addresses_only_ray_understands_are_left_to_ray() -> None:
    _probe("auto")


def test_a_long_temporary_folder_is_not_for_sockets() -> None:
    assert _short_folder("/tmp") == "/tmp"
    assert _short_folder("/home/me/tmp") == "/home/me/tmp"
    assert _short_folder("/var/folders/of/a/system/that/likes/long/names") == "/tmp"


def test_the_root_cause_is_one_line() -> None:
    error = ConnectionError("could not connect")
    error.__cause__ = RuntimeError("Last error: Traceback\n  File ...\nInvalidAuthToken: missing\n\n")
    assert _root_cause(error) == "InvalidAuthToken: missing"
    assert _root_cause(ValueError()) == "ValueError"
