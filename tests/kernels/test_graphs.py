"""A recorded graph uses only the memory of its pool and of its owner, whatever others do to PyTorch's cache."""

import gc
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from engine.batch import StepLimits
from engine.gpu.graphs import CudaGraphs
from tests.kernels.device_parts import make_parts

WORKSPACE_NBYTES = 32 * 2**20
"""cuBLAS' workspace on a Hopper."""
GENERATOR_NBYTES = 2 * 512
"""The seed and the offset of PyTorch's random numbers, which graphs own outside of the pool."""

pytestmark = pytest.mark.gpu


def num_bytes_outside() -> int:
    """Bytes in use outside of graphs' pools, on other streams than the default one."""
    return sum(
        segment["allocated_size"]
        for segment in torch.cuda.memory_snapshot()
        if tuple(segment["segment_pool_id"]) == (0, 0) and segment["stream"] != 0
    )


def disturb() -> list[torch.Tensor]:
    """Clears cuBLAS' workspaces, as torch.compile does, and takes the freed memory. Bytes of 255 are NaN in
    bfloat16."""
    torch._C._cuda_clearCublasWorkspaces()
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    sizes = [WORKSPACE_NBYTES] * 48 + [2 * 2**20] * 64 + [4096] * 256
    return [torch.full((size,), 255, dtype=torch.uint8, device="cuda") for size in sizes]


def assert_untouched(taken: list[torch.Tensor]) -> None:
    torch.cuda.synchronize()
    assert all(bool((memory == 255).all()) for memory in taken), "a replay wrote to others' memory"


def test_products_of_the_library_have_their_workspace_in_the_graphs_pool(device: torch.device) -> None:
    # Long sums, which cuBLAS divides.
    weight_OI = torch.randn(4096, 14336, device=device, dtype=torch.bfloat16)
    inputs = [torch.randn(rows, 14336, device=device, dtype=torch.bfloat16) for rows in (64, 56, 24, 1)]
    recorder, before = CudaGraphs(), num_bytes_outside()
    recorded = [recorder.record(partial(F.linear, x_TI, weight_OI)) for x_TI in inputs]
    assert num_bytes_outside() <= before + GENERATOR_NBYTES, "a graph uses memory that it does not own"

    def outputs() -> list[torch.Tensor]:
        found = []
        for given, replay in recorded:
            replay()
            found.append(given.clone())
        return found

    expected = outputs()
    taken = disturb()
    for _ in range(3):
        assert all(torch.equal(*pair) for pair in zip(outputs(), expected, strict=True))
    assert_untouched(taken)


def test_recorded_steps_own_their_memory(device: torch.device, tmp_path: Path) -> None:
    _, parts, _ = make_parts(tmp_path, device, StepLimits(64, 64, 64), dtype="bfloat16")
    parts.rehearse()
    before = num_bytes_outside()
    parts.record(CudaGraphs())
    assert num_bytes_outside() <= before + GENERATOR_NBYTES

    def logits() -> list[torch.Tensor]:
        return [parts.forward.rehearse(num_requests, 1).clone() for num_requests in (64, 40, 17, 3, 1)]

    expected = logits()
    taken = disturb()
    assert all(torch.equal(*pair) for pair in zip(logits(), expected, strict=True))
    assert_untouched(taken)
