"""What a deployment asks of a private Ray."""

from typing import Any

import pytest

from baton.config import BatonConfig
from cluster.serve.owned_fleet import most_ranks


@pytest.mark.parametrize(
    ("sections", "count"),
    [
        ({"cluster": {"prefill": 1, "decode": 2}}, 3),
        ({"cluster": {"prefill": 1, "decode": 2, "decode_tensor_parallel": 4}}, 9),
        ({"autoscaling": {"mode": "dry_run", "max_decode": 5}}, 2),
        ({"autoscaling": {"mode": "on", "max_decode": 5}}, 6),  # else none that is added would ever find room
        ({"engine": {"tensor_parallel": 2}, "autoscaling": {"mode": "on", "max_decode": 5}}, 12),
    ],
)
def test_a_private_ray_has_room_for_the_most_workers(sections: dict[str, Any], count: int) -> None:
    assert most_ranks(BatonConfig.from_mapping(sections)) == count
