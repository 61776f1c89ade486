"""Behaviour 27: a model with windows and full attention in whole engines: its tokens, its blocks, its hand-overs."""

from pathlib import Path
from typing import Any

import pytest

from baton.kv_groups import KVGroups
from baton.request import EngineRequest
from tests.factories.families import GPT_OSS
from tests.factories.greedy_answers import answers_of, greedy_by_transformers, greedy_request
from tests.factories.models import make_model_dir
from tests.factories.whole_engines import EnginesOf, hand_over

WINDOW, NUM_LAYERS, NUM_TOKENS = 20, 6, 12
SETTINGS: dict[str, Any] = {"max_model_len": 512, "num_blocks": 400, "block_size": 8}
LENGTHS = (3, 20, 21, 100, 300)


MODELS: dict[str, dict[str, Any]] = {"qwen2": {"use_sliding_window": True}, "gpt_oss": GPT_OSS}
"""gpt-oss has a sink for each head."""


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers of six have full attention: one group with these, and two groups with windows."""
    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    shape = {"num_hidden_layers": NUM_LAYERS, "sliding_window": WINDOW, "layer_types": kinds}
    return make_model_dir(
        tmp_path_factory.mktemp("windows"), request.param, **(MODELS[request.param] | shape)
    )


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[int, list[int]]:
    return greedy_by_transformers(folder, LENGTHS, NUM_TOKENS)


def request_of(length: int) -> EngineRequest:
    return greedy_request(length, NUM_TOKENS)


def test_c27_layers_with_and_without_windows_give_transformers_tokens(
    engines: EnginesOf, expected: dict[int, list[int]]
) -> None:
    engine = engines.start("d", **SETTINGS)
    assert engine.model.layer_groups.groups == KVGroups(1, 2, WINDOW)
    for length in LENGTHS:
        engine.add(request_of(length))
    engines.run()
    assert answers_of(engine) == expected


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_c27_a_hand_over_sends_only_what_windows_reach(
    engines: EnginesOf, expected: dict[int, list[int]], num_ranks: int
) -> None:
    prefill, decode = engines.start("p", num_ranks, **SETTINGS), engines.start("d", **SETTINGS)
    for length in LENGTHS:
        hand_over(prefill, decode, request_of(length))
    engines.run()
    assert answers_of(decode) == expected
    groups, num_bytes = decode.model.layer_groups.groups, decode.model.kv_block_shape(8).size_bytes
    num_blocks = sum(len(groups.needed_entries(length, 8)) for length in LENGTHS)
    assert decode.executor.connector.counters()["kv_bytes_received"] == num_blocks * num_bytes
    assert num_blocks <= 0.6 * sum(3 * -(-length // 8) for length in LENGTHS)


def test_c27_windows_give_back_blocks_and_full_attention_keeps_them(engines: EnginesOf) -> None:
    engine = engines.start("d", **SETTINGS)
    engine.add(request_of(300))
    held = []
    while engine.scheduler.has_requests():
        engines.step()
        held.append(engine.core.scheduler.kv_block_counts().referenced)
    in_parts, most_of_a_window = -(-300 // 8), -(-(WINDOW - 1 + 48) // 8) + 1
    assert max(held) <= in_parts + 2 + 2 * most_of_a_window
    assert max(held) >= in_parts, "full attention keeps all"


def test_c27_a_conversation_hits_and_goes_on_with_the_same_tokens(
    engines: EnginesOf, expected: dict[int, list[int]]
) -> None:
    engine = engines.start("d", **SETTINGS)
    for _ in range(2):
        engine.add(request_of(300))
        engines.run()
        assert answers_of(engine) == {300: expected[300]}
        engine.answers.clear()
    assert engine.core.counters()["prefix_cache_hits"] == 296


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_c27_small_pools_preempt_and_lose_no_token(
    engines: EnginesOf, expected: dict[int, list[int]], preemption: str
) -> None:
    tight = {**SETTINGS, "num_blocks": 62, "preemption": preemption, "max_num_batched_tokens": 16}
    engine = engines.start("d", **tight)
    for length in (300, 100, 20):
        engine.add(request_of(length))
    engines.run()
    assert answers_of(engine) == {length: expected[length] for length in (300, 100, 20)}
    assert engine.core.counters()["swap_preemptions" if preemption == "swap" else "preemptions"] > 0
