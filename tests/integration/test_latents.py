"""DeepSeek-V3 in whole engines: its tokens are transformers', however its latents are kept, moved and shared."""

from pathlib import Path
from typing import Any

import pytest

from baton.request import EngineRequest
from tests.factories.families import CASES
from tests.factories.greedy_answers import answers_of, greedy_by_transformers, greedy_request
from tests.factories.models import make_model_dir
from tests.factories.whole_engines import EnginesOf, hand_over

NUM_TOKENS = 10
SETTINGS: dict[str, Any] = {"max_model_len": 512, "num_blocks": 100, "block_size": 8}
LENGTHS = (3, 16, 49, 130)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    case = CASES["deepseek v3"]
    return make_model_dir(tmp_path_factory.mktemp("latents"), case.architecture, **case.overrides)


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[int, list[int]]:
    return greedy_by_transformers(folder, LENGTHS, NUM_TOKENS)


def request_of(length: int) -> EngineRequest:
    return greedy_request(length, NUM_TOKENS)


def test_alone_together_in_chunks_and_after_hits(engines: EnginesOf, expected: dict[int, list[int]]) -> None:
    engine = engines.start("d", **SETTINGS)
    engine.add(request_of(130))
    engines.run()
    assert answers_of(engine) == {130: expected[130]}
    engine.answers.clear()
    for length in LENGTHS:
        engine.add(request_of(length))
    engines.run()
    assert answers_of(engine) == expected
    assert engine.core.counters()["prefix_cache_hits"] == 128


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_small_pools_preempt_and_lose_no_token(
    engines: EnginesOf, expected: dict[int, list[int]], preemption: str
) -> None:
    tight = {**SETTINGS, "num_blocks": 24, "preemption": preemption, "max_num_batched_tokens": 16}
    engine = engines.start("d", **tight)
    for length in LENGTHS:
        engine.add(request_of(length))
    engines.run()
    assert answers_of(engine) == expected
    assert engine.core.counters()["swap_preemptions" if preemption == "swap" else "preemptions"] > 0


@pytest.mark.parametrize(("num_producers", "num_consumers"), [(1, 1), (2, 1), (1, 2)])
def test_a_hand_over_brings_each_rank_the_latents_once(
    engines: EnginesOf, expected: dict[int, list[int]], num_producers: int, num_consumers: int
) -> None:
    prefill = engines.start("p", num_producers, **SETTINGS)
    decode = engines.start("d", num_consumers, **SETTINGS)
    for length in LENGTHS:
        hand_over(prefill, decode, request_of(length))
    engines.run()
    assert answers_of(decode) == expected
    num_blocks = sum(-(-length // 8) for length in LENGTHS)
    num_bytes = num_blocks * decode.model.kv_block_shape(8).size_bytes
    assert prefill.executor.connector.counters()["kv_bytes_sent"] == num_consumers * num_bytes
