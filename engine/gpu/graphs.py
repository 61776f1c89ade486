"""Graphs: work on a device that is recorded once and then repeated with one call; knows not what the work is."""

from collections.abc import Callable
from typing import Any, Protocol

import torch

Replay = Callable[[], None]


class Recorder(Protocol):
    """Makes a repeatable thing of a function that only queues work, always the same on the same memory."""

    def record(self, work: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Replay]:
        """What the work gives, and what to call to have it there anew."""
        ...


class CudaGraphs:
    """Graphs that share one pool of memory: only one of them may be at work, and each overwrites what another gave.

    What they give lies in that pool too, which their replays keep. Nobody holds it beside them: else no graph could use
    the memory of another's logits, 64 MB for 256 rows of 128,256, and there are dozens of graphs.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()

    def record(self, work: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Replay]:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            work()  # compiles kernels and fills caches, neither of which can be recorded
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads, that of the hand-over above all, may call CUDA meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            given = work()
        return _unowned(given), graph.replay


class Repeats:
    """Does the work again each time: what graphs do, on a device that has none, or to find out whether one is wrong."""

    def record(self, work: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Replay]:
        given = work()

        def replay() -> None:
            given.copy_(work())

        return given, replay


def _unowned(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory without a share in keeping it."""
    view = _View(tensor.view(torch.uint8).__cuda_array_interface__)
    return torch.as_tensor(view, device=tensor.device).view(tensor.dtype)


class _View:
    """Memory by its address, for `torch.as_tensor`."""

    def __init__(self, interface: dict[str, Any]) -> None:
        self.__cuda_array_interface__ = interface


MIXED_SIZES = (16, 32, 64, 128, 192, 256, 384, 512)
"""Numbers of tokens, of steps with prompts in them, to record. Beyond, the GPU takes longer to compute a step than
Python to queue it (some 10 ms for 8 billion parameters); up to some 200, weights are most of what a step moves, and
padding is free."""


def mixed_sizes(max_num_batched_tokens: int) -> list[int]:
    """Those of MIXED_SIZES that steps can have, and the largest step itself if it is one."""
    sizes = [size for size in MIXED_SIZES if size < max_num_batched_tokens]
    return [*sizes, max_num_batched_tokens] if max_num_batched_tokens <= MIXED_SIZES[-1] else sizes


def decode_sizes(max_num_seqs: int) -> list[int]:
    """Numbers of decodes to record. A step is padded to the next: they are close where padding would cost most."""
    sizes = [size for size in (1, 2, 4) if size < max_num_seqs]
    sizes += range(8, min(max_num_seqs, 256), 8)
    sizes += range(256, max_num_seqs, 32)
    return [*sizes, max_num_seqs]
