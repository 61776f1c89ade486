"""CodedMatrix: integers or 8-bit floats with scales, in any format; unpacks integers; knows no file.

weight = (value - zero point) x scale. The formats differ in which inputs share a scale, and in how values are
packed.

Shape suffixes: O outputs, I inputs, G groups of inputs, N runs of S inputs, R rows and C columns of a packed
tensor, V values of a row.
"""
# ruff: noqa: N815 - fields that are tensors carry their shape, like local names do

from dataclasses import dataclass
from typing import Literal

import torch

from engine.layers.fp8 import FP8, Fp8Weight
from engine.layers.grouped_weight import GROUP_SIZES, GroupedWeight, decoded_e2m1

CHUNK_VALUES = 2**24
"""How many values are converted to floats at a time, so that a large matrix is never in memory in float32."""
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""The position of each of the 8 outputs in an int32 of AWQ's GEMM format, in units of 4 bits (AutoAWQ,
awq/utils/packing_utils.py)."""


@dataclass(frozen=True, slots=True)
class CodedMatrix:
    """A matrix as it is stored."""

    values_OI: torch.Tensor
    """uint8, or 8-bit floats (e4m3)."""
    bits: Literal[4, 8]
    scales_OG: torch.Tensor
    """float32."""
    zeros_OG: torch.Tensor | None
    """float32; None for 8-bit floats, whose zero is 0."""
    groups_I: torch.Tensor
    """Each input's group."""
    is_e2m1: bool = False
    """Whether a 4-bit value is a code for a float; see `GroupedWeight`."""

    def numbers(self, dtype: torch.dtype) -> torch.Tensor:
        """O x I, computed in float32 and rounded once.

        If `dtype` is the scales' own dtype, the numbers equal those of the reference libraries, which compute
        in this dtype. The reason: a difference of integers is exact, and its product with a 16-bit scale is
        exact in float32.
        """
        num_outputs, num_inputs = self.values_OI.shape
        numbers_OI = torch.empty(num_outputs, num_inputs, dtype=dtype, device=self.values_OI.device)
        size, groups_N = self._runs(128, 64, 32, 16) or (1, self.groups_I)
        scales_ON1 = self.scales_OG.index_select(1, groups_N).unsqueeze(-1)
        zeros_ON1 = None if self.zeros_OG is None else self.zeros_OG.index_select(1, groups_N).unsqueeze(-1)
        rows = max(1, CHUNK_VALUES // num_inputs)
        for begin in range(0, num_outputs, rows):
            chunk = slice(begin, begin + rows)
            values_OI = self.values_OI[chunk]
            values_OI = decoded_e2m1(values_OI) if self.is_e2m1 else values_OI.to(torch.float32)
            part_ONS = values_OI.unflatten(1, (-1, size))
            if zeros_ON1 is not None:
                part_ONS.sub_(zeros_ON1[chunk])
            numbers_OI[chunk] = part_ONS.mul_(scales_ON1[chunk]).flatten(1)
        return numbers_OI

    def grouped(self) -> GroupedWeight | None:
        """The matrix in groups that kernels support, None if impossible; a larger group is divided."""
        runs = self._runs(*sorted(GROUP_SIZES, reverse=True))
        if runs is None or self.zeros_OG is None:
            return None
        size, groups_N = runs
        scales_ON = self.scales_OG.index_select(1, groups_N)
        mins_ON = self.zeros_OG.index_select(1, groups_N).mul_(scales_ON).neg_()
        weight = GroupedWeight(self.values_OI, self.bits, size, scales_ON, mins_ON, self.is_e2m1)
        return weight if weight.can_be_kept else None

    def in_fp8(self, dtype: torch.dtype) -> Fp8Weight | None:
        """The matrix in 8-bit floats, if all inputs of an output share a scale.

        `dtype`: the dtype of activations.
        """
        if self.values_OI.dtype is not FP8 or self.scales_OG.shape[1] != 1:
            return None
        return Fp8Weight(self.values_OI.contiguous(), self.scales_OG.contiguous(), dtype)

    def _runs(self, *sizes: int) -> tuple[int, torch.Tensor] | None:
        """The first size for which each run of inputs belongs to one group, and the groups of the runs."""
        for size in sizes:
            if len(self.groups_I) % size == 0:
                groups_NS = self.groups_I.view(-1, size)
                if bool((groups_NS == groups_NS[:, :1]).all()):
                    return size, groups_NS[:, 0]
        return None


def unpacked(packed_RC: torch.Tensor, bits: Literal[4, 8]) -> torch.Tensor:
    """Unpacks each int32, lowest bits first: uint8, R x V.

    In memory, an int32 is four bytes, lowest first. So bytes can be split without 32-bit operations.
    """
    bytes_RV = packed_RC.reshape(-1).view(torch.uint8).view(len(packed_RC), -1)
    return bytes_RV if bits == 8 else torch.stack((bytes_RV & 15, bytes_RV >> 4), -1).flatten(1)


def unpacked_awq(packed_RC: torch.Tensor) -> torch.Tensor:
    """Unpacks 4-bit values in AWQ's order: uint8, V x R. Each int32 contains 8 values of a row."""
    packed_CR = packed_RC.t().contiguous()
    planes = [((packed_CR >> 4 * place) & 15).to(torch.uint8) for place in _AWQ_ORDER]
    return torch.stack(planes, 1).flatten(0, 1)


def gptq_zeros(packed_RC: torch.Tensor, bits: Literal[4, 8]) -> torch.Tensor:
    """Adds 1 to each packed zero point of GPTQ's first format.

    One addition to an int32 changes all zero points in it, so a zero point that overflows carries into the next one.
    GPTQModel does the same (`convert_gptq_v1_to_v2_format`). When GPTQModel writes this format, it subtracts 1 in
    the same way, so a zero point of 0 borrows from the next one. So the addition restores all zero points.
    """
    ones = 0x11111111 if bits == 4 else 0x01010101
    return (packed_RC.to(torch.int64) + ones).to(torch.int32)
