"""The packed product equals torch's own."""

import pytest
import torch
import torch.nn.functional as F

from engine.layers.linear import Linear


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_rows", [1, 7, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_linear_equals_torch(dtype: torch.dtype, num_rows: int, has_bias: bool) -> None:
    torch.manual_seed(0)
    weight, bias = torch.randn(48, 32).to(dtype), torch.randn(48).to(dtype) if has_bias else None
    x = torch.randn(num_rows, 32).to(dtype)
    expected = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    tolerance = 1e-5 if dtype is torch.float32 else 0.1
    torch.testing.assert_close(Linear(weight, bias)(x).double(), expected, rtol=0, atol=tolerance)


def test_rows_may_lie_apart() -> None:
    x = torch.randn(6, 2, 32)[:, 1]
    weight = torch.randn(16, 32)
    torch.testing.assert_close(Linear(weight)(x), F.linear(x, weight), rtol=0, atol=1e-5)
