"""A worker's measurements at start: bytes of its graphs, by the real forward pass, and the size of its chunks."""

import logging
import weakref
from collections.abc import Callable, Sequence
from itertools import chain, repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.batch import StepLimits
from engine.collectives import SINGLE_RANK, Collectives, SilentRank
from engine.gpu import measure as measuring
from engine.gpu.device_parts import DeviceParts
from engine.gpu.graphs import Replay, decode_sizes
from engine.gpu.measure import CHUNKS, COLLECTIVES_BYTES, chosen_chunk, graphs_bytes, measure
from engine.kv_cache import KVBlockShape
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
    """This holds if the largest graph of a kind costs more, and all others cost the same."""
    costs = Costs(1000, *[30] * (NUM_MIXED - 1), 200, 7)
    parts.record(costs)
    taken = FREE - costs.free
    measured = Costs(1000, 30, 200, 7)
    assert graphs_bytes(parts, measured, lambda: measured.free) == taken


def test_a_graph_without_new_memory_counts_as_nothing(parts: DeviceParts) -> None:
    costs = Costs(1000, -50, 200, 7)
    assert graphs_bytes(parts, costs, lambda: costs.free) == 1000 + 200 + (NUM_DECODES - 1) * 7


class PretendedGpu:
    """A pretended GPU's memory, and the parts of a worker that use it."""

    TOTAL, OTHERS, WEIGHTS, BUFFERS, STEP, GRAPH = 10_000, 1000, 2000, 100, 30, 50

    def __init__(self) -> None:
        self._kept, self._cached, self._graphs = self.WEIGHTS, 0, {True: 0, False: 0}
        self._peak = 0
        self.mixed_sizes = (16, 32, 40)
        self.limits = LIMITS
        self.forward = self

    @property
    def reserved(self) -> int:
        return self._kept + self._cached + sum(self._graphs.values())

    def stand_in(self, patch: pytest.MonkeyPatch) -> None:
        for name, answer in (
            ("mem_get_info", lambda _: (self.TOTAL - self.OTHERS - self.reserved, self.TOTAL)),
            ("memory_reserved", lambda _: self.reserved),
            ("max_memory_reserved", lambda _: self._peak),
            ("reset_peak_memory_stats", lambda _: self._note_peak(0)),
            ("empty_cache", self._empty_cache),
            ("synchronize", lambda _: None),
        ):
            patch.setattr(torch.cuda, name, answer)
        patch.setattr(measuring, "make_device_parts", self._make)
        patch.setattr(measuring, "CudaGraphs", lambda: None)
        patch.setattr(measuring, "gpu_seconds", self._run)

    def rehearse(self, *_: int) -> None:
        self._cached = self.STEP
        self._note_peak(self._peak)

    def record(
        self,
        sizes: Sequence[int],
        _: object,
        on_progress: Callable[[int], None] = lambda _: None,
        *,
        has_chunks: bool,
    ) -> None:
        """As in PyTorch, a recording first returns what steps left in the cache."""
        self._graphs[has_chunks] = 0
        for count in range(1, 1 + len(sizes)):
            self._empty_cache()
            self._graphs[has_chunks] += self.GRAPH
            self._note_peak(self._peak)
            on_progress(count)

    def _make(self, *_: object) -> "PretendedGpu":
        self._kept += self.BUFFERS
        return self

    def _run(self, work: Callable[[], object], count: int) -> list[float]:
        work()
        return [1.0] * count

    def _empty_cache(self) -> None:
        self._cached = 0

    def _note_peak(self, former: int) -> None:
        self._peak = max(former, self.reserved)


@pytest.mark.parametrize("collectives", [SINGLE_RANK, SilentRank(0, 2)], ids=["one rank", "two ranks"])
@pytest.mark.parametrize(("uses_graphs", "wants_chunk"), [(True, True), (True, False), (False, True)])
def test_each_byte_is_counted_once(
    collectives: Collectives, uses_graphs: bool, wants_chunk: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The graphs that time chunks are larger than a step, but are not kept."""
    gpu, model = PretendedGpu(), SimpleNamespace(device=torch.device("cpu"), collectives=collectives)
    model.kv_block_shape = lambda size: KVBlockShape(1, 1, size, 2, torch.float32)
    gpu.stand_in(monkeypatch)
    given: Any = model
    found = measure(given, 16, LIMITS, 0.9, uses_graphs=uses_graphs, wants_chunk=wants_chunk)
    assert found.chunk == (40 if wants_chunk else None)
    memory = found.memory
    assert (memory.total, memory.used_by_others, memory.weights) == (gpu.TOTAL, gpu.OTHERS, gpu.WEIGHTS)
    assert memory.activations == gpu.BUFFERS + gpu.STEP
    num_graphs = NUM_MIXED + NUM_DECODES if uses_graphs else 0
    assert memory.graphs == num_graphs * gpu.GRAPH + (COLLECTIVES_BYTES if collectives.size > 1 else 0)


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
