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
from tests.factories.whole_engines import EnginesOf, hand_over
from tests.kernels.device_parts import OF_PADDED_ROWS, SMALL

NUM_TOKENS, BLOCK_SIZE = 3, 8
LENGTHS = (3, 24, 37)
SETTINGS: dict[str, Any] = {"max_model_len": 64, "block_size": BLOCK_SIZE, "num_blocks": 40}

pytestmark = OF_PADDED_ROWS


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


@pytest.mark.parametrize(
    ("from_gpu", "to_gpu", "num_consumers"),
    [pytest.param(True, True, 1, marks=pytest.mark.by_hand), (False, True, 1), (True, False, 2)],
    ids=["gpu to gpu", "cpu to gpu", "gpu to two ranks on cpu"],
)
def test_a_hand_over_brings_each_rank_the_latents_once(
    engines: EnginesOf, expected: dict[int, list[int]], *, from_gpu: bool, to_gpu: bool, num_consumers: int
) -> None:
    prefill = engines.start("p", is_interpreted=from_gpu, **SETTINGS)
    decode = engines.start("d", num_consumers, is_interpreted=to_gpu, **SETTINGS)
    for length in LENGTHS:
        hand_over(prefill, decode, greedy_request(length, NUM_TOKENS))
    engines.run()
    assert answers_of(decode) == expected
    num_blocks = sum(-(-length // BLOCK_SIZE) for length in LENGTHS)
    num_bytes = num_blocks * decode.model.kv_block_shape(BLOCK_SIZE).size_bytes
    assert prefill.executor.connector.counters()["kv_bytes_sent"] == num_consumers * num_bytes


def test_latents_that_were_swapped_out_come_back(engines: EnginesOf, expected: dict[int, list[int]]) -> None:
    tight = {"num_blocks": 9, "preemption": "swap", "max_num_batched_tokens": 16, "num_swap_blocks": 12}
    engine = engines.start("d", is_interpreted=True, **(SETTINGS | tight))
    for length in LENGTHS:
        engine.add(greedy_request(length, NUM_TOKENS))
    engines.run()
    assert answers_of(engine) == expected
    assert engine.core.counters()["swap_preemptions"] > 0
