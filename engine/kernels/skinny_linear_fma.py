"""The product of up to 4 rows with a weight: x stays in registers, rows of weights stream past it.

Shape suffixes: T tokens, I input features, O output features.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl


@dataclass(frozen=True, slots=True)
class FmaLaunch:
    """How the kernel is launched."""

    rows: int
    """Of weights that a program takes at a time, a power of two; the next as many are loaded meanwhile."""
    num_warps: int
    max_programs: int
    """Each takes every so many rows."""


def launch_fma(
    launch: FmaLaunch,
    x_TI: torch.Tensor,
    weight_OI: torch.Tensor,
    bias_O: torch.Tensor | None,
    scales_O: torch.Tensor | None,
    y_TO: torch.Tensor,
) -> None:
    """What `skinny_linear` promises, into `y_TO`. All of x must fit a program's registers."""
    num_outputs, num_inputs = weight_OI.shape
    _skinny_linear_fma_kernel[(min(triton.cdiv(num_outputs, launch.rows), launch.max_programs),)](
        x_TI,
        weight_OI,
        bias_O,
        scales_O,
        y_TO,
        x_TI.stride(0),
        len(x_TI),
        num_outputs,
        NUM_INPUTS=num_inputs,
        PADDED_T=triton.next_power_of_2(len(x_TI)),
        PADDED_I=triton.next_power_of_2(num_inputs),
        ROWS=launch.rows,
        num_warps=launch.num_warps,
    )


@triton.jit
def _skinny_linear_fma_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    weight_ptr,
    bias_ptr,
    scales_ptr,
    y_ptr,
    x_stride,
    num_tokens,
    num_outputs,
    NUM_INPUTS: tl.constexpr,
    PADDED_T: tl.constexpr,
    PADDED_I: tl.constexpr,
    ROWS: tl.constexpr,
):
    """All is [T, rows, I] from its loading on: with x as [T, I] and weights as [rows, I], Triton gives them layouts
    that differ from the products', and each tile takes a detour through shared memory."""
    tokens = tl.arange(0, PADDED_T)[:, None, None]
    rows = tl.arange(0, ROWS)[None, :, None]
    columns = tl.arange(0, PADDED_I)[None, None, :]
    x_mask = (tokens < num_tokens) & (columns < NUM_INPUTS)
    x = tl.load(x_ptr + tokens * x_stride + columns, x_mask, other=0.0).to(tl.float32)
    within = rows * NUM_INPUTS + columns
    first = tl.program_id(0) * ROWS
    weight_ptrs = weight_ptr + first.to(tl.int64) * NUM_INPUTS + within
    mask = (first + rows < num_outputs) & (columns < NUM_INPUTS)
    weight = tl.load(weight_ptrs, mask, other=0.0, eviction_policy="evict_first")
    while first < num_outputs:
        next_first = first + tl.num_programs(0) * ROWS
        weight_ptrs = weight_ptr + next_first.to(tl.int64) * NUM_INPUTS + within
        mask = (next_first + rows < num_outputs) & (columns < NUM_INPUTS)
        next_weight = tl.load(weight_ptrs, mask, other=0.0, eviction_policy="evict_first")
        y = tl.sum(x * weight.to(tl.float32), 2)
        outputs = first + tl.arange(0, ROWS)
        if scales_ptr is not None:
            y *= tl.load(scales_ptr + outputs, outputs < num_outputs, other=0.0)[None, :]
        if bias_ptr is not None:
            y += tl.load(bias_ptr + outputs, outputs < num_outputs, other=0.0).to(tl.float32)[None, :]
        y_rows = tl.arange(0, PADDED_T)[:, None]
        y_mask = (y_rows < num_tokens) & (outputs < num_outputs)[None, :]
        tl.store(y_ptr + y_rows * num_outputs + outputs[None, :], y.to(y_ptr.dtype.element_ty), y_mask)
        weight = next_weight
        first = next_first
