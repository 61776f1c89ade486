"""Whole engines as on a GPU whose model has several KV groups: they give blocks back, and take them from CPUs' engines.

`test_device_engine.py` compares tokens on a GPU, too; here the kernels are always interpreted.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

if torch.cuda.is_available():
    pytest.skip("these engines interpret their kernels", allow_module_level=True)

from baton.kv_groups import KVGroups
from tests.factories.greedy_answers import answers_of, greedy_by_transformers, greedy_request
from tests.factories.models import make_model_dir
from tests.factories.whole_engines import EnginesOf, hand_over
from tests.kernels.device_parts import OF_PADDED_ROWS, SMALL
from tests.kernels.test_device_engine import IN_GROUPS

WINDOW, NUM_TOKENS, BLOCK_SIZE = 24, 3, 8
GROUPS = KVGroups(1, 2, WINDOW)
LONGEST = 56
LENGTHS = (3, 24, LONGEST)
SETTINGS: dict[str, Any] = {"max_model_len": 128, "block_size": BLOCK_SIZE, "num_blocks": 100}

pytestmark = OF_PADDED_ROWS


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = SMALL | IN_GROUPS | {"vocab_size": 300}
    return make_model_dir(tmp_path_factory.mktemp("windows"), "qwen2", **shape)


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[int, list[int]]:
    return greedy_by_transformers(folder, LENGTHS, NUM_TOKENS)


def test_c27_blocks_that_left_the_window_serve_again(
    engines: EnginesOf, expected: dict[int, list[int]]
) -> None:
    """The pool can hold the longest request only because the request gives its windowed blocks back. Afterwards, its
    prefix can be hit."""
    most_of_window = -(-(WINDOW - 1 + 16) // BLOCK_SIZE) + 1
    num_blocks = -(-(LONGEST + NUM_TOKENS) // BLOCK_SIZE) + 2 * most_of_window
    tight = {"num_blocks": num_blocks + 1, "max_num_batched_tokens": 16}
    engine = engines.start("d", is_interpreted=True, **(SETTINGS | tight))
    assert engine.model.layer_groups.groups == GROUPS
    assert num_blocks < 3 * -(-LONGEST // BLOCK_SIZE)
    for num_hits in (0, 48):
        engine.add(greedy_request(LONGEST, NUM_TOKENS))
        engines.run()
        assert answers_of(engine) == {LONGEST: expected[LONGEST]}
        assert engine.core.counters()["prefix_cache_hits"] == num_hits
        engine.answers.clear()
    assert engine.core.counters().get("preemptions", 0) == 0


@pytest.mark.parametrize(
    ("from_gpu", "to_gpu"),
    [(True, True), (False, True), pytest.param(True, False, marks=pytest.mark.by_hand)],
    ids=["gpu to gpu", "cpu to gpu", "gpu to cpu"],
)
def test_c27_a_hand_over_sends_only_what_windows_reach(
    engines: EnginesOf, expected: dict[int, list[int]], *, from_gpu: bool, to_gpu: bool
) -> None:
    """Engines of both kinds agree on what a block is, and on what has left the window."""
    prefill = engines.start("p", is_interpreted=from_gpu, **SETTINGS)
    decode = engines.start("d", is_interpreted=to_gpu, **SETTINGS)
    for length in LENGTHS:
        hand_over(prefill, decode, greedy_request(length, NUM_TOKENS))
    engines.run()
    assert answers_of(decode) == expected
    num_bytes = decode.model.kv_block_shape(BLOCK_SIZE).size_bytes
    num_blocks = sum(len(GROUPS.needed_entries(length, BLOCK_SIZE)) for length in LENGTHS)
    assert decode.executor.connector.counters()["kv_bytes_received"] == num_blocks * num_bytes
    assert num_blocks < sum(3 * -(-length // BLOCK_SIZE) for length in LENGTHS)
