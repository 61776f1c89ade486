"""Products by our own CPU kernels, compiled for each instruction set that this machine has."""

import ctypes
import platform
from dataclasses import replace
from pathlib import Path
from typing import Literal, cast

import pytest
import torch
import torch.nn.functional as F

from engine.layers.grouped_weight import GroupedWeight
from engine.layers.linear import Linear
from engine.layers.native_linear import NativeLinear, NativeLinears, shortened
from engine.native.instructions import InstructionSet, machine_instruction_sets, machine_instructions
from engine.native.library import _file_name, compile_kernels, native_library
from engine.native.products import Products

pytestmark = pytest.mark.skipif(native_library() is None, reason="needs a C++ compiler")

PORTABLE = InstructionSet("portable", platform.machine(), frozenset(), ())
"""What compilers make without a flag for a machine."""
MACHINES, OTHERS = machine_instructions(), (*machine_instruction_sets()[1:], PORTABLE)
NEAR_OTHERS = ("avx512-vnni-bf16",)
SETS = [
    MACHINES,
    *(
        pytest.param(
            instructions, marks=pytest.mark.by_hand if instructions.name in NEAR_OTHERS else pytest.mark.slow
        )
        for instructions in OTHERS
        if instructions.name != "avx512-vnni"
    ),
]
"""Compiling takes long. Both choices of avx512-vnni between instructions are also made by another set. Those of
avx512-vnni-bf16 are avx512-amx's for few rows, and avx512's for many."""
ROWS = (*range(1, 21), 64, 300)
"""300: more than what is quantized or converted at a time."""


@pytest.fixture(scope="module", params=SETS, ids=lambda instructions: instructions.name)
def products(request: pytest.FixtureRequest) -> Products:
    """Kernels are compiled again only if their source has changed. Only the kernels of the machine's best instruction
    set are optimized as for a user. The others are optimized little, which takes half the time, and use the same
    instructions.
    """
    if request.param == MACHINES:
        return Products(cast("ctypes.CDLL", native_library()))
    assert request.config.cache is not None
    library = request.config.cache.mkdir("native") / _file_name(request.param)
    if not library.is_file():
        little = replace(request.param, compiler_flags=(*request.param.compiler_flags, "-O1"))
        compile_kernels(little, library, "*_products.cpp")
    return Products(ctypes.CDLL(str(library)))


def by_threads(layer: NativeLinear, x_TI: torch.Tensor, num_threads: int) -> torch.Tensor:
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    y_TO = layer(x_TI)
    torch.set_num_threads(before)
    return y_TO


def check_rows(layer: NativeLinear, x_TI: torch.Tensor) -> None:
    """A row's result is the same in any step and with any number of threads."""
    rows_TO = torch.cat([by_threads(layer, x_TI[row : row + 1], 1) for row in range(len(x_TI))])
    for num_rows in ROWS:
        assert torch.equal(by_threads(layer, x_TI[:num_rows], 3), rows_TO[:num_rows]), num_rows


def quantized(x_TI: torch.Tensor, group_size: int) -> torch.Tensor:
    """Rows as the kernels round them, in float64."""
    groups = x_TI.to(torch.float32).unflatten(-1, (-1, group_size))
    scales = groups.abs().amax(-1, keepdim=True) / 127
    inverse = torch.where(scales > 0, 127 / groups.abs().amax(-1, keepdim=True), 0.0)
    rounded_TI: torch.Tensor = ((groups * inverse).round().double() * scales.double()).flatten(-2)
    return rounded_TI


@pytest.mark.parametrize("num_outputs", [1, 16, 83])
@pytest.mark.parametrize("group_size", [16, 32])
@pytest.mark.parametrize("bits", [4, 8])
def test_grouped_products(products: Products, bits: Literal[4, 8], group_size: int, num_outputs: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(max(ROWS), 160) * torch.logspace(-2, 2, 160)
    bias = torch.randn(num_outputs)
    weight = GroupedWeight.quantize(
        torch.randn(num_outputs, 160) / torch.logspace(-2, 2, 160), bits, group_size
    )
    layer = NativeLinear.of_groups(products, weight, bias)
    rounded = GroupedWeight(
        weight.values_OI, bits, group_size, halved(weight.scales_OG), halved(weight.mins_OG)
    )
    expected = F.linear(quantized(x, group_size), rounded.dequantized().double(), bias.double())
    magnitude = F.linear(quantized(x, group_size).abs(), rounded.dequantized().double().abs())
    found = layer(x).double()
    assert ((found - expected).abs() <= 1e-5 * (magnitude + 1)).all()
    # The rounding of activations is an error of less than one of 8 bits' steps.
    exact = F.linear(x.double(), weight.dequantized().double(), bias.double())
    assert ((found - exact).abs() <= magnitude / 50 + 1e-5).all()
    check_rows(layer, x)


@pytest.mark.parametrize("group_size", [16, 32])
@pytest.mark.parametrize(("bits", "zero"), [(4, 8), (4, None), (8, 128), (8, 32), (8, 16), (8, None)])
def test_zero_is_one_value_or_differs_between_groups(
    products: Products, bits: Literal[4, 8], zero: int | None, group_size: int
) -> None:
    """Formats with one value for zero keep no minima. Scales are powers of two, so none is rounded."""
    torch.manual_seed(0)
    x, values_OI = torch.randn(max(ROWS), 160), torch.randint(2**bits, (83, 160), dtype=torch.uint8)
    scales_OG = torch.randint(-9, 3, (83, 160 // group_size)).exp2()
    zeros_OG = torch.randint(2**bits, scales_OG.shape) if zero is None else torch.tensor(zero)
    weight = GroupedWeight(values_OI, bits, group_size, scales_OG, -(scales_OG * zeros_OG))
    assert weight.centre == zero
    layer = NativeLinear.of_groups(products, weight, None)
    numbers_OI = weight.dequantized().double()
    magnitude = F.linear(quantized(x, group_size).abs(), numbers_OI.abs())
    found = layer(x).double()
    assert ((found - F.linear(quantized(x, group_size), numbers_OI)).abs() <= 1e-5 * (magnitude + 1)).all()
    check_rows(layer, x)


@pytest.mark.parametrize("group_size", [16, 32])
def test_floats_of_4_bits_are_multiplied_as_they_are(products: Products, group_size: int) -> None:
    """The result is compared with torch's for the numbers that the bits stand for. Scales are powers of two, so none
    is rounded."""
    torch.manual_seed(0)
    x, codes_OI = torch.randn(max(ROWS), 160), torch.randint(16, (83, 160), dtype=torch.uint8)
    scales_OG = torch.randint(-9, 3, (83, 160 // group_size)).exp2()
    weight = GroupedWeight(codes_OI, 4, group_size, scales_OG / 2, scales_OG * -6, is_e2m1=True)
    sizes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    numbers_OI = torch.cat((sizes, -sizes))[codes_OI.long()] * scales_OG.repeat_interleave(group_size, 1)
    assert torch.equal(weight.dequantized(), numbers_OI)
    assert weight.centre == 12
    layer = NativeLinear.of_groups(products, weight, None)
    expected = F.linear(quantized(x, group_size), numbers_OI.double())
    magnitude = F.linear(quantized(x, group_size).abs(), numbers_OI.double().abs())
    assert ((layer(x).double() - expected).abs() <= 1e-5 * (magnitude + 1)).all()
    check_rows(layer, x)


@pytest.mark.parametrize("group_size", [16, 32])
@pytest.mark.parametrize(
    ("bits", "is_e2m1", "value"), [(4, False, 15), (4, True, 7), (8, False, 255), (8, False, 0)]
)
def test_sums_of_the_largest_values_do_not_overflow(
    products: Products, bits: Literal[4, 8], is_e2m1: bool, value: int, group_size: int
) -> None:
    values_OI = torch.full((16, 96), value, dtype=torch.uint8)
    scales_OG = torch.ones(16, 96 // group_size)
    for zero in (12.0,) if is_e2m1 else (0.0, 12.0):
        weight = GroupedWeight(values_OI, bits, group_size, scales_OG, scales_OG * -zero, is_e2m1)
        number = (24 if is_e2m1 else value) - zero
        for sign in (1.0, -1.0):
            found = NativeLinear.of_groups(products, weight, None)(torch.full((7, 96), sign))
            torch.testing.assert_close(found, torch.full((7, 16), sign * number * 96))


def test_a_merged_matrix_whose_parts_have_different_zeros_keeps_minima(products: Products) -> None:
    torch.manual_seed(0)
    x, scales_OG = torch.randn(3, 96), torch.ones(16, 3)
    parts = [
        GroupedWeight(torch.randint(16, (16, 96), dtype=torch.uint8), 4, 32, scales_OG, scales_OG * -zero)
        for zero in (8.0, 12.0)
    ]
    merged = GroupedWeight.concatenated(parts)
    assert merged.centre is None
    found = NativeLinear.of_groups(products, merged, None)(x)
    separate = [NativeLinear.of_groups(products, part, None)(x) for part in parts]
    torch.testing.assert_close(found, torch.cat(separate, 1), rtol=1e-5, atol=1e-4)


def test_activations_that_are_almost_zero_stay_finite(products: Products) -> None:
    for layer in layers(products, 50, None):
        assert layer(torch.full((2, 96), 1e-38)).isfinite().all()


def halved(per_group: torch.Tensor) -> torch.Tensor:
    """The numbers with the 11 significant bits that the kernels keep."""
    mantissa, exponent = torch.frexp(per_group)
    return torch.ldexp((mantissa * 2048).round() / 2048, exponent)


@pytest.mark.parametrize("num_inputs", [1, 96, 99, 1700])
@pytest.mark.parametrize("num_outputs", [1, 32, 83, 200])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_products_in_float32(
    products: Products, dtype: torch.dtype, num_outputs: int, num_inputs: int
) -> None:
    torch.manual_seed(0)
    x, bias = torch.randn(max(ROWS), num_inputs), torch.randn(num_outputs)
    weight = torch.randn(num_outputs, num_inputs).to(dtype).to(torch.float32)
    layer = NativeLinear.of_floats(products, weight, bias)
    expected = F.linear(x.double(), weight.double(), bias.double())
    torch.testing.assert_close(layer(x).double(), expected, rtol=0, atol=2e-6 * num_inputs + 1e-6)
    check_rows(layer, x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_products_of_16_bits(products: Products, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(max(ROWS), 900), torch.randn(83, 900), torch.randn(83)
    x, weight, bias = x.to(dtype), weight.to(dtype), bias.to(dtype)
    layer = NativeLinear.of_floats(products, weight, bias)
    expected = F.linear(x.double(), weight.double(), bias.double())
    assert layer(x).dtype is dtype
    precision = torch.finfo(dtype).eps
    torch.testing.assert_close(layer(x).double(), expected, rtol=precision, atol=precision)
    check_rows(layer, x)


def test_float32_weights_are_kept_in_16_bits_if_those_hold_them() -> None:
    torch.manual_seed(0)
    exact = torch.randn(40, 40)
    assert shortened(exact) is exact
    for dtype in (torch.bfloat16, torch.float16):
        short = exact.to(dtype)
        assert shortened(short) is short
        found = shortened(short.to(torch.float32))
        assert found.dtype is dtype
        assert torch.equal(found, short)


def test_no_copy_in_float32_is_made_to_compare_with_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are compared in parts. Here the last part, of one row, decides."""
    largest = 0
    equal = torch.equal

    def watched(one: torch.Tensor, other: torch.Tensor) -> bool:
        nonlocal largest
        largest = max(largest, one.numel())
        return equal(one, other)

    monkeypatch.setattr(torch, "equal", watched)
    weight = torch.ones(1025, 2048)
    assert shortened(weight).dtype is torch.bfloat16
    assert largest == 2**20
    weight[-1, -1] = 1.0 + 2**-10
    assert shortened(weight).dtype is torch.float16
    weight[-1, -1] = 1.0 + 2**-20
    assert shortened(weight) is weight


def layers(products: Products, num_outputs: int, bias: torch.Tensor | None) -> list[NativeLinear]:
    weight = torch.randn(num_outputs, 96)
    return [
        NativeLinear.of_floats(products, weight, bias),
        NativeLinear.of_floats(products, weight.to(torch.bfloat16), bias),
        *(NativeLinear.of_groups(products, GroupedWeight.quantize(weight, bits), bias) for bits in (4, 8)),
        NativeLinear.of_groups(products, centred_4_bits(weight), bias),
    ]


def centred_4_bits(weight_OI: torch.Tensor) -> GroupedWeight:
    """Rounds to 4 bits as Q4_0 does: 8 means zero."""
    groups_OGS = weight_OI.unflatten(-1, (-1, 32))
    scales_OG = groups_OGS.abs().amax(-1) / 7
    values_OI = ((groups_OGS / scales_OG.unsqueeze(-1)).round() + 8).flatten(1).to(torch.uint8)
    return GroupedWeight(values_OI, 4, 32, scales_OG, scales_OG * -8.0)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_rows", [1, 7, 300])
def test_gated_products(products: Products, num_rows: int, has_bias: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(num_rows, 96)
    for layer in layers(products, 192, torch.randn(192) if has_bias else None):
        gate, up = layer(x).chunk(2, -1)
        found = torch.empty(num_rows, 96)
        layer.gated(x, found)
        torch.testing.assert_close(found, F.silu(gate.double()).mul(up).float(), rtol=1e-5, atol=1e-5)


def test_products_are_added(products: Products) -> None:
    torch.manual_seed(0)
    x, before = torch.randn(7, 96), torch.randn(7, 50)
    for layer in layers(products, 50, torch.randn(50)):
        found = before.clone()
        layer.add_(found, x)
        assert torch.equal(found, before + layer(x))


def test_rows_may_lie_apart(products: Products) -> None:
    torch.manual_seed(0)
    x = torch.randn(6, 2, 96)[:, 1]
    for layer in layers(products, 50, None):
        assert torch.equal(layer(x), layer(x.contiguous()))
        assert torch.equal(layer(x.t().contiguous().t()), layer(x.contiguous()))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_activations_that_are_not_finite_show(products: Products, value: float) -> None:
    x = torch.randn(5, 96)
    x[2, 40] = value
    for layer in layers(products, 50, None):
        found = layer(x)
        assert not found[2].isfinite().any()
        assert found[[0, 1, 3, 4]].isfinite().all()


def test_zeros(products: Products) -> None:
    for layer in layers(products, 50, None):
        assert (layer(torch.zeros(2, 96)) == 0).all()
    zeros = NativeLinear.of_groups(products, GroupedWeight.quantize(torch.zeros(50, 96), 4), None)
    assert (zeros(torch.randn(2, 96)) == 0).all()


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs Linux' list of threads")
def test_products_with_less_work_than_threads_keep_all_threads(products: Products) -> None:
    small, large = (
        NativeLinear.of_floats(products, torch.randn(num_outputs, 64), None) for num_outputs in (64, 2000)
    )
    x = torch.randn(40, 64)
    by_threads(large, x, 5)
    threads = thread_ids()
    for layer in (small, large) * 3:
        for num_rows in (1, 2, 40):
            by_threads(layer, x[:num_rows], 5)
            assert thread_ids() == threads


def thread_ids() -> set[str]:
    return {task.name for task in Path("/proc/self/task").iterdir()}


@pytest.mark.parametrize("num_threads", [1, 3, 16])
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "4 bits", "8 bits"])
def test_layers_of_equal_shape_multiply_their_own_rows(
    products: Products, kind: str, num_threads: int
) -> None:
    """The results equal those of one layer after another, to the bit: for layers with many rows, few or none,
    for rows in any order, and for shares of outputs."""
    torch.manual_seed(8)
    dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
    weights = [torch.randn(192, 96).to(dtype) for _ in range(5)]
    if "bits" in kind:
        bits: Literal[4, 8] = 4 if kind == "4 bits" else 8
        layers = [NativeLinear.of_groups(products, GroupedWeight.quantize(w, bits), w[:, 0]) for w in weights]
    else:
        layers = [NativeLinear.of_floats(products, w, w[:, 0]) for w in weights]
    x_TI, together = torch.randn(60, 96).to(dtype), NativeLinears(layers)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    for counts in ([1, 0, 2, 1, 0], [0, 290, 1, 12, 20], [0, 0, 0, 0, 0]):
        order_P = torch.randint(0, 60, (sum(counts),))
        firsts_N = torch.tensor([0, *counts]).cumsum(0)
        y_PO, gated_PO = x_TI.new_empty(sum(counts), 192), x_TI.new_empty(sum(counts), 96)
        together.store(x_TI, firsts_N, order_P, y_PO)
        in_order_PO = torch.empty_like(y_PO)
        together.store(x_TI[order_P], firsts_N, None, in_order_PO)
        together.gated(x_TI, firsts_N, order_P, gated_PO)
        assert torch.equal(in_order_PO, y_PO)
        assert torch.equal(
            y_PO, torch.cat([layer(rows) for layer, rows in of_each(layers, x_TI[order_P], counts)])
        )
        for (layer, rows_RI), found_RO in zip(
            of_each(layers, x_TI[order_P], counts), gated_PO.split(counts), strict=True
        ):
            layer.gated(rows_RI, expected_RO := torch.empty_like(found_RO))
            assert torch.equal(found_RO, expected_RO)
    torch.set_num_threads(before)


def of_each(
    layers: list[NativeLinear], x_PI: torch.Tensor, counts: list[int]
) -> list[tuple[NativeLinear, torch.Tensor]]:
    return list(zip(layers, x_PI.split(counts), strict=True))


@pytest.mark.parametrize("dtypes", [(torch.int32, torch.int64), (torch.int64, torch.int32)])
def test_places_of_rows_are_numbers_of_64_bits(
    products: Products, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    """Numbers of other types would be read as places far outside of the rows."""
    together = NativeLinears([NativeLinear.of_floats(products, torch.randn(32, 64), None)])
    firsts_N, order_P = (torch.tensor([0, 0], dtype=dtype) for dtype in dtypes)
    with pytest.raises(AssertionError):
        together.store(torch.randn(2, 64), firsts_N, order_P, torch.empty(0, 32))


def test_only_layers_of_one_kind_and_shape_are_joined(products: Products) -> None:
    weight = torch.randn(32, 64)
    plain, short, taller = (
        NativeLinear.of_floats(products, each, None)
        for each in (weight, weight.to(torch.bfloat16), torch.randn(64, 64))
    )
    grouped = NativeLinear.of_groups(products, GroupedWeight.quantize(weight, 8), None)
    assert NativeLinears.joined([plain, short]) is not None
    for other in (taller, grouped, Linear(weight, None)):
        assert NativeLinears.joined([plain, other]) is None
