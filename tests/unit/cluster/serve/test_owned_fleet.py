"""What a deployment asks of a private Ray, and what it takes from the fleet that it adopts."""

import io
from typing import Any

import pytest
from rich.console import Console

from baton.config import BatonConfig
from cluster.serve.owned_fleet import most_ranks, with_choices_of
from cluster.serve.screen import Screen
from engine.loading import dtype
from tests.factories.control_api import MODEL_PATH, StandingFleet, packed


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


@pytest.mark.parametrize("asked", ["auto", "bfloat16"])
@pytest.mark.parametrize("there", ["bfloat16", "float32"])
async def test_the_data_type_is_that_of_the_fleet_and_said_if_it_is_not_the_one_chosen_here(
    asked: str, there: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dtype, "cpu_flags", lambda: frozenset({"avx512_bf16"}))
    fleet = StandingFleet(packed(BatonConfig.from_mapping({"model": {"dtype": there}})))
    ours = BatonConfig.from_mapping({"model": {"dtype": asked}, "gateway": {"max_in_flight": 7}})
    said = io.StringIO()
    agreed = await with_choices_of(fleet, ours, MODEL_PATH, Screen(Console(file=said, width=200)))
    assert agreed.model.dtype == there
    assert agreed.gateway == ours.gateway
    assert said.getvalue().split() == (
        [] if there == "bfloat16" else ["model", "in", "float32,", "as", "the", "fleet", "was", "started"]
    )
