"""Runs of bytes into one buffer and back."""

import pytest
import torch

from engine.kernels.copy_blocks import MAX_HOST_PROGRAMS
from engine.kernels.copy_runs import (
    PIECE_BYTES,
    gather_runs,
    gather_runs_reference,
    run_pieces,
    scatter_runs,
    scatter_runs_reference,
)


def empty_launch(is_gather: bool) -> None:
    memory_B, pieces_R3 = torch.empty(1024, dtype=torch.uint8), run_pieces([0], [1024])
    (gather_runs if is_gather else scatter_runs)(memory_B, pieces_R3, torch.empty_like(memory_B))


LAUNCHES = {
    "Llama-3.1-8B, gather": lambda: empty_launch(is_gather=True),
    "Llama-3.1-8B, scatter": lambda: empty_launch(is_gather=False),
}


@pytest.mark.parametrize(
    ("offsets", "lengths"),
    [
        ([64, 0, 1008], [32, 16, 16]),
        ([16], [PIECE_BYTES + 48]),
        ([PIECE_BYTES, 0], [PIECE_BYTES, 0]),
        (list(range(0, 32 * (MAX_HOST_PROGRAMS + 3), 32)), [16] * (MAX_HOST_PROGRAMS + 3)),
    ],
)
def test_gathers_and_scatters(
    offsets: list[int], lengths: list[int], device: torch.device, generator: torch.Generator
) -> None:
    pool_B = torch.randint(0, 256, (2 * PIECE_BYTES + 1024,), generator=generator, dtype=torch.uint8).to(
        device
    )
    pieces_R3 = run_pieces(offsets, lengths).to(device)
    buffer_B = torch.zeros(sum(lengths) + 16, dtype=torch.uint8, device=device)
    expected_B = buffer_B.clone()
    gather_runs(pool_B, pieces_R3, buffer_B)
    gather_runs_reference(pool_B, pieces_R3, expected_B)
    torch.testing.assert_close(buffer_B, expected_B)
    runs = [pool_B[offset : offset + length] for offset, length in zip(offsets, lengths, strict=True)]
    torch.testing.assert_close(buffer_B[:-16], torch.cat(runs))
    assert (buffer_B[-16:] == 0).all(), "beyond the runs nothing is written"

    actual_B, expected_B = torch.zeros_like(pool_B), torch.zeros_like(pool_B)
    scatter_runs(buffer_B, pieces_R3, actual_B)
    scatter_runs_reference(buffer_B, pieces_R3, expected_B)
    torch.testing.assert_close(actual_B, expected_B)
    for offset, length in zip(offsets, lengths, strict=True):
        assert torch.equal(actual_B[offset : offset + length], pool_B[offset : offset + length])


def test_long_runs_are_cut() -> None:
    pieces_R3 = 16 * run_pieces([32, 1024 * 1024], [PIECE_BYTES + 16, 16])
    assert pieces_R3.tolist() == [
        [32, 0, PIECE_BYTES],
        [32 + PIECE_BYTES, PIECE_BYTES, 16],
        [1024 * 1024, PIECE_BYTES + 16, 16],
    ]


@pytest.mark.parametrize(("offset", "length"), [(8, 16), (16, 24), (-16, 16)])
def test_refuses_what_is_not_whole_vectors(offset: int, length: int) -> None:
    with pytest.raises(AssertionError, match=str(length)):
        run_pieces([offset], [length])


def test_no_runs_are_no_launch(device: torch.device) -> None:
    memory_B = torch.zeros(16, dtype=torch.uint8, device=device)
    gather_runs(memory_B, run_pieces([], []).to(device), memory_B)
    assert (memory_B == 0).all()
