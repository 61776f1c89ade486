"""The product of up to 16 rows with a weight on the matrix units, computed as weight @ x.T.

Shape suffixes: T tokens, I input features, O output features.
"""

from dataclasses import dataclass

import triton
import triton.language as tl

from engine.kernels.dependent_launch import launch_options, wait_for_former
from engine.kernels.skinny_epilogue import Operands, gate_mul_pairs, weight_row


@dataclass(frozen=True, slots=True)
class DotLaunch:
    """How the kernel is launched; the blocks are powers of two."""

    block_outputs: int
    """Outputs of a program. With 64 or more, and 4 warps, they are the rows of Hopper's wgmma."""
    block_inputs: int
    num_warps: int
    num_stages: int
    """Blocks of weights in shared memory, all but one of them in flight."""


def launch_dot(launch: DotLaunch, operands: Operands) -> None:
    """Computes the product into `y_TO`, as `skinny_linear` promises. It cannot norm x: no program holds all of x."""
    o = operands
    assert o.norm is None
    _skinny_linear_dot_kernel[(triton.cdiv(len(o.weight_OI), launch.block_outputs),)](
        o.x_TI,
        o.weight_OI,
        o.bias_O,
        o.scales_O,
        o.y_TO,
        o.x_TI.stride(0),
        len(o.x_TI),
        o.y_TO.shape[1],
        NUM_INPUTS=o.x_TI.shape[1],
        BLOCK_O=launch.block_outputs,
        BLOCK_I=launch.block_inputs,
        PADDED_T=16,
        GATED=o.is_gated,
        ADDED=o.is_added,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        # More registers than the kernel needs. Otherwise the assembler spills, to make room for programs that
        # shared memory cannot hold.
        maxnreg=168 if o.is_gated and o.scales_O is None else None,
        **launch_options(),
    )


@triton.jit(do_not_specialize=["num_tokens"])  # it changes from step to step
def _skinny_linear_dot_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    weight_ptr,
    bias_ptr,
    scales_ptr,
    y_ptr,
    x_stride,
    num_tokens,
    num_outputs,
    NUM_INPUTS: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
    PADDED_T: tl.constexpr,
    GATED: tl.constexpr,
    ADDED: tl.constexpr,
    PDL: tl.constexpr,
):
    """`num_outputs`: columns of y."""
    OUTPUTS: tl.constexpr = BLOCK_O // 2 if GATED else BLOCK_O
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    wait_for_former(PDL)
    rows = tl.arange(0, BLOCK_O)
    first_output = tl.program_id(0) * OUTPUTS
    is_row = first_output + (rows // 2 if GATED else rows) < num_outputs
    weight_rows = first_output + weight_row(rows, num_outputs, GATED)
    columns = tl.arange(0, BLOCK_I)
    tokens = tl.arange(0, PADDED_T)
    weight_ptrs = weight_ptr + weight_rows.to(tl.int64)[:, None] * NUM_INPUTS + columns[None, :]
    x_ptrs = x_ptr + tokens[None, :] * x_stride + columns[:, None]
    y_OT = tl.zeros([BLOCK_O, PADDED_T], tl.float32)
    for first in range(0, NUM_INPUTS, BLOCK_I):
        weight_mask = is_row[:, None]
        x_mask = (tokens < num_tokens)[None, :]
        if NUM_INPUTS % BLOCK_I != 0:
            weight_mask = weight_mask & (first + columns < NUM_INPUTS)[None, :]
            x_mask = x_mask & (first + columns < NUM_INPUTS)[:, None]
        weight_OI = tl.load(weight_ptrs + first, weight_mask, other=0.0, eviction_policy="evict_first")
        x_IT = tl.load(x_ptrs + first, x_mask, other=0.0)
        # "ieee" is for float32, which would otherwise be rounded to tf32.
        y_OT = tl.dot(weight_OI.to(x_ptr.dtype.element_ty), x_IT, y_OT, input_precision="ieee")
    if scales_ptr is not None:
        y_OT *= tl.load(scales_ptr + weight_rows, is_row, other=0.0)[:, None]
    if bias_ptr is not None:
        y_OT += tl.load(bias_ptr + weight_rows, is_row, other=0.0).to(tl.float32)[:, None]
    if GATED:
        y_OT = gate_mul_pairs(tl.permute(tl.reshape(y_OT.to(dtype), [OUTPUTS, 2, PADDED_T]), (0, 2, 1)))
    outputs = first_output + tl.arange(0, OUTPUTS)
    y_mask = (tokens < num_tokens)[None, :] & (outputs < num_outputs)[:, None]
    y_ptrs = y_ptr + tokens[None, :] * num_outputs + outputs[:, None]
    if ADDED:
        y_OT = tl.load(y_ptrs, y_mask, other=0.0).to(tl.float32) + y_OT.to(dtype).to(tl.float32)
    tl.store(y_ptrs, y_OT.to(dtype), y_mask)
