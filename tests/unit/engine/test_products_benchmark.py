"""benchmarks.cpu_products computes every side, and all sides of a kind of weights the same product."""

import pytest
import torch

from benchmarks.cpu_products import OURS, measure, sides
from engine.native.library import native_library
from engine.native.products import Products


@pytest.fixture
def products() -> Products:
    library = native_library()
    if library is None:
        pytest.skip("needs a C++ compiler")
    return Products(library)


def test_sides_agree(products: Products) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(64, 64), torch.randn(5, 64)
    expected = x @ weight.t()
    for side in sides(products):
        found = side.make(weight)(x.to(side.dtype))
        assert isinstance(found, torch.Tensor)
        tolerance = {"int4": 1.5, "int8": 0.4}.get(side.weights, 0.2 if "bf16" in side.weights else 1e-4)
        assert (found.float() - expected).abs().max() < tolerance * expected.std(), side


def test_every_side_is_measured(products: Products) -> None:
    figures = list(measure([(64, 64), (96, 64)], [1, 3], 0.01, products))
    assert {(f.weights, f.side, f.rows) for f in figures} == {
        (side.weights, side.name, rows) for side in sides(products) for rows in (1, 3)
    }
    assert all(0 <= f.milliseconds < 1000 for f in figures)
    assert {f.weights for f in figures if f.side == OURS} == {f.weights for f in figures}
