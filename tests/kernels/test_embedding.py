"""Embedding rows of known and of just sampled tokens."""

import pytest
import torch

from engine.kernels.embedding import embed
from tests.kernels.references import embed_reference


def empty_launch(vocab_size: int, first_token: int = 0) -> None:
    ids_T = torch.zeros(2, dtype=torch.int32)
    embed(
        ids_T, ids_T, ids_T, torch.empty(vocab_size, 4096, dtype=torch.bfloat16, device="meta"), first_token
    )


LAUNCHES = {
    "Llama-3.1-8B": lambda: empty_launch(128_256),
    "Qwen3-8B": lambda: empty_launch(151_936),
    "Llama-3.1-8B, second of two ranks": lambda: empty_launch(64_128, 64_128),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("width", [8, 100, 2050])
def test_takes_known_ids_and_sampled_ones(
    dtype: torch.dtype, width: int, device: torch.device, generator: torch.Generator
) -> None:
    weight_VE = torch.randn(20, width, generator=generator).to(dtype).to(device)
    inputs = int32s(device, [3, 19, 99, 0, -7], [-1, -1, 2, -1, 0], [7, 8, 0])
    x_TE = embed(*inputs, weight_VE)
    torch.testing.assert_close(x_TE, weight_VE[[3, 19, 0, 0, 7]], rtol=0, atol=0)
    torch.testing.assert_close(embed_reference(*inputs, weight_VE), x_TE, rtol=0, atol=0)


def test_the_ranks_of_a_split_vocabulary_add_up(device: torch.device, generator: torch.Generator) -> None:
    weight_VE = torch.randn(12, 16, generator=generator).to(device)
    inputs = int32s(device, [0, 4, 5, 11], [-1, 0, -1, -1], [9])
    parts = [embed(*inputs, weight_VE[first : first + 5], first) for first in (0, 5, 10)]
    for first, part in zip((0, 5, 10), parts, strict=True):
        torch.testing.assert_close(part, embed_reference(*inputs, weight_VE[first : first + 5], first))
    torch.testing.assert_close(sum(parts), weight_VE[[0, 9, 5, 11]], rtol=0, atol=0)
    assert (parts[1][0] == 0).all(), "a token of another rank"


def test_padded_rows_may_have_no_sampled_tokens_beside_them(device: torch.device) -> None:
    ids_T, none_R = (
        torch.zeros(2, dtype=torch.int32, device=device),
        torch.empty(0, dtype=torch.int32, device=device),
    )
    weight_VE = torch.arange(8.0, device=device).view(2, 4)
    torch.testing.assert_close(embed(ids_T, ids_T - 1, none_R, weight_VE), weight_VE[[0, 0]])
    torch.testing.assert_close(embed_reference(ids_T, ids_T - 1, none_R, weight_VE), weight_VE[[0, 0]])


def int32s(
    device: torch.device, ids: list[int], sources: list[int], sampled: list[int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ids_T, sources_T, sampled_R = (
        torch.tensor(values, dtype=torch.int32, device=device) for values in (ids, sources, sampled)
    )
    return ids_T, sources_T, sampled_R
