"""What the section `kv_transfer` derives from its keys."""

from pathlib import Path

import pytest

from baton.config import BatonConfig


@pytest.mark.parametrize(("lease_s", "heartbeat_s"), [(10.0, 0.5), (1.0, 0.25)])
def test_a_consumer_sends_eight_heartbeats_per_timeout_and_four_per_lease(
    lease_s: float, heartbeat_s: float
) -> None:
    config = BatonConfig.from_mapping({"kv_transfer": {"lease_s": lease_s, "peer_timeout_s": 4.0}})
    assert config.kv_transfer.heartbeat_s == heartbeat_s


@pytest.mark.parametrize("checksum", ["auto", "on", "off"])
def test_checksum_needs_no_quotes_in_yaml(tmp_path: Path, checksum: str) -> None:
    path = tmp_path / "baton.yaml"
    path.write_text(f"kv_transfer: {{checksum: {checksum}}}\n")
    assert BatonConfig.from_yaml(path).kv_transfer.checksum == checksum
