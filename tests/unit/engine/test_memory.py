"""The arithmetic of a GPU's memory."""

import pytest

from baton.errors import ConfigError
from engine.gpu.memory import GIB, DeviceMemory


def memory(**sizes: int) -> DeviceMemory:
    gib = {"total": 100, "used_by_others": 1, "weights": 16, "activations": 2, "graphs": 1} | sizes
    return DeviceMemory(**{name: size * GIB for name, size in gib.items()}, utilization=0.9)


def test_what_is_left_becomes_blocks() -> None:
    assert memory().for_kv == 70 * GIB
    assert memory().num_blocks(GIB, num_needed=69, min_tokens=64 * 69) == 70


def test_one_block_too_few_shows_the_calculation() -> None:
    with pytest.raises(ConfigError) as refused:
        memory().num_blocks(GIB, num_needed=70, min_tokens=64 * 69 + 1)
    text = str(refused.value)
    assert "100.00 GiB x 0.9 - 1.00 (in use by other processes) - 16.00 (weights)" in text
    assert "leaves 70.00 GiB for KV" in text
    assert "4,417 tokens needs 70 blocks and the null block: 71 x 1024.00 MiB = 71.00 GiB" in text
    assert "scheduler.max_model_len" in text


def test_a_model_that_does_not_fit_shows_it_too() -> None:
    with pytest.raises(ConfigError, match=r"leaves -\d+.00 GiB"):
        memory(weights=100).num_blocks(GIB, num_needed=1, min_tokens=1)
