"""GpuTimer: how long a GPU takes for short pieces of work; knows nothing about the work."""

from collections.abc import Callable, Sequence
from statistics import median

import torch

from engine.gpu.graphs import CudaGraphs, Recorder
from engine.layers.triton_linear import Work

MIN_LAUNCHES = 64
"""A graph has at least this many launches, so that the time to start the graph does not matter."""
NUM_REPLAYS = 5


class GpuTimer:
    """Measures times on the current device; a `Timer` of engine/layers/triton_linear.py."""

    def __init__(self) -> None:
        self._recorder: Recorder = CudaGraphs()

    @torch.inference_mode()
    def __call__(self, works: Sequence[Work]) -> float:
        """Seconds for one run of all works. They run in turn, so that no work finds its large inputs in the cache.

        Replays a graph, as a step does: Python would queue the shortest works more slowly than the GPU runs them.
        Returns the median of a few replays.
        """
        num_turns = -(-MIN_LAUNCHES // len(works))
        _, replay = self._recorder.record(lambda: [work() for _ in range(num_turns) for work in works][-1])
        return median(gpu_seconds(replay, NUM_REPLAYS)) / num_turns


def gpu_seconds(work: Callable[[], object], count: int) -> list[float]:
    """How long the current stream takes for each of `count` runs."""
    times_s: list[float] = []
    for _ in range(count):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        work()
        end.record()
        end.synchronize()
        times_s.append(begin.elapsed_time(end) / 1e3)
    return times_s
