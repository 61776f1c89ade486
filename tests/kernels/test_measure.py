"""A worker's measurements at start: bytes of its graphs, by the real forward pass, and the size of its chunks."""

import logging
import weakref
from collections.abc import Callable
from itertools import chain, repeat
from pathlib import Path

import pytest
import torch

from engine.batch import StepLimits
from engine.gpu.device_parts import DeviceParts
from engine.gpu.graphs import Replay, decode_sizes
from engine.gpu.measure import CHUNKS, chosen_chunk, graphs_bytes
from tests.kernels.device_parts import make_parts

LIMITS = StepLimits(max_num_seqs=20, max_num_batched_tokens=40, max_model_len=64)
NUM_MIXED, NUM_DECODES = 3, 6
FREE = 10_000


class Costs:
    """A recorder of graphs that take given numbers of bytes, from their recording until they are freed."""

    def __init__(self, *num_bytes: int) -> None:
        """The last number also applies to all later graphs."""
        self._num_bytes = chain(num_bytes[:-1], repeat(num_bytes[-1]))
        self.free = FREE

    def record(self, work: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Replay]:
        num_bytes = next(self._num_bytes)
        self.free -= num_bytes

        def replay() -> None:
            raise AssertionError("nothing is computed")

        weakref.finalize(replay, self._give_back, num_bytes)
        return torch.empty(0), replay

    def _give_back(self, num_bytes: int) -> None:
        self.free += num_bytes


@pytest.fixture
def parts(tmp_path: Path, device: torch.device) -> DeviceParts:
    _, parts, _ = make_parts(tmp_path, device, LIMITS)
    return parts


def test_two_graphs_of_each_kind_estimate_all(parts: DeviceParts) -> None:
    assert len(parts.mixed_sizes) == NUM_MIXED
    assert len(decode_sizes(LIMITS.max_num_seqs)) == NUM_DECODES
    costs = Costs(1000, 30, 200, 7)
    reckoned = graphs_bytes(parts, costs, lambda: costs.free)
    assert reckoned == 1000 + (NUM_MIXED - 1) * 30 + 200 + (NUM_DECODES - 1) * 7


def test_the_estimate_is_what_all_graphs_take(parts: DeviceParts) -> None:
    """If the largest graph of a kind costs more, and the others cost the same."""
    costs = Costs(1000, *[30] * (NUM_MIXED - 1), 200, 7)
    parts.record(costs)
    taken = FREE - costs.free
    measured = Costs(1000, 30, 200, 7)
    assert graphs_bytes(parts, measured, lambda: measured.free) == taken


def test_a_graph_without_new_memory_counts_as_nothing(parts: DeviceParts) -> None:
    costs = Costs(1000, -50, 200, 7)
    assert graphs_bytes(parts, costs, lambda: costs.free) == 1000 + 200 + (NUM_DECODES - 1) * 7


@pytest.mark.parametrize(
    ("rates", "chosen"),
    [
        ({512: 50.0, 1024: 94.0, 2048: 96.0, 4096: 100.0, 8192: 99.0}, 2048),
        ({512: 95.0, 1024: 100.0, 2048: 100.0, 4096: 100.0, 8192: 100.0}, 512),
        ({512: 1.0, 1024: 2.0, 2048: 4.0, 4096: 8.0, 8192: 16.0}, 8192),
    ],
)
def test_the_smallest_chunk_that_is_fast_enough_is_chosen_and_the_log_shows_why(
    rates: dict[int, float], chosen: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        assert chosen_chunk(StepLimits(256, 8192, 131_072), rates.__getitem__) == chosen
    [record] = caplog.records
    text = record.getMessage()
    assert f"chunks of {chosen} tokens" in text
    assert all(f"{chunk}: {rate:,.0f}" in text for chunk, rate in rates.items())


def test_no_chunk_is_larger_than_a_step_or_a_request() -> None:
    timed: list[int] = []

    def throughput(chunk: int) -> float:
        timed.append(chunk)
        return float(chunk)

    assert chosen_chunk(StepLimits(256, 8192, 3000), throughput) == 3000
    assert timed == [*CHUNKS[:3], 3000]
