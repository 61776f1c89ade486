"""silu(gate) * up, quantised to float8 in the same pass: what the gated MLP's second W8A8 linear takes.

Shape suffixes: T tokens, I intermediate size, M = 2 x I (the gates, then what they scale).
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from engine.kernels.quantize_fp8 import quantize_fp8_reference, store_quantized_row
from engine.kernels.row_launch import row_launch


def silu_mul_fp8(gate_up_TM: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """q_TI in float8_e4m3fn and float32 scales_T1, as `quantize_fp8` makes them; not rounded in between.

    Rows may be strided, their elements not; I is at most 16,384, since a program has a whole row.
    """
    num_tokens, width = gate_up_TM.shape
    assert gate_up_TM.stride(1) == 1, "a row is one span"
    assert width % 2 == 0, f"{width} columns are not pairs"
    q_TI = torch.empty((num_tokens, width // 2), dtype=torch.float8_e4m3fn, device=gate_up_TM.device)
    scales_T1 = torch.empty((num_tokens, 1), dtype=torch.float32, device=gate_up_TM.device)
    if num_tokens > 0:
        padded, num_warps = row_launch(width // 2)
        _silu_mul_fp8_kernel[(num_tokens,)](
            gate_up_TM,
            q_TI,
            scales_T1,
            gate_up_TM.stride(0),
            width // 2,
            PADDED_I=padded,
            num_warps=num_warps,
        )
    return q_TI, scales_T1


def silu_mul_fp8_reference(gate_up_TM: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same in torch."""
    gate_TI, up_TI = gate_up_TM.to(torch.float32).chunk(2, -1)
    return quantize_fp8_reference(F.silu(gate_TI) * up_TI)


@triton.jit
def _silu_mul_fp8_kernel(  # type: ignore[no-untyped-def]
    gate_up_ptr, q_ptr, scales_ptr, row_stride, num_columns, PADDED_I: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, PADDED_I)
    mask = columns < num_columns
    gate = tl.load(gate_up_ptr + row * row_stride + columns, mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * row_stride + num_columns + columns, mask, other=0.0).to(tl.float32)
    out = gate / (1.0 + tl.exp(-gate)) * up
    store_quantized_row(out, q_ptr, scales_ptr, row, columns, num_columns)
