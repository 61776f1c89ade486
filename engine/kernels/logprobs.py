"""For one token per row: log-probability, rank, and log-sum-exp minus the largest logit, in one pass over raw logits.

Shape suffixes: R rows of logits, L rows whose log-probabilities are wanted, V vocabulary.
"""

import torch
import triton
import triton.language as tl

BLOCK_V = 8192


def token_logprobs(
    logits_RV: torch.Tensor, rows_L: torch.Tensor, tokens_R: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Three tensors of L numbers: log-softmax of token `tokens_R[row]` in row `rows_L[l]` (float32), its rank (int32: 1
    + the number of strictly larger logits in the row), and the logarithm of the sum of exp(logit - the row's largest
    logit) (float32). Indices are int32.
    """
    num_wanted, vocab_size = len(rows_L), logits_RV.shape[1]
    assert logits_RV.stride(1) == 1, "a row is one span"
    logprobs_L = torch.empty(num_wanted, dtype=torch.float32, device=logits_RV.device)
    ranks_L = torch.empty(num_wanted, dtype=torch.int32, device=logits_RV.device)
    log_totals_L = torch.empty_like(logprobs_L)
    _token_logprobs_kernel[(num_wanted,)](
        logits_RV,
        rows_L,
        tokens_R,
        logprobs_L,
        ranks_L,
        log_totals_L,
        logits_RV.stride(0),
        vocab_size,
        BLOCK_V=BLOCK_V,
        num_warps=16,  # one program per row: few rows ask for this
    )
    return logprobs_L, ranks_L, log_totals_L


@triton.jit
def _token_logprobs_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,
    rows_ptr,
    tokens_ptr,
    logprobs_ptr,
    ranks_ptr,
    log_total_ptr,
    row_stride,
    vocab_size,
    BLOCK_V: tl.constexpr,
):
    wanted = tl.program_id(0)
    row = tl.load(rows_ptr + wanted).to(tl.int64)
    token = tl.load(tokens_ptr + row)
    row_ptr = logits_ptr + row * row_stride
    logit = tl.load(row_ptr + token).to(tl.float32)
    best = tl.full([], float("-inf"), tl.float32)
    total = tl.full([], 0.0, tl.float32)
    num_larger = tl.full([], 0, tl.int32)
    start = tl.full([], 0, tl.int32)
    while start < vocab_size:
        tokens_V = start + tl.arange(0, BLOCK_V)
        logits_V = tl.load(row_ptr + tokens_V, tokens_V < vocab_size, other=float("-inf")).to(tl.float32)
        num_larger += tl.sum((logits_V > logit).to(tl.int32), 0)
        larger = tl.maximum(best, tl.max(logits_V, 0))
        base = tl.where(larger > float("-inf"), larger, 0.0)  # -inf - -inf is NaN
        total = total * tl.exp(best - base) + tl.sum(tl.exp(logits_V - base), 0)
        best = larger
        start += BLOCK_V
    log_total = tl.log(total)
    tl.store(logprobs_ptr + wanted, (logit - best) - log_total)  # in torch's order
    tl.store(ranks_ptr + wanted, num_larger + 1)
    tl.store(log_total_ptr + wanted, log_total)
