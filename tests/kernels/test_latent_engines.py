"""Whole engines as on a GPU over latents: they swap them, and hand them over to and from CPUs' engines.

`test_families.py` compares tokens on a GPU, too; here the kernels are always interpreted.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

if torch.cuda.is_available():
    pytest.skip("these engines interpret their kernels", allow_module_level=True)

from tests.factories.families import DEEPSEEK_V3
from tests.factories.greedy_answers import answers_of, greedy_by_transformers, greedy_request
from tests.factories.models import make_model_dir
from tests.factories.whole_engines import EnginesOf, WholeEngine, hand_over
from tests.kernels.device_parts import SMALL

NUM_TOKENS, BLOCK_SIZE = 3, 8
LENGTHS = (3, 24, 37)
SETTINGS: dict[str, Any] = {"max_model_len": 64, "block_size": BLOCK_SIZE, "num_blocks": 40}

# Rows that pad a step contain arbitrary memory; their results are not used.
pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers with an MLP: other tests have experts."""
    shape = SMALL | DEEPSEEK_V3 | {"num_key_value_heads": 2, "num_hidden_layers": 2, "vocab_size": 300}
    return make_model_dir(
        tmp_path_factory.mktemp("latents"), "deepseek_v3", **(shape | {"first_k_dense_replace": 2})
    )


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[int, list[int]]:
    return greedy_by_transformers(folder, LENGTHS, NUM_TOKENS)


def start(
    engines: EnginesOf, name: str, num_ranks: int = 1, *, on_gpu: bool = True, **settings: Any
) -> WholeEngine:
    """An engine as on a GPU, or one on a CPU."""
    from tests.factories.interpreted_engine import (
        interpret_kernels,
    )  # the process that compiles kernels imports this file, too

    with pytest.MonkeyPatch.context() as patch:
        if on_gpu:
            interpret_kernels(patch)
        return engines.start(name, num_ranks, **(SETTINGS | settings))


@pytest.mark.parametrize(
    ("from_gpu", "to_gpu", "num_consumers"),
    [pytest.param(True, True, 1, marks=pytest.mark.by_hand), (False, True, 1), (True, False, 2)],
    ids=["gpu to gpu", "cpu to gpu", "gpu to two ranks on cpu"],
)
def test_a_hand_over_brings_each_rank_the_latents_once(
    engines: EnginesOf, expected: dict[int, list[int]], *, from_gpu: bool, to_gpu: bool, num_consumers: int
) -> None:
    prefill = start(engines, "p", on_gpu=from_gpu)
    decode = start(engines, "d", num_consumers, on_gpu=to_gpu)
    for length in LENGTHS:
        hand_over(prefill, decode, greedy_request(length, NUM_TOKENS))
    engines.run()
    assert answers_of(decode) == expected
    num_blocks = sum(-(-length // BLOCK_SIZE) for length in LENGTHS)
    num_bytes = num_blocks * decode.model.kv_block_shape(BLOCK_SIZE).size_bytes
    assert prefill.executor.connector.counters()["kv_bytes_sent"] == num_consumers * num_bytes


def test_latents_that_were_swapped_out_come_back(engines: EnginesOf, expected: dict[int, list[int]]) -> None:
    tight: dict[str, Any] = {
        "num_blocks": 9,
        "preemption": "swap",
        "max_num_batched_tokens": 16,
        "num_swap_blocks": 12,
    }
    engine = start(engines, "d", **tight)
    for length in LENGTHS:
        engine.add(greedy_request(length, NUM_TOKENS))
    engines.run()
    assert answers_of(engine) == expected
    assert engine.core.counters()["swap_preemptions"] > 0
