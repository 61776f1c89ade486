"""Graphs: work on a device, recorded once and repeated with one call; which sizes of steps are recorded."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from engine.model_config import ModelArchitecture

Replay = Callable[[], None]


class Recorder(Protocol):
    """Records a function that only queues work, always the same work on the same memory."""

    def record(self, work: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Replay]:
        """Returns the work's result, and a function that computes it again in the same memory."""
        ...


class CudaGraphs:
    """Graphs that share one pool of memory: only one may run at a time, and each overwrites another's result.

    Results are in the pool, too. The replays keep the pool alive. No tensor owns the memory of a result, so
    all graphs can use the same memory. Otherwise, each of dozens of graphs would need its own memory for
    logits: 64 MB for 256 rows of 128,256.
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
        with (
            _own_workspaces(),
            # Other threads, above all the transfer thread, may call CUDA meanwhile.
            torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"),
        ):
            result = work()
        return _unowned(result), graph.replay


@contextmanager
def _own_workspaces() -> Iterator[None]:
    """Within this context, cuBLAS allocates new workspaces, in the pool of the graph that is recorded.

    PyTorch keeps one workspace for each stream. A graph stores the workspace's address, but does not keep its memory.
    If other code, such as torch.compile, cleared the workspaces, a graph would use memory that belongs to other
    tensors. Within the context, no other thread may compute products.
    """
    torch._C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()


class Repeater:
    """Repeats the work itself: for a device without graphs, or to check whether a graph is wrong."""

    def record(self, work: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Replay]:
        result = work()

        def replay() -> None:
            result.copy_(work())

        return result, replay


def _unowned(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor over the same memory, which it does not own."""
    view = _View(tensor.view(torch.uint8).__cuda_array_interface__)
    return torch.as_tensor(view, device=tensor.device).view(tensor.dtype)


class _View:
    """Memory by its address, for `torch.as_tensor`."""

    def __init__(self, interface: dict[str, Any]) -> None:
        self.__cuda_array_interface__ = interface


MIXED_SIZES = (16, 32, 64, 128, 192, 256, 384, 512)
"""Numbers of tokens for which steps with prompts are recorded. With up to about 200 tokens, a step mostly reads
weights, so padding is free."""
LARGER_SIZES = (640, 768, 896, 1024, 1280, 1536, 1792, 2048)
"""Further numbers, for models whose steps Python queues more slowly than the GPU computes them."""
WEIGHTS_PER_LAYER = 1.3e11
"""How many products of a weight with a token an H200 computes while Python queues a layer: Python queues some ten
launches in 0.4 ms, and the GPU computes 600 TFLOP/s. A slower GPU has less use for larger graphs, whose padding costs
time."""


def mixed_sizes(max_num_batched_tokens: int, architecture: ModelArchitecture, num_ranks: int) -> list[int]:
    """The numbers of tokens for which steps with prompts are recorded.

    These are the MIXED_SIZES, and those LARGER_SIZES for which a graph saves time, as far as they are smaller than the
    largest step. The largest step's own size is also recorded, unless it exceeds all these sizes.

    Still larger steps take the GPU longer than Python needs to queue them, so a graph would save nothing. For
    Llama-3.1-8B, these are steps of more than 512 tokens. All ranks record the same sizes: a rank that pads a step, and
    one that does not, would sum tensors of different sizes.
    """
    weights = max(1, architecture.weights_per_token // num_ranks)
    most = int(WEIGHTS_PER_LAYER * architecture.num_layers / weights)
    sizes = (*MIXED_SIZES, *(size for size in LARGER_SIZES if size <= most))
    smaller = [size for size in sizes if size < max_num_batched_tokens]
    return [*smaller, max_num_batched_tokens] if max_num_batched_tokens <= sizes[-1] else smaller


def decode_sizes(max_num_seqs: int) -> list[int]:
    """Numbers of decodes to record. A step is padded to the next size; sizes are close together where padding costs
    most."""
    sizes = [size for size in (1, 2, 4) if size < max_num_seqs]
    sizes += range(8, min(max_num_seqs, 256), 8)
    sizes += range(256, max_num_seqs, 32)
    return [*sizes, max_num_seqs]
