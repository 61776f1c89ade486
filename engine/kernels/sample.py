"""Draws one token per row on the device, by the row's own parameters: one launch if all rows are greedy, else three.

Equal logits give the same tokens as engine/sampler.py: the order of filters and the treatment of ties are the same.

Shape suffixes: R rows, V vocabulary, P rows that were processed, F fields of a row's parameters.
"""

import torch

from engine.kernels.filtered_draw import filtered_draw
from engine.kernels.gumbel_draw import gumbel_draw
from engine.kernels.row_stats import row_stats
from engine.kernels.sampling_parts import (
    NUM_FIELDS,
    SamplingWorkspace,
)


def sample(
    logits_RV: torch.Tensor,
    processed_PV: torch.Tensor | None,
    params_RF: torch.Tensor,
    tokens_R: torch.Tensor,
    is_non_finite_R: torch.Tensor,
    workspace: SamplingWorkspace,
    is_greedy: bool,
) -> None:
    """Writes `tokens_R` and `is_non_finite_R` (int32; see row_stats).

    `sampling_parts.NUM_FIELDS` describes the layout of `params_RF` (int32).

    Rows of `logits_RV` (bf16, fp16 or float32) may be strided; their elements are contiguous. A row whose parameters
    name a row of `processed_PV` (float32, contiguous) is drawn from that row instead. `is_greedy`: every row is greedy,
    so the drawing launches are left out. A row whose largest logit is NaN or infinite gives its arg max; NaN counts as
    +inf.
    """
    num_rows, vocab_size = logits_RV.shape
    assert logits_RV.stride(1) == 1, "a row is one span"
    assert vocab_size == workspace.vocab_size, (
        f"{vocab_size} logits a row, in a workspace for {workspace.vocab_size}"
    )
    assert num_rows <= len(workspace.num_arrived_R), (
        f"{num_rows} rows, in a workspace for {len(workspace.num_arrived_R)}"
    )
    assert params_RF.shape == (num_rows, NUM_FIELDS), (
        f"parameters {tuple(params_RF.shape)} of {num_rows} rows"
    )
    assert params_RF.is_contiguous(), "parameters are packed"
    if processed_PV is not None:
        assert processed_PV.is_contiguous(), "processed rows are packed"
        assert processed_PV.dtype == torch.float32, f"processed rows of {processed_PV.dtype}"
    row_stats(logits_RV, processed_PV, params_RF, tokens_R, is_non_finite_R, workspace)
    if not is_greedy:
        gumbel_draw(logits_RV, processed_PV, params_RF, tokens_R, workspace)
        filtered_draw(logits_RV, processed_PV, params_RF, tokens_R, workspace)
