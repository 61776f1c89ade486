"""Rotary position embedding (RoFormer, 2021) and its scalings; knows angles, not tokens.

Shape suffixes: T tokens of a step, H heads, D head dimension, F = D / 2 frequencies.
"""

import math

import torch

from engine.model_config import RopeConfig, RopeType


class RotaryEmbedding:
    """Rotates pairs (i, i + D/2) of every head by position x frequency i, as Hugging Face weights expect."""

    def __init__(self, config: RopeConfig, head_dim: int, device: torch.device) -> None:
        frequencies_F, self._scale = rope_frequencies(config, head_dim)
        self._frequencies_F = frequencies_F.to(device)

    def table(self, num_positions: int) -> torch.Tensor:
        """num_positions x D, float32: the cosines of every frequency, then the sines."""
        angles_PF = (
            torch.arange(num_positions, device=self._frequencies_F.device).unsqueeze(-1) * self._frequencies_F
        )
        return torch.cat((angles_PF.cos() * self._scale, angles_PF.sin() * self._scale), -1)

    def angles(self, positions_T: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """cos_T1D and sin_T1D of a step, shared by all its layers; computed in float32.

        The first half of the sines is negated, so that a rotation is `x * cos + roll(x, D/2) * sin`.
        """
        angles_TF = positions_T.to(torch.float32).unsqueeze(-1) * self._frequencies_F
        cos_TF, sin_TF = angles_TF.cos() * self._scale, angles_TF.sin() * self._scale
        cos_TD, sin_TD = torch.cat((cos_TF, cos_TF), -1), torch.cat((-sin_TF, sin_TF), -1)
        return cos_TD.to(dtype).unsqueeze(1), sin_TD.to(dtype).unsqueeze(1)


def rotate_(x_THD: torch.Tensor, cos_T1D: torch.Tensor, sin_T1D: torch.Tensor) -> None:
    """Rotates every head in place."""
    swapped_THD = x_THD.roll(x_THD.shape[-1] // 2, -1)
    x_THD.mul_(cos_T1D).addcmul_(swapped_THD, sin_T1D)


def rope_frequencies(config: RopeConfig, head_dim: int) -> tuple[torch.Tensor, float]:
    """Angle per position of each pair (float32, shape F), and the factor on all cosines and sines.

    `dynamic` scaling begins only beyond `max_position_embeddings`, which no request exceeds; up to there it equals the
    default.
    """
    exponents_F = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies_F = 1.0 / (config.theta**exponents_F)
    if config.rope_type is RopeType.LINEAR:
        return frequencies_F / config.factor, 1.0
    if config.rope_type is RopeType.LLAMA3:
        return _llama3(config, frequencies_F), 1.0
    if config.rope_type is RopeType.YARN:
        return _yarn(config, frequencies_F), _yarn_scale(config)
    return frequencies_F, 1.0


def _llama3(config: RopeConfig, frequencies_F: torch.Tensor) -> torch.Tensor:
    """Llama 3.1: slow waves are stretched by `factor`, fast ones kept, those between blended by wavelength."""
    turns_F = config.original_max_position_embeddings * frequencies_F / (2 * math.pi)
    blend_F = (turns_F - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
    return _blend(frequencies_F / config.factor, frequencies_F, blend_F)


def _yarn(config: RopeConfig, frequencies_F: torch.Tensor) -> torch.Tensor:
    """YaRN (2023), "NTK-by-parts": a linear ramp over the dimensions between `beta_fast` and `beta_slow` turns."""
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
    """The (fractional) frequency index that makes this many turns over the original context."""
    length = config.original_max_position_embeddings
    return head_dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(config.theta))


def _yarn_scale(config: RopeConfig) -> float:
    """YaRN's attention temperature, applied to queries and keys alike through the cosines and sines."""
    if config.attention_factor is not None:
        return config.attention_factor
    if config.mscale and config.mscale_all_dim:
        return _mscale(config.factor, config.mscale) / _mscale(config.factor, config.mscale_all_dim)
    return _mscale(config.factor, 1.0)


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1.0 else 0.1 * weight * math.log(factor) + 1.0


def _blend(low_F: torch.Tensor, high_F: torch.Tensor, weight_F: torch.Tensor) -> torch.Tensor:
    weight_F = weight_F.clamp(0.0, 1.0)
    return (1.0 - weight_F) * low_F + weight_F * high_F
