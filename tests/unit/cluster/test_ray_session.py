"""What Ray reads from the environment before it is imported."""

from baton.config import ClusterConfig
from cluster.ray_session import _short_folder, prepare_environment


def test_a_private_ray_stays_on_loopback_and_tells_nobody() -> None:
    environment: dict[str, str] = {}
    prepare_environment(ClusterConfig(), environment)
    assert environment == {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}


def test_a_joined_cluster_may_span_hosts_and_keeps_its_owners_choice() -> None:
    environment = {"RAY_USAGE_STATS_ENABLED": "1"}
    prepare_environment(ClusterConfig(ray_address="head:6379"), environment)
    assert environment == {"RAY_USAGE_STATS_ENABLED": "1"}


def test_a_long_temporary_folder_is_not_for_sockets() -> None:
    assert _short_folder("/tmp") == "/tmp"
    assert _short_folder("/home/me/tmp") == "/home/me/tmp"
    assert _short_folder("/var/folders/of/a/system/that/likes/long/names") == "/tmp"
