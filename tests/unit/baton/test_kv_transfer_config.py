"""What the section `kv_transfer` derives from its keys."""

import pytest

from baton.config import BatonConfig


@pytest.mark.parametrize(("lease_s", "heartbeat_s"), [(10.0, 0.5), (1.0, 0.25)])
def test_a_consumer_sends_eight_heartbeats_per_timeout_and_four_per_lease(
    lease_s: float, heartbeat_s: float
) -> None:
    config = BatonConfig.from_mapping({"kv_transfer": {"lease_s": lease_s, "peer_timeout_s": 4.0}})
    assert config.kv_transfer.heartbeat_s == heartbeat_s
