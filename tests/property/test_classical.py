"""The classical schedulers' rules, step by step: ours decides as the models do, whatever comes (behaviours 19, 59, 60).

`make simulate-scheduler` plays far more of these workloads.
"""

from collections import Counter

import pytest

from tests.property.classical import play

NUM_WORKLOADS = 40


def play_all(rules: str) -> Counter[str]:
    happened: Counter[str] = Counter()
    for seed in range(NUM_WORKLOADS):
        happened += play(seed, rules)
    assert happened["preemptions"] > 20
    assert happened["prefix_cache_hits"] > 20
    return happened


@pytest.mark.parametrize("rules", ["nano_vllm", "mini_vllm"])
def test_c59_two_phases_are_those_of_nano_vllm_and_of_mini_vllm(rules: str) -> None:
    happened = play_all(rules)
    assert happened["steps_with_more_running"] > 20, "slots were tight"
    assert happened["steps_with_both"] == 0


def test_c60_mixed_steps_are_those_of_the_chapters_scheduler() -> None:
    happened = play_all("mixed")
    assert happened["steps_with_more_running"] == 0
    assert happened["steps_with_both"] > 20


@pytest.mark.parametrize("rules", ["nano_vllm", "mini_vllm", "mixed"])
@pytest.mark.parametrize("ours", ["nano_vllm", "mini_vllm", "mixed"])
def test_the_workloads_tell_the_rules_apart(rules: str, ours: str) -> None:
    """Compares all pairs of rules: two different sets of rules differ within a few workloads."""
    num_different = 0
    for seed in range(20):
        try:
            play(seed, rules, ours)
        except AssertionError:
            num_different += 1
    assert (num_different == 0) == (rules == ours)
