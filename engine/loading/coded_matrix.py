"""CodedMatrix: integers or 8-bit floats with scales, of whatever format; and how integers are packed; knows no file.

weight = (value - zero point) x scale. The formats differ in which inputs share a scale, and in where a value lies.

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
"""Values that are made floats at a time, so that a large matrix is not held in float32."""
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Of 8 outputs in an int32 of AWQ's GEMM format: in which 4 bits each lies (AutoAWQ, awq/utils/packing_utils.py)."""


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
    """Whether a value of 4 bits stands for another number; see `GroupedWeight`."""

    def numbers(self, dtype: torch.dtype) -> torch.Tensor:
        """O x I, computed in float32 and rounded once.

        With the scales' own dtype as `dtype`, these are the numbers of the reference libraries, which compute in it: a
        difference of integers is exact, and so is its product with 16 bits in float32.
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
        """The same in groups that the kernels take; larger groups become several. None if there are no such groups."""
        runs = self._runs(*sorted(GROUP_SIZES, reverse=True))
        if runs is None or self.zeros_OG is None:
            return None
        size, groups_N = runs
        scales_ON = self.scales_OG.index_select(1, groups_N)
        mins_ON = self.zeros_OG.index_select(1, groups_N).mul_(scales_ON).neg_()
        return GroupedWeight(self.values_OI, self.bits, size, scales_ON, mins_ON, self.is_e2m1)

    def in_fp8(self, dtype: torch.dtype) -> Fp8Weight | None:
        """The same if all inputs of an output share a scale. `dtype`: of activations."""
        if self.values_OI.dtype is not FP8 or self.scales_OG.shape[1] != 1:
            return None
        return Fp8Weight(self.values_OI.contiguous(), self.scales_OG.contiguous(), dtype)

    def _runs(self, *sizes: int) -> tuple[int, torch.Tensor] | None:
        """The first of these sizes of which all runs of inputs have one group each, and the runs' groups."""
        for size in sizes:
            if len(self.groups_I) % size == 0:
                groups_NS = self.groups_I.view(-1, size)
                if bool((groups_NS == groups_NS[:, :1]).all()):
                    return size, groups_NS[:, 0]
        return None


def unpacked(packed_RC: torch.Tensor, bits: Literal[4, 8]) -> torch.Tensor:
    """uint8, R x V: of each int32 the lowest bits first.

    An int32 is four bytes, the lowest first, so no integers of 32 bits are made for values of 4.
    """
    bytes_RV = packed_RC.reshape(-1).view(torch.uint8).view(len(packed_RC), -1)
    return bytes_RV if bits == 8 else torch.stack((bytes_RV & 15, bytes_RV >> 4), -1).flatten(1)


def unpacked_awq(packed_RC: torch.Tensor) -> torch.Tensor:
    """uint8, V x R: 4-bit values in AWQ's order, of which each int32 has 8 of a row."""
    packed_CR = packed_RC.t().contiguous()
    planes = [((packed_CR >> 4 * place) & 15).to(torch.uint8) for place in _AWQ_ORDER]
    return torch.stack(planes, 1).flatten(0, 1)


def gptq_zeros(packed_RC: torch.Tensor, bits: Literal[4, 8]) -> torch.Tensor:
    """Packed zero points of GPTQ's first format, to which 1 is added: to the packed numbers, with their carries.

    So does GPTQModel (`convert_gptq_v1_to_v2_format`). It also subtracts so: a zero point of 0 borrows from the next.
    """
    ones = 0x11111111 if bits == 4 else 0x01010101
    return (packed_RC.to(torch.int64) + ones).to(torch.int32)
