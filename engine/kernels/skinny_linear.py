"""A matrix product with few rows, as in decode at small batch: as fast as its weights can be read.

Each weight is used only T times, so arithmetic does not limit the speed. The limit is how many bytes of
weights are in flight: a Hopper needs about 25 KiB per multiprocessor. There are two kernels: one with
products and sums for up to 2 rows, one with matrix units for more rows. Neither splits a sum over programs,
so results are deterministic and need one launch.

Shape suffixes: T tokens, I input features, O output features.
"""

from dataclasses import replace

import torch
import triton

from engine.kernels.skinny_epilogue import InputNorm, Operands
from engine.kernels.skinny_linear_dot import DotLaunch, launch_dot
from engine.kernels.skinny_linear_fma import FmaLaunch, launch_fma

Launch = FmaLaunch | DotLaunch

MAX_TOKENS = 16
"""At most this many rows. The matrix units compute at least this many anyway, and with more rows other kernels
saturate the memory, too."""

MAX_FMA_TOKENS = 2
"""The most rows for the kernel with products and sums. With 4 rows, it takes a fifth longer than the kernel with matrix
units (measured on an H200)."""
MAX_X_ELEMENTS = 16_384
"""A program of the FMA kernel holds at most this many elements of x in registers: 64 in each of 256 threads, or 32 in
each of 512."""

MAX_X_ELEMENTS_FLOAT8 = 8_192
"""The limit for float8, whose conversion takes registers too: with more elements, too few programs fit a
multiprocessor, or registers spill."""

NUM_MULTIPROCESSORS = 132
"""Number of multiprocessors of a Hopper. On other GPUs the same launches are correct, but a little less
balanced."""


def skinny_linear(
    x_TI: torch.Tensor,
    weight_OI: torch.Tensor,
    bias_O: torch.Tensor | None = None,
    scales_O: torch.Tensor | None = None,
    *,
    norm: InputNorm | None = None,
    launch: Launch | None = None,
) -> torch.Tensor:
    """x @ weight.T (+ bias), T x O in x's dtype; sums in float32, rounded once. At most 16 tokens.

    The weight has x's dtype, or is float8_e4m3fn with a float32 scale for each output, and then means weight * scale.
    A float8 weight is refused if x is float32. Rows of x may be strided. With a norm, which `norms_input` must allow,
    x is first normed and rounded as by `rms_norm`. `launch` is for benchmarks: None chooses by shape.
    """
    y_TO = torch.empty((len(x_TI), len(weight_OI)), dtype=x_TI.dtype, device=x_TI.device)
    _launch(Operands(x_TI, weight_OI, bias_O, scales_O, y_TO, norm), launch)
    return y_TO


def skinny_gate_mul(
    x_TI: torch.Tensor,
    weight_OI: torch.Tensor,
    bias_O: torch.Tensor | None = None,
    scales_O: torch.Tensor | None = None,
    *,
    norm: InputNorm | None = None,
    launch: Launch | None = None,
) -> torch.Tensor:
    """`gate_mul` of the product of `skinny_linear`, bit for bit: T x O / 2, silu of its first half times its second."""
    assert len(weight_OI) % 2 == 0, f"{len(weight_OI)} outputs are not pairs"
    y_TP = torch.empty((len(x_TI), len(weight_OI) // 2), dtype=x_TI.dtype, device=x_TI.device)
    _launch(Operands(x_TI, weight_OI, bias_O, scales_O, y_TP, norm, is_gated=True), launch)
    return y_TP


def skinny_add_(
    y_TO: torch.Tensor,
    x_TI: torch.Tensor,
    weight_OI: torch.Tensor,
    bias_O: torch.Tensor | None = None,
    scales_O: torch.Tensor | None = None,
    *,
    launch: Launch | None = None,
) -> None:
    """Adds the product of `skinny_linear` to y in place. Rounds before and after the addition, as `add_rms_norm_`
    does."""
    assert y_TO.shape == (len(x_TI), len(weight_OI))
    assert y_TO.dtype is x_TI.dtype
    assert y_TO.is_contiguous()
    _launch(Operands(x_TI, weight_OI, bias_O, scales_O, y_TO, is_added=True), launch)


def norms_input(num_tokens: int, num_inputs: int, weight_bytes: int) -> bool:
    """Whether a product of this shape has all of x in registers, and so can norm x."""
    return isinstance(choose_launch(num_tokens, num_inputs, 1, weight_bytes), FmaLaunch)


def _launch(operands: Operands, launch: Launch | None) -> None:
    x_TI, weight_OI = operands.x_TI, operands.weight_OI
    bias_O, scales_O = operands.bias_O, operands.scales_O
    num_tokens, num_inputs = x_TI.shape
    num_outputs = len(weight_OI)
    is_float8 = weight_OI.dtype is torch.float8_e4m3fn
    assert num_tokens <= MAX_TOKENS, f"{num_tokens} tokens are not few"
    assert weight_OI.shape[1] == num_inputs, f"{num_inputs} inputs for weights of {weight_OI.shape[1]}"
    assert x_TI.stride(1) == 1, "a row is one span"
    assert weight_OI.is_contiguous()
    assert not operands.is_gated or weight_OI.numel() < 2**31, "pairs are found by offsets of 32 bits"
    assert is_float8 or weight_OI.dtype is x_TI.dtype, f"{x_TI.dtype} x {weight_OI.dtype}"
    assert is_float8 == (scales_O is not None), "float8 weights, and only they, have scales"
    assert not (is_float8 and x_TI.dtype is torch.float32), "float8 weights are for activations of 16 bits"
    for vector_O in (bias_O, scales_O):
        assert vector_O is None or vector_O.shape == (num_outputs,)
        assert vector_O is None or vector_O.is_contiguous()
    if operands.norm is not None:
        assert operands.norm.weight_I.shape == (num_inputs,)
        assert operands.norm.weight_I.is_contiguous()
    if num_tokens == 0:
        return
    if launch is None:
        is_normed, weight_bytes = operands.norm is not None, weight_OI.dtype.itemsize
        launch = choose_launch(num_tokens, num_inputs, num_outputs, weight_bytes, is_normed=is_normed)
        if operands.is_gated and isinstance(launch, FmaLaunch) and launch.rows == 1:
            launch = replace(launch, rows=2, max_programs=max(NUM_MULTIPROCESSORS, launch.max_programs // 2))
    if isinstance(launch, FmaLaunch):
        launch_fma(launch, operands)
    else:
        launch_dot(launch, operands)


def choose_launch(
    num_tokens: int, num_inputs: int, num_outputs: int, weight_bytes: int, *, is_normed: bool = False
) -> Launch:
    """Chooses a launch only by the shape. The choices are from measurements on an H200, with 16-bit weights of an 8B
    model.

    `weight_bytes`: the bytes of one element of the weights.
    """
    padded_tokens = triton.next_power_of_2(num_tokens)
    padded_inputs = triton.next_power_of_2(num_inputs)
    max_elements = MAX_X_ELEMENTS if weight_bytes > 1 else MAX_X_ELEMENTS_FLOAT8
    if padded_tokens <= MAX_FMA_TOKENS and padded_tokens * padded_inputs <= max_elements:
        return _choose_fma(padded_tokens, padded_inputs, weight_bytes, is_normed=is_normed)
    return _choose_dot(num_outputs, weight_bytes)


def _choose_fma(padded_tokens: int, padded_inputs: int, weight_bytes: int, *, is_normed: bool) -> FmaLaunch:
    """Chooses programs of 256 threads. A tile has 64 bytes of weights for each thread, and two tiles are in registers:
    one in use, the other being loaded. There are as many programs as registers allow. A multiprocessor runs 4 programs
    if x takes 16 of a thread's registers (61 in all), 3 if it takes 32 (80 in all; 2 programs if x is normed, with 89),
    and 2 if it takes 64 (122 in all). With float8 it runs 2: the conversion needs more registers (96 or 112). So 32 to
    64 KiB are in flight. For longer rows there is one program, of 512 threads, with 128 bytes of weights for each."""
    num_warps = 16 if padded_inputs > 8192 else min(8, max(1, padded_inputs // 256))
    num_threads = 32 * num_warps
    tile_bytes = (128 if num_warps == 16 else 64) * num_threads
    rows = min(8, max(1, tile_bytes // (padded_inputs * weight_bytes)))
    x_registers = padded_tokens * padded_inputs // num_threads
    if num_warps == 16:
        programs_each = 1
    elif weight_bytes == 1 or x_registers > 32 or (is_normed and x_registers > 16):
        programs_each = 2 * 8 // num_warps
    else:
        programs_each = (4 if x_registers <= 16 else 3) * 8 // num_warps
    return FmaLaunch(rows, num_warps, NUM_MULTIPROCESSORS * programs_each)


def _choose_dot(num_outputs: int, weight_bytes: int) -> DotLaunch:
    """Every program reads all of x. In bfloat16, x has T / block_outputs times the bytes of the program's weights. So
    blocks are large, as long as there are enough blocks for every multiprocessor. 48 to 144 KiB are in flight on
    each multiprocessor."""
    if weight_bytes == 4:
        return DotLaunch(
            block_outputs=32, block_inputs=32, num_warps=4, num_stages=2
        )  # for correctness, not speed
    is_large = num_outputs >= 64 * 2 * NUM_MULTIPROCESSORS
    if weight_bytes == 1:
        return DotLaunch(block_outputs=64 if is_large else 32, block_inputs=256, num_warps=2, num_stages=4)
    if is_large:
        return DotLaunch(block_outputs=128, block_inputs=128, num_warps=4, num_stages=3)
    # Blocks of fewer than 64 outputs do not use Hopper's wgmma, but give a narrow product more programs.
    block_outputs = 64 if num_outputs >= 64 * 64 else 32
    return DotLaunch(block_outputs, block_inputs=256, num_warps=4, num_stages=4)
