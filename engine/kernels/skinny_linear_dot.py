"""The product of up to 16 rows with a weight on the matrix units, which see it as weight @ x.T.

Shape suffixes: T tokens, I input features, O output features.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl


@dataclass(frozen=True, slots=True)
class DotLaunch:
    """How the kernel is launched; the blocks are powers of two."""

    block_outputs: int
    """A program's. From 64 on, with 4 warps, they are the rows of Hopper's wgmma."""
    block_inputs: int
    num_warps: int
    num_stages: int
    """Blocks of weights in shared memory, all but one of them under way."""


def launch_dot(
    launch: DotLaunch,
    x_TI: torch.Tensor,
    weight_OI: torch.Tensor,
    bias_O: torch.Tensor | None,
    scales_O: torch.Tensor | None,
    y_TO: torch.Tensor,
) -> None:
    """What `skinny_linear` promises, into `y_TO`."""
    num_outputs, num_inputs = weight_OI.shape
    _skinny_linear_dot_kernel[(triton.cdiv(num_outputs, launch.block_outputs),)](
        x_TI,
        weight_OI,
        bias_O,
        scales_O,
        y_TO,
        x_TI.stride(0),
        len(x_TI),
        num_outputs,
        NUM_INPUTS=num_inputs,
        BLOCK_O=launch.block_outputs,
        BLOCK_I=launch.block_inputs,
        PADDED_T=16,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
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
):
    outputs = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    columns = tl.arange(0, BLOCK_I)
    tokens = tl.arange(0, PADDED_T)
    weight_ptrs = weight_ptr + outputs.to(tl.int64)[:, None] * NUM_INPUTS + columns[None, :]
    x_ptrs = x_ptr + tokens[None, :] * x_stride + columns[:, None]
    y_OT = tl.zeros([BLOCK_O, PADDED_T], tl.float32)
    for first in range(0, NUM_INPUTS, BLOCK_I):
        weight_mask = (outputs < num_outputs)[:, None]
        x_mask = (tokens < num_tokens)[None, :]
        if NUM_INPUTS % BLOCK_I != 0:
            weight_mask = weight_mask & (first + columns < NUM_INPUTS)[None, :]
            x_mask = x_mask & (first + columns < NUM_INPUTS)[:, None]
        weight_OI = tl.load(weight_ptrs + first, weight_mask, other=0.0, eviction_policy="evict_first")
        x_IT = tl.load(x_ptrs + first, x_mask, other=0.0)
        # "ieee" is for float32, which would otherwise be rounded to tf32.
        y_OT = tl.dot(weight_OI.to(x_ptr.dtype.element_ty), x_IT, y_OT, input_precision="ieee")
    if scales_ptr is not None:
        y_OT *= tl.load(scales_ptr + outputs, outputs < num_outputs, other=0.0)[:, None]
    if bias_ptr is not None:
        y_OT += tl.load(bias_ptr + outputs, outputs < num_outputs, other=0.0).to(tl.float32)[:, None]
    y_mask = (tokens < num_tokens)[None, :] & (outputs < num_outputs)[:, None]
    tl.store(
        y_ptr + tokens[None, :] * num_outputs + outputs[:, None], y_OT.to(y_ptr.dtype.element_ty), y_mask
    )
