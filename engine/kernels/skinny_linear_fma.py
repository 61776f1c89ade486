"""The product of up to 2 rows with a weight: x stays in registers while rows of weights stream past.

Shape suffixes: T tokens, I input features, O output features.
"""

from dataclasses import dataclass

import triton
import triton.language as tl

from engine.kernels.dependent_launch import launch_options, wait_for_former
from engine.kernels.skinny_epilogue import Operands, gate_mul_pairs, weight_row


@dataclass(frozen=True, slots=True)
class FmaLaunch:
    """How the kernel is launched."""

    rows: int
    """Rows of weights that a program multiplies at a time: a power of two, at least 2 if the product has gates and ups.
    Meanwhile, the program loads the same number of the next rows."""
    num_warps: int
    max_programs: int
    """The most programs of a launch. If there are more tiles, the tiles of a program are this many tiles apart."""


def launch_fma(launch: FmaLaunch, operands: Operands) -> None:
    """Computes the product into `y_TO`, as `skinny_linear` promises. All of x must fit a program's registers."""
    o = operands
    num_tokens, num_inputs = o.x_TI.shape
    num_tiles = triton.cdiv(len(o.weight_OI), launch.rows)
    _skinny_linear_fma_kernel[(min(num_tiles, launch.max_programs),)](
        o.x_TI,
        o.weight_OI,
        o.bias_O,
        o.scales_O,
        o.y_TO,
        None if o.norm is None else o.norm.weight_I,
        o.x_TI.stride(0),
        num_tokens,
        o.y_TO.shape[1],
        0.0 if o.norm is None else o.norm.eps,
        NUM_INPUTS=num_inputs,
        PADDED_T=triton.next_power_of_2(num_tokens),
        PADDED_I=triton.next_power_of_2(num_inputs),
        ROWS=launch.rows,
        GATED=o.is_gated,
        ADDED=o.is_added,
        num_warps=launch.num_warps,
        **launch_options(),
    )


@triton.jit
def _skinny_linear_fma_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    weight_ptr,
    bias_ptr,
    scales_ptr,
    y_ptr,
    norm_ptr,
    x_stride,
    num_tokens,
    num_outputs,
    eps,
    NUM_INPUTS: tl.constexpr,
    PADDED_T: tl.constexpr,
    PADDED_I: tl.constexpr,
    ROWS: tl.constexpr,
    GATED: tl.constexpr,
    ADDED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Everything is loaded as [T, rows, I]. With x as [T, I] and weights as [rows, I], Triton would choose layouts that
    differ from the products', and move each tile through shared memory. `num_outputs`: columns of y."""
    OUTPUTS: tl.constexpr = ROWS // 2 if GATED else ROWS
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    tokens = tl.arange(0, PADDED_T)[:, None, None]
    rows = tl.arange(0, ROWS)
    last = rows // 2 if GATED else rows
    columns = tl.arange(0, PADDED_I)[None, None, :]
    within = weight_row(rows, num_outputs, GATED)[None, :, None] * NUM_INPUTS + columns
    first = tl.program_id(0) * OUTPUTS
    weight_ptrs = weight_ptr + first.to(tl.int64) * NUM_INPUTS + within
    mask = (first + last < num_outputs)[None, :, None] & (columns < NUM_INPUTS)
    # No kernel writes weights: they may be loaded before the wait.
    weight = tl.load(weight_ptrs, mask, other=0.0, eviction_policy="evict_first")
    if norm_ptr is not None:
        norm = tl.load(norm_ptr + columns, columns < NUM_INPUTS, other=0.0)
    wait_for_former(PDL)
    x_mask = (tokens < num_tokens) & (columns < NUM_INPUTS)
    x = tl.load(x_ptr + tokens * x_stride + columns, x_mask, other=0.0).to(tl.float32)
    if norm_ptr is not None:
        x *= tl.rsqrt(tl.sum(x * x, 2) / NUM_INPUTS + eps)[:, :, None]
        x = (x * norm.to(tl.float32)).to(dtype).to(tl.float32)
    while first < num_outputs:
        next_first = first + tl.num_programs(0) * OUTPUTS
        weight_ptrs = weight_ptr + next_first.to(tl.int64) * NUM_INPUTS + within
        mask = (next_first + last < num_outputs)[None, :, None] & (columns < NUM_INPUTS)
        next_weight = tl.load(weight_ptrs, mask, other=0.0, eviction_policy="evict_first")
        outputs = first + tl.arange(0, OUTPUTS)
        y_rows = tl.arange(0, PADDED_T)[:, None]
        y_mask = (y_rows < num_tokens) & (outputs < num_outputs)[None, :]
        y_ptrs = y_ptr + y_rows * num_outputs + outputs[None, :]
        if ADDED:
            before = tl.load(y_ptrs, y_mask, other=0.0).to(tl.float32)
        y = tl.sum(x * weight.to(tl.float32), 2)
        weight_rows = first + weight_row(rows, num_outputs, GATED)
        is_row = first + last < num_outputs
        if scales_ptr is not None:
            y *= tl.load(scales_ptr + weight_rows, is_row, other=0.0)[None, :]
        if bias_ptr is not None:
            y += tl.load(bias_ptr + weight_rows, is_row, other=0.0).to(tl.float32)[None, :]
        if GATED:
            y = gate_mul_pairs(tl.reshape(y.to(dtype), [PADDED_T, OUTPUTS, 2]))
        if ADDED:
            y = before + y.to(dtype).to(tl.float32)
        tl.store(y_ptrs, y.to(dtype), y_mask)
        weight = next_weight
        first = next_first
