"""GroupedWeight: a matrix in 4 or 8 bits, with a scale and a minimum per group of inputs; knows no kernel.

Shape suffixes: O output features, I input features, G groups of a row, N groups of several rows, S inputs of a group.
"""
# ruff: noqa: N815 - fields that are tensors carry their shape, like local names do

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Self

import torch

GROUP_SIZES = (16, 32)
SEARCHED_RANGES = (1.0, 0.94, 0.88, 0.8)
"""Shares of a group's range that are tried for 4-bit values. A narrower range has finer steps, but clamps the
largest and smallest weights."""
E2M1 = (12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0)
"""The 16 floats of 4 bits, as integers: 12 + 2 x float. The floats have one sign bit, two bits of exponent
and one of mantissa: 0, 0.5, 1, 1.5, 2, 3, 4, 6, and their negatives. They are integers because the kernels multiply
integers."""
CENTRES = (128, 8, 12, 16, 32)
"""The values that mean zero in symmetric formats: of 8 bits, 4 bits, E2M1, 5 bits and 6 bits."""
MAX_SPAN = 2.0**38
"""The kernels keep scales in 16 bits, beside a factor for the whole matrix. Scales that are powers of two stay exact if
the largest is at most this multiple of the smallest."""
CHUNK_VALUES = 2**18
"""How many values are quantized at a time: so few that the intermediate values stay in the processor's
cache."""


@dataclass(frozen=True, slots=True, eq=False)
class GroupedWeight:
    """weight = scale x value + minimum, with a scale and a minimum for each `group_size` inputs of an output."""

    values_OI: torch.Tensor
    """uint8: one value per byte, less than 2^bits."""
    bits: Literal[4, 8]
    group_size: int
    scales_OG: torch.Tensor
    """float32."""
    mins_OG: torch.Tensor
    """float32."""
    is_e2m1: bool = False
    """Whether a 4-bit value v means E2M1[v]."""

    def __post_init__(self) -> None:
        num_outputs, num_inputs = self.values_OI.shape
        assert self.values_OI.dtype is torch.uint8
        assert self.group_size in GROUP_SIZES, f"groups of {self.group_size}"
        assert self.bits == 4 or not self.is_e2m1
        for per_group in (self.scales_OG, self.mins_OG):
            assert per_group.dtype is torch.float32
            assert per_group.shape == (num_outputs, num_inputs // self.group_size), per_group.shape

    @classmethod
    def quantize(cls, weight_OI: torch.Tensor, bits: Literal[4, 8], group_size: int = 32) -> Self:
        """Rounds a weight to groups; the number of inputs must be a multiple of `group_size`.

        8 bits: the value 128 means zero, and a group's largest magnitude becomes 127 steps. 4 bits: tries several
        ranges for each group, each with the scale and the minimum that fit the values best, and keeps the range with
        the least squared error.
        """
        num_outputs, num_inputs = weight_OI.shape
        assert num_inputs % group_size == 0, f"{num_inputs} inputs in groups of {group_size}"
        values_OI = torch.empty(weight_OI.shape, dtype=torch.uint8)
        scales_OG = torch.empty(num_outputs, num_inputs // group_size)
        mins_OG = torch.empty_like(scales_OG)
        round_groups = _round_to_4_bits if bits == 4 else _round_to_8_bits
        rows = max(1, CHUNK_VALUES // num_inputs)
        for begin in range(0, num_outputs, rows):
            chunk = slice(begin, begin + rows)
            groups_NS = weight_OI[chunk].to(torch.float32).reshape(-1, group_size)
            values_NS, scales_N1, mins_N1 = round_groups(groups_NS)
            values_OI[chunk] = values_NS.reshape(-1, num_inputs)
            scales_OG[chunk] = scales_N1.reshape(-1, scales_OG.shape[1])
            mins_OG[chunk] = mins_N1.reshape(-1, mins_OG.shape[1])
        return cls(values_OI, bits, group_size, scales_OG, mins_OG)

    @classmethod
    def concatenated(cls, parts: Sequence[Self]) -> Self:
        """Concatenates the outputs of parts that have the same inputs, bits and group size."""
        first = parts[0]
        assert all(part.kind == first.kind for part in parts)
        return replace(
            first,
            values_OI=torch.cat([part.values_OI for part in parts]),
            scales_OG=torch.cat([part.scales_OG for part in parts]),
            mins_OG=torch.cat([part.mins_OG for part in parts]),
        )

    @property
    def shape(self) -> torch.Size:
        """O x I."""
        return self.values_OI.shape

    @property
    def kind(self) -> tuple[int, int, bool]:
        """Bits, group size and format: matrices of one product must have the same kind."""
        return self.bits, self.group_size, self.is_e2m1

    @property
    def centre(self) -> int | None:
        """The one of CENTRES that means zero in every group; None if there is none."""
        for centre in E2M1[:1] if self.is_e2m1 else CENTRES:
            if torch.equal(self.mins_OG, self.scales_OG * -float(centre)):
                return centre
        return None

    @property
    def can_be_kept(self) -> bool:
        """Whether the kernels represent the scales of E2M1, powers of two, exactly. Groups of zeros do not count."""
        scales_OG = self.scales_OG
        if not self.is_e2m1 or scales_OG.max() <= scales_OG.min() * MAX_SPAN:
            return True
        used = scales_OG[(self.values_OI & 7).ne(0).unflatten(1, (-1, self.group_size)).any(-1)]
        return not len(used) or bool(used.max() <= used.min() * MAX_SPAN)

    def dequantized(self) -> torch.Tensor:
        """O x I, float32."""
        values_OI = decoded_e2m1(self.values_OI) if self.is_e2m1 else self.values_OI.to(torch.float32)
        groups_OGS: torch.Tensor = values_OI.unflatten(-1, (-1, self.group_size))
        return groups_OGS.mul_(self.scales_OG.unsqueeze(-1)).add_(self.mins_OG.unsqueeze(-1)).flatten(1)

    def outputs(self, index: slice | torch.Tensor) -> Self:
        """The weight's outputs (rows) that `index` selects: a slice or a tensor of indices."""
        return replace(
            self,
            values_OI=self.values_OI[index],
            scales_OG=self.scales_OG[index],
            mins_OG=self.mins_OG[index],
        )

    def in_groups_of(self, size: int) -> Self:
        """The same weight, with each group divided into groups of this size."""
        assert self.group_size % size == 0, f"groups of {self.group_size} in groups of {size}"
        times = self.group_size // size
        scales_OG, mins_OG = (each.repeat_interleave(times, 1) for each in (self.scales_OG, self.mins_OG))
        return replace(self, group_size=size, scales_OG=scales_OG, mins_OG=mins_OG)

    def inputs(self, index: slice) -> Self:
        """A weight with only the inputs of a slice, which must consist of whole groups."""
        begin, end, _ = index.indices(self.shape[1])
        first, last = begin // self.group_size, end // self.group_size
        assert (begin, end) == (first * self.group_size, last * self.group_size), f"inputs {begin}:{end}"
        return replace(
            self,
            values_OI=self.values_OI[:, index],
            scales_OG=self.scales_OG[:, first:last],
            mins_OG=self.mins_OG[:, first:last],
        )


def decoded_e2m1(values: torch.Tensor) -> torch.Tensor:
    """E2M1 of each 4-bit value, as float32."""
    table = torch.tensor(E2M1, dtype=torch.float32, device=values.device)
    return table.index_select(0, values.flatten().to(torch.int32)).view(values.shape)


Rounded = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Values N x S, scales N x 1 and minima N x 1, all float32."""


def _round_to_8_bits(groups_NS: torch.Tensor) -> Rounded:
    scales_N1 = groups_NS.abs().amax(-1, keepdim=True).div_(127.0)
    return _nearest(groups_NS, scales_N1, scales_N1 * -128.0, 255), scales_N1, scales_N1 * -128.0


def _round_to_4_bits(groups_NS: torch.Tensor) -> Rounded:
    low_N1, high_N1 = groups_NS.aminmax(dim=-1, keepdim=True)
    width_N1 = high_N1 - low_N1
    best: Rounded | None = None
    best_error_N1 = torch.full_like(width_N1, torch.inf)
    for part in SEARCHED_RANGES:
        low_part_N1 = low_N1 + width_N1 * ((1.0 - part) / 2)
        values_NS = _nearest(groups_NS, width_N1 * (part / 15.0), low_part_N1, 15)
        scales_N1, mins_N1 = _fit(groups_NS, values_NS)
        errors_NS = torch.addcmul(mins_N1, values_NS, scales_N1).sub_(groups_NS)
        error_N1 = errors_NS.square_().sum(-1, keepdim=True)
        found = (values_NS, scales_N1, mins_N1)
        if best is None:
            best = found
        else:
            is_better_N1 = error_N1 < best_error_N1
            values, scales, mins = (
                torch.where(is_better_N1, new, old) for new, old in zip(found, best, strict=True)
            )
            best = values, scales, mins
        best_error_N1 = torch.minimum(error_N1, best_error_N1)
    assert best is not None
    return best


def _nearest(
    groups_NS: torch.Tensor, scales_N1: torch.Tensor, mins_N1: torch.Tensor, largest: int
) -> torch.Tensor:
    """The nearest values from 0 to `largest`. In a group whose scale is 0, all values are 0."""
    inverse_N1 = torch.where(scales_N1 > 0, 1.0 / scales_N1, 0.0)
    return (groups_NS - mins_N1).mul_(inverse_N1).round_().clamp_(0, largest)


def _fit(groups_NS: torch.Tensor, values_NS: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The scale and minimum with the least squared error for these values, by linear regression."""
    mean_value_N1, mean_weight_N1 = values_NS.mean(-1, keepdim=True), groups_NS.mean(-1, keepdim=True)
    centred_NS = values_NS - mean_value_N1
    variance_N1 = centred_NS.square().sum(-1, keepdim=True)
    covariance_N1 = centred_NS.mul_(groups_NS).sum(-1, keepdim=True)
    scales_N1 = torch.where(variance_N1 > 0, covariance_N1 / variance_N1, 0.0)
    return scales_N1, mean_weight_N1 - scales_N1 * mean_value_N1
