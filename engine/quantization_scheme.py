"""Scheme: how a checkpoint stores quantized matrices; knows no key of a configuration, and imports no torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Literal

SMALLEST_GROUP = 16
"""The smallest group of inputs that kernels support; see `GROUP_SIZES`."""
MXFP4_BLOCK = 32
"""Number of inputs that share a scale in MXFP4; fixed by the format (Open Compute Project, 2023)."""


class Layout(Enum):
    """The tensors in which a matrix is stored, and the layout of its numbers in them."""

    NUMBERS = "numbers"
    """`weight`, an 8-bit number for each weight, and `weight_scale` or `weight_scale_inv`."""
    PACKED = "packed"
    """`weight_packed`, `weight_scale`, `weight_zero_point`, `weight_g_idx` of compressed-tensors."""
    GPTQ = "gptq"
    """`qweight`, `qzeros` (zero points minus 1), `scales`, `g_idx` of AutoGPTQ."""
    GPTQ_V2 = "gptq_v2"
    """The tensors of GPTQ, but `qzeros` has the zero points themselves."""
    AWQ = "awq"
    """`qweight`, `qzeros`, `scales` of AutoAWQ's GEMM format."""
    MXFP4 = "mxfp4"
    """`blocks` of 4-bit floats, and `scales` that are exponents of 2: the experts of gpt-oss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """How a checkpoint stores some of its matrices."""

    layout: Layout
    bits: Literal[4, 8]
    is_float: bool = False
    """Whether numbers are 8-bit floats (e4m3) instead of integers."""
    outputs_per_scale: int | None = 1
    """How many outputs share a scale; None: all."""
    inputs_per_scale: int | None
    """How many inputs share a scale; None: all."""
    has_zero_points: bool = False
    has_own_order: bool = False
    """Whether a tensor names each input's group (act-order). Then inputs that share a scale need not be
    neighbours."""

    @property
    def can_stay_in_groups(self) -> bool:
        """Whether the scheme allows GroupedWeight. A matrix must also have whole groups (`stays_in_groups`)."""
        return not self.is_float and not self.has_own_order

    def stays_in_groups(self, num_inputs: int, num_ranks: int = 1) -> bool:
        """Whether a matrix with `num_inputs` inputs becomes a GroupedWeight if ranks divide its inputs."""
        per_scale = self.inputs_per_scale or num_inputs
        are_whole = per_scale % SMALLEST_GROUP == 0 or per_scale >= num_inputs
        own, rest = divmod(num_inputs, num_ranks)
        return self.can_stay_in_groups and are_whole and rest == 0 and own % SMALLEST_GROUP == 0

    @property
    def marks(self) -> tuple[str, ...]:
        """The ends of the names of tensors that only a quantized matrix has."""
        return ("weight_scale_inv", "weight_scale") if self.layout is Layout.NUMBERS else (self.values_name,)

    @property
    def values_name(self) -> str:
        """The end of the name of the tensor with a matrix' values."""
        names = {Layout.NUMBERS: "weight", Layout.PACKED: "weight_packed", Layout.MXFP4: "blocks"}
        return names.get(self.layout, "qweight")

    def num_inputs(self, values_shape: Sequence[int]) -> int:
        """The number of a matrix' inputs, by the shape of its values' tensor."""
        if self.layout is Layout.MXFP4:
            return values_shape[-2] * MXFP4_BLOCK
        if self.layout is Layout.AWQ:
            return values_shape[0]
        per_int = 32 // self.bits
        if self.layout in (Layout.GPTQ, Layout.GPTQ_V2):
            return values_shape[0] * per_int
        return values_shape[1] * (per_int if self.layout is Layout.PACKED else 1)

    @property
    def can_stay_in_fp8(self) -> bool:
        """Whether a matrix may become an Fp8Weight, which has one scale for each output."""
        return self.is_float and self.inputs_per_scale is None and self.outputs_per_scale in (1, None)
