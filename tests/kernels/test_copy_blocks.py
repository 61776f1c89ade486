"""Blocks from pool to pool."""

import pytest
import torch

from engine.kernels.copy_blocks import MAX_HOST_PROGRAMS, VECTORS_PER_CHUNK, copy_blocks
from tests.kernels.references import copy_blocks_reference


def empty_launch(block_bytes: int) -> None:
    pool_NB = torch.empty(2, block_bytes, dtype=torch.uint8)
    copy_blocks(pool_NB, torch.empty_like(pool_NB), torch.tensor([[0, 1]], dtype=torch.int32))


LAUNCHES = {
    "Llama-3.1-8B, blocks of 16 tokens": lambda: empty_launch(32 * 2 * 8 * 16 * 128 * 2),
    "Qwen3-8B, blocks of 16 tokens": lambda: empty_launch(36 * 2 * 8 * 16 * 128 * 2),
    "SmolLM2-135M, blocks of 16 tokens": lambda: empty_launch(30 * 2 * 3 * 16 * 64 * 2),
    "blocks of 1,008 bytes": lambda: empty_launch(1008),
}
RARE = ("Qwen3-8B, blocks of 16 tokens", "SmolLM2-135M, blocks of 16 tokens")


@pytest.mark.parametrize("block_bytes", [16, 48, 16 * VECTORS_PER_CHUNK, 16 * (VECTORS_PER_CHUNK + 1)])
def test_copies_what_the_pairs_say_and_nothing_else(
    block_bytes: int, device: torch.device, generator: torch.Generator
) -> None:
    source_NB = random_bytes(generator, 5, block_bytes).to(device)
    actual_MB = random_bytes(generator, 7, block_bytes).to(device)
    expected_MB = actual_MB.clone()
    pairs_P2 = torch.tensor([[4, 0], [1, 6], [1, 3]], dtype=torch.int32, device=device)
    copy_blocks(source_NB, actual_MB, pairs_P2)
    copy_blocks_reference(source_NB, expected_MB, pairs_P2)
    torch.testing.assert_close(actual_MB, expected_MB)
    torch.testing.assert_close(actual_MB[[0, 6, 3]], source_NB[[4, 1, 1]])


def test_programs_take_several_chunks_each(device: torch.device, generator: torch.Generator) -> None:
    num_blocks = MAX_HOST_PROGRAMS + 5
    pool_NB = random_bytes(generator, num_blocks, 32)
    if device.type == "cuda":
        pool_NB = pool_NB.pin_memory()
    target_MB = torch.zeros(num_blocks, 32, dtype=torch.uint8, device=device)
    order_N = torch.randperm(num_blocks, generator=generator)
    pairs_P2 = torch.stack((order_N, torch.arange(num_blocks)), 1).to(torch.int32)
    copy_blocks(pool_NB, target_MB, pairs_P2.to(device))
    torch.testing.assert_close(target_MB.cpu(), pool_NB[order_N])
    back_NB = torch.zeros_like(pool_NB, pin_memory=device.type == "cuda")
    copy_blocks(target_MB, back_NB, pairs_P2[:, [1, 0]].contiguous().to(device))
    if device.type == "cuda":
        torch.cuda.synchronize()
    torch.testing.assert_close(back_NB, pool_NB)


def test_no_pairs_are_no_launch(device: torch.device) -> None:
    pool_NB = torch.zeros(1, 16, dtype=torch.uint8, device=device)
    copy_blocks(pool_NB, pool_NB, torch.empty(0, 2, dtype=torch.int32, device=device))
    assert (pool_NB == 0).all()


@pytest.mark.parametrize("block_bytes", [(16, 32), (24, 24)])
def test_refuses_unequal_and_ragged_blocks(block_bytes: tuple[int, int], device: torch.device) -> None:
    source_NB, target_MB = (torch.zeros(1, size, dtype=torch.uint8, device=device) for size in block_bytes)
    with pytest.raises(AssertionError, match="bytes"):
        copy_blocks(source_NB, target_MB, torch.zeros(1, 2, dtype=torch.int32, device=device))


def random_bytes(generator: torch.Generator, num_blocks: int, block_bytes: int) -> torch.Tensor:
    return torch.randint(0, 256, (num_blocks, block_bytes), generator=generator, dtype=torch.uint8)
