"""DeepSeek-V3 in whole engines: its tokens are transformers', however its latents are kept, moved and shared."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from baton.request import EngineRequest
from baton.sampling import SamplingParams
from tests.factories.families import CASES
from tests.factories.models import make_model_dir
from tests.factories.whole_engines import EnginesOf, WholeEngine, hand_over

NUM_TOKENS = 10
SETTINGS: dict[str, Any] = {"max_model_len": 512, "num_blocks": 100, "block_size": 8}
LENGTHS = (3, 16, 49, 130)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    case = CASES["deepseek v3"]
    return make_model_dir(tmp_path_factory.mktemp("latents"), case.architecture, **case.overrides)


@pytest.fixture
def engines(folder: Path) -> Iterator[EnginesOf]:
    with EnginesOf(folder) as engines:
        yield engines


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[int, list[int]]:
    """Transformers' greedy tokens, by the prompt's length."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = {}
    for length in LENGTHS:
        whole = model.generate(
            torch.tensor([prompt_of(length)]),
            max_new_tokens=NUM_TOKENS,
            min_new_tokens=NUM_TOKENS,
            do_sample=False,
        )
        tokens[length] = whole[0, length:].tolist()
    return tokens


def prompt_of(length: int) -> list[int]:
    return [3 + (7 * length + 11 * at + at * at) % 290 for at in range(length)]


def request_of(length: int) -> EngineRequest:
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, min_tokens=NUM_TOKENS)
    return EngineRequest(
        request_id=f"r{length}", prompt_token_ids=tuple(prompt_of(length)), sampling_params=params
    )


def answers_of(engine: WholeEngine) -> dict[int, list[int]]:
    return {int(name[1:]): answer.token_ids for name, answer in engine.answers.items()}


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
    assert prefill.core.counters()["kv_bytes_sent"] == num_consumers * num_bytes
