"""Log-probabilities and ranks of single tokens."""

import pytest
import torch

from engine.kernels.logprobs import token_logprobs
from tests.kernels.references import token_logprobs_reference


def compile_launch(vocab_size: int, dtype: torch.dtype) -> None:
    indices = torch.zeros(2, dtype=torch.int32)
    token_logprobs(torch.empty(2, vocab_size, dtype=dtype), indices, indices)


LAUNCHES = {
    "Llama-3.1-8B": lambda: compile_launch(128_256, torch.bfloat16),
    "Qwen2.5-7B": lambda: compile_launch(151_936, torch.bfloat16),
    "float32": lambda: compile_launch(128_256, torch.float32),
}
RARE = ("Qwen2.5-7B",)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [1, 50, 20_000])
def test_is_what_torch_computes(
    dtype: torch.dtype, vocab_size: int, device: torch.device, generator: torch.Generator
) -> None:
    logits_RV = (5 * torch.randn(4, vocab_size, generator=generator)).to(dtype).to(device)
    logits_RV[1, : vocab_size // 2] = -torch.inf
    rows_L = torch.tensor([3, 1, 2], dtype=torch.int32, device=device)
    tokens_R = torch.tensor([0, vocab_size - 1, vocab_size // 2, 0], dtype=torch.int32, device=device)
    logprobs_L, ranks_L, log_totals_L = token_logprobs(logits_RV, rows_L, tokens_R)
    expected = token_logprobs_reference(logits_RV, rows_L, tokens_R)
    torch.testing.assert_close(logprobs_L, expected[0])
    assert torch.equal(ranks_L, expected[1])
    torch.testing.assert_close(log_totals_L, expected[2])


def test_equal_logits_share_a_rank(device: torch.device) -> None:
    logits_RV = torch.tensor([[1.0, 3.0, 2.0, 2.0]], device=device)
    rows_L = torch.zeros(1, dtype=torch.int32, device=device)
    for token, rank in enumerate([4, 1, 2, 2]):
        tokens_R = torch.tensor([token], dtype=torch.int32, device=device)
        assert token_logprobs(logits_RV, rows_L, tokens_R)[1].tolist() == [rank]
