"""Every kind of block gives exactly the numbers of the `gguf` package's own dequantization."""

import gguf
import numpy as np
import pytest
import torch

from engine.layers.grouped_weight import GroupedWeight
from engine.loading.gguf import GgufType
from engine.loading.gguf_blocks import matrix_of

BITS = {"Q4_0": 4, "Q4_1": 4, "Q5_0": 8, "Q5_1": 8, "Q8_0": 8, "Q4_K": 4, "Q5_K": 8, "Q6_K": 8, "MXFP4": 4}


@pytest.mark.parametrize("kind", GgufType, ids=lambda kind: kind.name)
def test_numbers_equal_the_gguf_packages(kind: GgufType) -> None:
    """The bytes are random, so scales of every sign and size occur. Where a scale is infinite or NaN, so is
    the number."""
    generator = np.random.default_rng(7)
    num_columns = 768
    row_bytes = num_columns // kind.block_size * kind.block_bytes
    rows = generator.integers(0, 256, (64, row_bytes), dtype=np.uint8)
    if kind is GgufType.MXFP4:  # exponents of all sizes whose numbers are finite, whatever their codes are
        rows[:, :: kind.block_bytes] = np.minimum(rows[:, :: kind.block_bytes], 250)
        rows[0, 0], rows[1, 0] = 0, 1
    with np.errstate(invalid="ignore", over="ignore"):
        expected = gguf.dequantize(rows, gguf.GGMLQuantizationType[kind.name])
    matrix = matrix_of(kind, torch.from_numpy(rows.copy()))
    if isinstance(matrix, GroupedWeight):
        assert matrix.bits == BITS[kind.name]
        assert int(matrix.values_OI.max()) < 2**matrix.bits
        found = matrix.dequantized()
    else:
        found = matrix.float()
    is_finite = np.isfinite(expected)
    assert is_finite.mean() > 0.8
    assert np.array_equal(found.numpy()[is_finite], expected[is_finite])


@pytest.mark.parametrize("kind", GgufType, ids=lambda kind: kind.name)
def test_blocks_are_as_large_as_the_gguf_package_says(kind: GgufType) -> None:
    number = gguf.GGMLQuantizationType[kind.name]
    assert (kind.number, kind.block_size, kind.block_bytes) == (int(number), *gguf.GGML_QUANT_SIZES[number])


def test_groups_of_16_stay_groups_of_16() -> None:
    matrix = matrix_of(GgufType.Q6_K, torch.zeros(2, 210, dtype=torch.uint8))
    assert isinstance(matrix, GroupedWeight)
    assert (matrix.group_size, tuple(matrix.scales_OG.shape)) == (16, (2, 16))
