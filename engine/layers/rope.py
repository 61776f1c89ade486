"""Rotary position embedding (RoFormer, 2021) and its scalings; knows angles, not tokens.

Shape suffixes: T tokens of a step, H heads, D head dimension, F = D / 2 frequencies.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from engine.rope_config import RopeConfig, RopeType, mscale


class RotaryEmbedding:
    """Rotates pairs (i, i + D/2) of every head by position x frequency i, as most Hugging Face weights expect.

    If fewer dimensions are rotated (see `head_order`), the last pairs have frequency 0. If no dimension is rotated, all
    pairs have frequency 0.
    """

    def __init__(self, config: RopeConfig | None, head_dim: int, device: torch.device) -> None:
        """`config` None: no dimension is rotated."""
        if config is None:
            frequencies_F, scale = torch.empty(0), 1.0
        else:
            frequencies_F, scale = rope_frequencies(config, config.rotary_dim or head_dim)
        num_fixed = head_dim // 2 - len(frequencies_F)
        self._frequencies_F = F.pad(frequencies_F, (0, num_fixed)).to(device)
        self._scale_F = F.pad(torch.full_like(frequencies_F, scale), (0, num_fixed), value=1.0).to(device)

    def table(self, num_positions: int) -> torch.Tensor:
        """num_positions x D, float32: the cosines of all frequencies, then the sines."""
        angles_PF = (
            torch.arange(num_positions, device=self._frequencies_F.device).unsqueeze(-1) * self._frequencies_F
        )
        return torch.cat((angles_PF.cos() * self._scale_F, angles_PF.sin() * self._scale_F), -1)

    def angles(self, positions_T: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """cos_T1D and sin_T1D of a step, shared by all its layers; computed in float32.

        The first half of the sines is negated, so that a rotation is `x * cos + roll(x, D/2) * sin`.
        """
        angles_TF = positions_T.to(torch.float32).unsqueeze(-1) * self._frequencies_F
        cos_TF, sin_TF = angles_TF.cos() * self._scale_F, angles_TF.sin() * self._scale_F
        cos_TD, sin_TD = torch.cat((cos_TF, cos_TF), -1), torch.cat((-sin_TF, sin_TF), -1)
        return cos_TD.to(dtype).unsqueeze(1), sin_TD.to(dtype).unsqueeze(1)


def rope_tables(
    ropes: Sequence[RopeConfig | None], head_dim: int, num_positions: int, device: torch.device
) -> list[torch.Tensor]:
    """The `RotaryEmbedding.table` of every layer; layers with the same rotation share one table."""
    tables = {rope: RotaryEmbedding(rope, head_dim, device).table(num_positions) for rope in set(ropes)}
    return [tables[rope] for rope in ropes]


def head_order(head_dim: int, rotary_dim: int, *, is_interleaved: bool) -> torch.Tensor | None:
    """The order of a checkpoint's outputs that puts the two numbers of each pair half a head apart.

    In a checkpoint the rotated dimensions come first. The two numbers of a pair are neighbours if
    `is_interleaved`, else half the rotated dimensions apart. In the new order, dimensions that are not
    rotated fill up both halves of the head. None means that the order is right already. Scores do not depend
    on the order, since it is the same for queries and keys.
    """
    if rotary_dim == head_dim and not is_interleaved:
        return None
    rotated, fixed = torch.arange(rotary_dim), torch.arange(rotary_dim, head_dim)
    pairs = rotated.view(-1, 2).T if is_interleaved else rotated.view(2, -1)
    return torch.cat((pairs, fixed.view(2, -1)), -1).flatten()


def rotate_(x_THD: torch.Tensor, cos_T1D: torch.Tensor, sin_T1D: torch.Tensor) -> None:
    """Rotates every head in place."""
    swapped_THD = x_THD.roll(x_THD.shape[-1] // 2, -1)
    x_THD.mul_(cos_T1D).addcmul_(swapped_THD, sin_T1D)


def rope_frequencies(config: RopeConfig, rotary_dim: int) -> tuple[torch.Tensor, float]:
    """Angle per position of each rotated pair (float32), and the factor of all cosines and sines.

    `dynamic` scaling begins only beyond `max_position_embeddings`. No request is longer, so
    `dynamic` gives the same frequencies as the default.
    """
    exponents_F = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
    if config.rope_type is RopeType.LONGROPE:
        return 1.0 / (torch.tensor(config.divisors) * config.theta**exponents_F), _longrope_scale(config)
    frequencies_F = 1.0 / (config.theta**exponents_F)
    if config.rope_type is RopeType.LINEAR:
        return frequencies_F / config.factor, 1.0
    if config.rope_type is RopeType.LLAMA3:
        return _llama3(config, frequencies_F), 1.0
    if config.rope_type is RopeType.YARN:
        return _yarn(config, frequencies_F), _yarn_scale(config)
    return frequencies_F, 1.0


def _llama3(config: RopeConfig, frequencies_F: torch.Tensor) -> torch.Tensor:
    """Llama 3.1: divides low frequencies by `factor`, and keeps high ones; those in between get a blend of both."""
    turns_F = config.original_max_position_embeddings * frequencies_F / (2 * math.pi)
    blend_F = (turns_F - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
    return _blend(frequencies_F / config.factor, frequencies_F, blend_F)


def _yarn(config: RopeConfig, frequencies_F: torch.Tensor) -> torch.Tensor:
    """YaRN (2023), "NTK-by-parts": divides slow frequencies by `factor`, and keeps fast ones.

    Fast ones have `beta_fast` or more turns over the original context, slow ones `beta_slow` or fewer. Frequencies in
    between get a linear blend.
    """
    num_frequencies = frequencies_F.shape[0]
    first, last = (
        _dimension_of(turns, config, 2 * num_frequencies) for turns in (config.beta_fast, config.beta_slow)
    )
    if config.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * num_frequencies - 1)
    width = last - first if last != first else 0.001
    ramp_F = (torch.arange(num_frequencies, dtype=torch.float32) - first) / width
    return _blend(frequencies_F, frequencies_F / config.factor, ramp_F)


def _dimension_of(turns: float, config: RopeConfig, head_dim: int) -> float:
    """The (fractional) index of the frequency with this many turns over the original context."""
    length = config.original_max_position_embeddings
    return head_dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(config.theta))


def _yarn_scale(config: RopeConfig) -> float:
    """YaRN's attention temperature; cosines and sines contain it, so it applies to queries and keys."""
    if config.attention_factor is not None:
        return config.attention_factor
    if config.mscale and config.mscale_all_dim:
        return mscale(config.factor, config.mscale) / mscale(config.factor, config.mscale_all_dim)
    return mscale(config.factor, 1.0)


def _longrope_scale(config: RopeConfig) -> float:
    """LongRoPE's attention temperature; cosines and sines contain it."""
    if config.attention_factor is not None:
        return config.attention_factor
    if config.factor <= 1.0:
        return 1.0
    return math.sqrt(1.0 + math.log(config.factor) / math.log(config.original_max_position_embeddings))


def _blend(low_F: torch.Tensor, high_F: torch.Tensor, weight_F: torch.Tensor) -> torch.Tensor:
    weight_F = weight_F.clamp(0.0, 1.0)
    return (1.0 - weight_F) * low_F + weight_F * high_F
