"""One token a row, drawn on the device by each row's own parameters: one launch if all rows are greedy, else three.

Equal logits give the tokens of engine/sampler.py, whose order of filters and treatment of ties this keeps.

Shape suffixes: R rows, V vocabulary, P rows that were processed, F fields of a row's parameters.
"""

import torch

from engine.kernels.filtered_draw import filtered_draw, filtered_draw_reference
from engine.kernels.gumbel_draw import gumbel_draw, gumbel_draw_reference
from engine.kernels.row_stats import row_stats, row_stats_reference
from engine.kernels.sampling_parts import (
    KEY_0,
    KEY_1,
    MIN_P,
    NUM_FIELDS,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    SamplingWorkspace,
)


def sample(
    logits_RV: torch.Tensor,
    processed_PV: torch.Tensor | None,
    params_RF: torch.Tensor,
    tokens_R: torch.Tensor,
    workspace: SamplingWorkspace,
    is_greedy: bool,
) -> None:
    """Writes `tokens_R` (int32). `params_RF` (int32) is laid out as `sampling_parts.NUM_FIELDS` says.

    Rows of `logits_RV` (bf16, fp16 or float32) may be strided, their elements not. A row whose parameters name a row of
    `processed_PV` (float32, contiguous) is drawn from that instead. `is_greedy` says that every row is: the launches
    that draw are left out. A row whose largest logit is NaN or infinite gives its arg max; NaN counts as +inf.
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
    row_stats(logits_RV, processed_PV, params_RF, tokens_R, workspace)
    if not is_greedy:
        gumbel_draw(logits_RV, processed_PV, params_RF, tokens_R, workspace)
        filtered_draw(logits_RV, processed_PV, params_RF, tokens_R, workspace)


def sample_reference(logits_RV: torch.Tensor, params_RF: torch.Tensor) -> torch.Tensor:
    """The same in torch with a sort, for rows whose largest logit is finite."""

    def floats(field: int) -> torch.Tensor:
        return params_RF[:, field].contiguous().view(torch.float32)

    temperature_R = floats(TEMPERATURE.value)
    greedy_R, _, _ = row_stats_reference(logits_RV, temperature_R)
    keys = [
        (first & 0xFFFFFFFF, second & 0xFFFFFFFF)
        for first, second in params_RF[:, [KEY_0.value, KEY_1.value]].tolist()
    ]
    drawn_R = filtered_draw_reference(
        gumbel_draw_reference(logits_RV, temperature_R, keys),
        logits_RV,
        temperature_R,
        params_RF[:, TOP_K.value],
        floats(TOP_P.value),
        floats(MIN_P.value),
    )
    return torch.where(temperature_R > 0, drawn_R, greedy_R).to(torch.int32)
