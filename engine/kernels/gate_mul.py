"""The activation of the gated MLP, such as silu(gate) * up, optionally quantized for a W8A8 linear.

Shape suffixes: T tokens, I intermediate size, M = 2 x I (gates, then ups, which the gates scale).
"""

import torch
import triton
import triton.language as tl

from engine.activation import Activation, ClampedSwiglu, Gate
from engine.kernels.dependent_launch import launch_options, wait_for_former
from engine.kernels.quantize_fp8 import store_quantized_row
from engine.kernels.row_launch import row_launch

BLOCK_I = 1024


def gate_mul(gate_up_TM: torch.Tensor, activation: Activation = Gate.SILU) -> torch.Tensor:
    """activation(gate) * up: T x I in the input's dtype, computed in float32. Rows may be strided; their elements are
    contiguous.

    `activation`: SiLU unless given.
    """
    num_tokens, width = gate_up_TM.shape
    assert gate_up_TM.stride(1) == 1, "a row is one span"
    assert width % 2 == 0, f"{width} columns are not pairs"
    out_TI = torch.empty((num_tokens, width // 2), dtype=gate_up_TM.dtype, device=gate_up_TM.device)
    grid = (num_tokens, triton.cdiv(width // 2, BLOCK_I))
    _gate_mul_kernel[grid](
        gate_up_TM,
        out_TI,
        gate_up_TM.stride(0),
        width // 2,
        **activation_constants(activation),
        BLOCK_I=BLOCK_I,
        num_warps=4,
        **launch_options(),
    )
    return out_TI


def gate_mul_fp8(
    gate_up_TM: torch.Tensor, activation: Activation = Gate.SILU
) -> tuple[torch.Tensor, torch.Tensor]:
    """`gate_mul`, quantized as by `quantize_fp8`: q_TI in float8_e4m3fn, and scales_T1 in float32.

    The float32 products are quantized directly: they are not first rounded to the input's dtype.

    Rows may be strided; their elements are contiguous. I is at most 16,384, since a program holds a whole row.
    """
    num_tokens, width = gate_up_TM.shape
    assert gate_up_TM.stride(1) == 1, "a row is one span"
    assert width % 2 == 0, f"{width} columns are not pairs"
    q_TI = torch.empty((num_tokens, width // 2), dtype=torch.float8_e4m3fn, device=gate_up_TM.device)
    scales_T1 = torch.empty((num_tokens, 1), dtype=torch.float32, device=gate_up_TM.device)
    if num_tokens > 0:
        padded, num_warps = row_launch(width // 2)
        _gate_mul_fp8_kernel[(num_tokens,)](
            gate_up_TM,
            q_TI,
            scales_T1,
            gate_up_TM.stride(0),
            width // 2,
            **activation_constants(activation),
            PADDED_I=padded,
            num_warps=num_warps,
        )
    return q_TI, scales_T1


def activation_constants(activation: Activation) -> dict[str, object]:
    """The constants with which the kernels are compiled for this activation."""
    if isinstance(activation, ClampedSwiglu):
        return {"KIND": "swiglu", "ALPHA": activation.alpha, "LIMIT": activation.limit}
    return {"KIND": activation.value, "ALPHA": None, "LIMIT": None}


@triton.jit
def _gate_mul_kernel(  # type: ignore[no-untyped-def]
    gate_up_ptr,
    out_ptr,
    row_stride,
    num_columns,
    KIND: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    BLOCK_I: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_former(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_I + tl.arange(0, BLOCK_I)
    mask = columns < num_columns
    gate = tl.load(gate_up_ptr + row * row_stride + columns, mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * row_stride + num_columns + columns, mask, other=0.0).to(tl.float32)
    out = gated(gate, up, KIND, ALPHA, LIMIT)
    tl.store(out_ptr + row * num_columns + columns, out.to(out_ptr.dtype.element_ty), mask)


@triton.jit
def _gate_mul_fp8_kernel(  # type: ignore[no-untyped-def]
    gate_up_ptr,
    q_ptr,
    scales_ptr,
    row_stride,
    num_columns,
    KIND: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    PADDED_I: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, PADDED_I)
    mask = columns < num_columns
    gate = tl.load(gate_up_ptr + row * row_stride + columns, mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * row_stride + num_columns + columns, mask, other=0.0).to(tl.float32)
    out = gated(gate, up, KIND, ALPHA, LIMIT)
    store_quantized_row(out, q_ptr, scales_ptr, row, columns, num_columns)


@triton.jit
def gated(gate, up, KIND: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr):  # type: ignore[no-untyped-def]
    """activation(gate) * up. GELU is x / (1 + e^-2u), where u = sqrt(2 / pi) (x + 0.044715 x^3). Clamped
    values that are NaN stay NaN."""
    if KIND == "swiglu":
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
        return gate / (1.0 + tl.exp(-gate * ALPHA)) * (up + 1.0)
    elif KIND == "gelu_tanh":
        return gate / (1.0 + tl.exp(-gate * (1.5957691216057308 + 0.07135481627260025 * gate * gate))) * up
    else:
        return gate / (1.0 + tl.exp(-gate)) * up
