"""What each Triton kernel computes, in plain torch.

Shape suffixes are those of the kernel's own module. `paged_attention_reference` is in `engine.kernels.paged_attention`:
a worker compares with it before it serves. `engine.layers.fp8.quantize_rows` is the reference of `quantize_fp8`.
"""

import torch
import torch.nn.functional as F

from engine import counter_rng
from engine.activation import Activation, ClampedSwiglu, Gate
from engine.kernels.expert_linear import ExpertMatrices
from engine.kernels.sampling_parts import KEY_0, KEY_1, MIN_P, TEMPERATURE, TOP_K, TOP_P
from engine.layers.fp8 import FP8_MAX, quantize_rows


def rope_store_reference(
    qkv_TXD: torch.Tensor,
    positions_T: torch.Tensor,
    slots_T: torch.Tensor,
    cos_sin_PD: torch.Tensor,
    kv_NKHSD: torch.Tensor,
    *,
    q_norm_D: torch.Tensor | None = None,
    k_norm_D: torch.Tensor | None = None,
    eps: float = 1e-6,
) -> None:
    """`rope_store` in torch. Not for a GPU's steps: it waits to see which rows are padded."""
    _, _, num_kv_heads, block_size, head_dim = kv_NKHSD.shape
    rows = (slots_T >= 0).nonzero().squeeze(1)
    heads_TXD = qkv_TXD[rows].to(torch.float32)
    q_TQD, k_THD, v_THD = heads_TXD.split(
        (heads_TXD.shape[1] - 2 * num_kv_heads, num_kv_heads, num_kv_heads), 1
    )
    if q_norm_D is not None and k_norm_D is not None:
        q_TQD = torch.nn.functional.rms_norm(q_TQD, (head_dim,), q_norm_D.to(torch.float32), eps)
        k_THD = torch.nn.functional.rms_norm(k_THD, (head_dim,), k_norm_D.to(torch.float32), eps)
    cos_T1F, sin_T1F = cos_sin_PD[positions_T[rows].long()].unsqueeze(1).chunk(2, -1)
    qkv_TXD[rows, : q_TQD.shape[1]] = _rotated_reference(q_TQD, cos_T1F, sin_T1F).to(qkv_TXD.dtype)

    kv_TKHD = torch.stack((_rotated_reference(k_THD, cos_T1F, sin_T1F), v_THD), 1)
    if kv_NKHSD.dtype is torch.float8_e4m3fn:
        kv_TKHD = kv_TKHD.clamp(-FP8_MAX, FP8_MAX)
    blocks_T, offsets_T = slots_T[rows].long() // block_size, slots_T[rows].long() % block_size
    bits = torch.uint8 if kv_NKHSD.dtype is torch.float8_e4m3fn else kv_NKHSD.dtype  # float8 has no index_put
    kv_NKHSD.view(bits)[blocks_T, :, :, offsets_T] = kv_TKHD.to(kv_NKHSD.dtype).view(bits)


def _rotated_reference(x_THD: torch.Tensor, cos_T1F: torch.Tensor, sin_T1F: torch.Tensor) -> torch.Tensor:
    first_THF, second_THF = x_THD.chunk(2, -1)
    return torch.cat(
        (first_THF * cos_T1F - second_THF * sin_T1F, second_THF * cos_T1F + first_THF * sin_T1F), -1
    )


def expert_linear_reference(
    x: torch.Tensor, matrices: ExpertMatrices, experts_TK: torch.Tensor, factors_N: torch.Tensor | None
) -> torch.Tensor:
    """`expert_linear` in torch, pair by pair."""
    rows = []
    for pair, expert in enumerate(experts_TK.flatten().tolist()):
        weight_OI = matrices.weight_XOI[expert].to(torch.float32)
        y_O = weight_OI @ x[pair * len(x) // experts_TK.numel()].to(torch.float32)
        if matrices.scales_XO is not None:
            y_O = y_O * matrices.scales_XO[expert]
        if matrices.bias_XO is not None:
            y_O = y_O + matrices.bias_XO[expert]
        rows.append(y_O if factors_N is None else y_O * factors_N[pair])
    return torch.stack(rows).to(x.dtype)


def rms_norm_reference(x_TE: torch.Tensor, weight_E: torch.Tensor, eps: float) -> torch.Tensor:
    """`rms_norm` in torch."""
    return _normed_reference(x_TE, weight_E, eps).to(x_TE.dtype)


def rms_norm_fp8_reference(
    x_TE: torch.Tensor, weight_E: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm, quantized without rounding in between."""
    return quantize_rows(_normed_reference(x_TE, weight_E, eps))


def add_rms_norm_reference_(
    x_TE: torch.Tensor, residual_TE: torch.Tensor, weight_E: torch.Tensor, eps: float
) -> torch.Tensor:
    """`add_rms_norm_` in torch."""
    residual_TE.copy_(residual_TE.to(torch.float32) + x_TE.to(torch.float32))
    return rms_norm_reference(residual_TE, weight_E, eps).to(x_TE.dtype)


def _normed_reference(x_TE: torch.Tensor, weight_E: torch.Tensor, eps: float) -> torch.Tensor:
    x_TE = x_TE.to(torch.float32)
    return x_TE * torch.rsqrt(x_TE.square().mean(-1, keepdim=True) + eps) * weight_E.to(torch.float32)


def gate_mul_reference(gate_up_TM: torch.Tensor, activation: Activation = Gate.SILU) -> torch.Tensor:
    """`gate_mul` in torch, rounded once at the end."""
    return _gated_reference(gate_up_TM, activation).to(gate_up_TM.dtype)


def gate_mul_fp8_reference(
    gate_up_TM: torch.Tensor, activation: Activation = Gate.SILU
) -> tuple[torch.Tensor, torch.Tensor]:
    """`gate_mul_fp8` in torch."""
    return quantize_rows(_gated_reference(gate_up_TM, activation))


def _gated_reference(gate_up_TM: torch.Tensor, activation: Activation) -> torch.Tensor:
    gate_TI, up_TI = gate_up_TM.to(torch.float32).chunk(2, -1)
    if isinstance(activation, ClampedSwiglu):
        gate_TI = gate_TI.clamp(max=activation.limit)
        up_TI = up_TI.clamp(-activation.limit, activation.limit)
        return (up_TI + 1) * gate_TI * torch.sigmoid(activation.alpha * gate_TI)
    return (F.silu(gate_TI) if activation is Gate.SILU else F.gelu(gate_TI, approximate="tanh")) * up_TI


def skinny_linear_reference(
    x_TI: torch.Tensor,
    weight_OI: torch.Tensor,
    bias_O: torch.Tensor | None = None,
    scales_O: torch.Tensor | None = None,
) -> torch.Tensor:
    """`skinny_linear` in torch."""
    y_TO = x_TI.to(torch.float32) @ weight_OI.to(torch.float32).T
    if scales_O is not None:
        y_TO = y_TO * scales_O
    if bias_O is not None:
        y_TO = y_TO + bias_O.to(torch.float32)
    return y_TO.to(x_TI.dtype)


def embed_reference(
    ids_T: torch.Tensor,
    sources_T: torch.Tensor,
    sampled_R: torch.Tensor,
    weight_VE: torch.Tensor,
    first_token: int = 0,
) -> torch.Tensor:
    """`embed` in torch."""
    if len(sampled_R) > 0:
        ids_T = torch.where(sources_T >= 0, sampled_R[sources_T.clamp(min=0).long()], ids_T)
    rows_T = ids_T.long() - first_token
    is_here_T = (rows_T >= 0) & (rows_T < len(weight_VE))
    return weight_VE[rows_T * is_here_T] * is_here_T.unsqueeze(1)


def merge_partials_reference(
    partial_PQD: torch.Tensor, weight_PQ: torch.Tensor, merges_RF: torch.Tensor, out_TQD: torch.Tensor
) -> None:
    """`merge_partials` in torch, for all of `merges_RF`."""
    for out_row, first_row, num_parts, stride in merges_RF.tolist():
        rows = slice(first_row, first_row + num_parts * stride, stride)
        weights_PQ = torch.softmax(weight_PQ[rows].double() * torch.log(torch.tensor(2.0)).item(), 0)
        merged_QD = (weights_PQ.unsqueeze(-1) * partial_PQD[rows].double()).sum(0)
        out_TQD[out_row] = merged_QD.to(out_TQD.dtype)


def copy_blocks_reference(source_NB: torch.Tensor, target_MB: torch.Tensor, pairs_P2: torch.Tensor) -> None:
    """`copy_blocks` in torch; waits for the pairs."""
    for source, target in pairs_P2.tolist():
        target_MB[target].copy_(source_NB[source])


def process_logits_reference(
    logits_RV: torch.Tensor,
    rows_P: torch.Tensor,
    masks_PW: torch.Tensor,
    mask_rows_P: torch.Tensor,
    edits_EF: torch.Tensor,
) -> torch.Tensor:
    """`process_logits` in torch: P x V."""
    processed_PV = logits_RV[rows_P.long()].to(torch.float32)
    bits = torch.arange(32, dtype=torch.int32, device=logits_RV.device)
    for row, mask_row in enumerate(mask_rows_P.tolist()):
        if mask_row >= 0:
            is_allowed = (
                ((masks_PW[mask_row].unsqueeze(1) >> bits) & 1).flatten()[: logits_RV.shape[1]].bool()
            )
            processed_PV[row].masked_fill_(~is_allowed, -torch.inf)
    rows, tokens = edits_EF[:, 0].long(), edits_EF[:, 1].long()
    bias, repetition, off = edits_EF[:, 2:5].contiguous().view(torch.float32).unbind(1)
    values = processed_PV[rows, tokens] + bias
    values = torch.where(values > 0, values / repetition, values * repetition) - off
    processed_PV[rows, tokens] = values.masked_fill(edits_EF[:, 5] != 0, -torch.inf)
    return processed_PV


def token_logprobs_reference(
    logits_RV: torch.Tensor, rows_L: torch.Tensor, tokens_R: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`token_logprobs` in torch."""
    logits_LV = logits_RV[rows_L.long()].to(torch.float32)
    tokens_L1 = tokens_R[rows_L.long()].long().unsqueeze(1)
    logprobs_L = logits_LV.log_softmax(-1).gather(1, tokens_L1)[:, 0]
    ranks_L = (logits_LV > logits_LV.gather(1, tokens_L1)).sum(-1, dtype=torch.int32) + 1
    return logprobs_L, ranks_L, logits_LV.logsumexp(-1) - logits_LV.amax(-1)


def row_stats_reference(logits_RV: torch.Tensor, temperature_R: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Arg max, maximum and (where the temperature is above 0) sum of weights of each row."""
    logits_RV = logits_RV.to(torch.float32).nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
    row_max_R1, token_R1 = logits_RV.amax(-1, keepdim=True), logits_RV.argmax(-1, keepdim=True)
    weights_RV = ((logits_RV - row_max_R1) / temperature_R.unsqueeze(1)).exp()
    return token_R1[:, 0], row_max_R1[:, 0], weights_RV.sum(-1)


def gumbel_draw_reference(
    logits_RV: torch.Tensor, temperature_R: torch.Tensor, keys: list[tuple[int, int]]
) -> torch.Tensor:
    """R x V: score + noise, of which the arg max is drawn."""
    logits_RV = logits_RV.to(torch.float32)
    scores_RV = (logits_RV - logits_RV.amax(-1, keepdim=True)) / temperature_R.unsqueeze(1)
    return scores_RV + counter_rng.gumbel_noise(keys, logits_RV.shape[1], logits_RV.device)


def filtered_draw_reference(
    values_RV: torch.Tensor,
    logits_RV: torch.Tensor,
    temperature_R: torch.Tensor,
    top_k_R: torch.Tensor,
    top_p_R: torch.Tensor,
    min_p_R: torch.Tensor,
) -> torch.Tensor:
    """With a sort: arg max of `values_RV` (score + noise) over the tokens that are kept."""
    logits_RV = logits_RV.to(torch.float32)
    row_max_R1 = logits_RV.amax(-1, keepdim=True)
    weights_RV = ((logits_RV - row_max_R1) / temperature_R.unsqueeze(1)).exp()
    sorted_RV = weights_RV.sort(-1, descending=True).values
    ranks_V = torch.arange(logits_RV.shape[1], device=logits_RV.device)
    is_top_k_RV = ranks_V < top_k_R.unsqueeze(1)
    mass_R1 = (sorted_RV * is_top_k_RV).sum(-1, keepdim=True)
    mass_before_RV = sorted_RV.cumsum(-1) - sorted_RV
    top_p_R1 = top_p_R.unsqueeze(1)
    is_top_p_RV = (mass_before_RV < top_p_R1 * mass_R1) | (top_p_R1 >= 1.0) | (ranks_V == 0)
    num_kept_R1 = (is_top_k_RV & is_top_p_RV).sum(-1, keepdim=True)
    lowest_R1 = torch.maximum(sorted_RV.gather(1, num_kept_R1 - 1), min_p_R.unsqueeze(1))
    return values_RV.masked_fill(weights_RV < lowest_R1, -torch.inf).argmax(-1)


def sample_reference(logits_RV: torch.Tensor, params_RF: torch.Tensor) -> torch.Tensor:
    """`sample` in torch with a sort, for rows whose largest logit is finite."""

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
