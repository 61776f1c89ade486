"""8-bit floats: rounding, scales, and the product with them."""

from typing import Literal

import pytest
import torch
import torch.nn.functional as F

from baton.config import ModelConfig
from baton.config.engine import KVCacheDtype
from baton.errors import ConfigError
from engine.layers.fp8 import FP8, FP8_MAX, as_bytes, quantize_rows, saturate
from engine.layers.linear import Fp8Linear, can_multiply_fp8
from engine.loading.loader import check_fp8


def test_saturate_rounds_to_the_nearest_and_never_overflows() -> None:
    x = torch.tensor([0.0, 1.06, 1.07, -3.3, 448.0, 470.0, 1e30, -1e30, torch.inf])
    expected = torch.tensor([0.0, 1.0, 1.125, -3.25, 448.0, 448.0, 448.0, -448.0, 448.0])
    assert torch.equal(saturate(x).float(), expected)
    assert saturate(torch.tensor([torch.nan])).isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_quantized_rows_keep_their_values_to_a_sixteenth(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = (torch.randn(6, 40) * torch.tensor([1e-3, 1.0, 30.0, 900.0, 5.0, 0.0]).unsqueeze(1)).to(dtype)
    quantized, scale = quantize_rows(x)
    assert (quantized.dtype, scale.dtype, scale.shape) == (FP8, torch.float32, (6, 1))
    values = quantized.float() * scale
    assert (quantized.float().abs().amax(-1)[:5] == FP8_MAX).all()
    assert (values[5] == 0).all()
    # half a unit in the last of 3 bits; below 2**-6 of the format, half its smallest step
    bound = torch.maximum(x.float().abs() / 16, scale * 2.0**-10)
    assert ((values - x.float()).abs() <= bound).all()


def test_bytes_are_a_view() -> None:
    x = saturate(torch.randn(3, 4))
    as_bytes(x)[1] = 0
    assert (x[1].float() == 0).all()
    assert as_bytes(x).dtype is torch.uint8
    plain = torch.randn(2)
    assert as_bytes(plain) is plain


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_on_cpu_only_weights_are_rounded(dtype: torch.dtype, has_bias: bool) -> None:
    torch.manual_seed(0)
    weight = (torch.randn(48, 32) * torch.logspace(-3, 2, 48).unsqueeze(1)).to(dtype)
    bias = torch.randn(48).to(dtype) if has_bias else None
    x = torch.randn(7, 32).to(dtype)
    quantized, scale = quantize_rows(weight)
    linear = Fp8Linear(weight.clone(), bias)
    found = linear(x)
    assert found.dtype is dtype
    exact = F.linear(x.double(), quantized.double() * scale.double(), None if bias is None else bias.double())
    eps = torch.finfo(dtype).eps
    size = x.double().abs() @ (quantized.double() * scale.double()).abs().T
    assert ((found.double() - exact).abs() <= 4 * eps * (size + exact.abs())).all()
    assert not torch.allclose(found.double(), F.linear(x.double(), weight.double()), rtol=0.0, atol=1e-4)


def test_a_large_channel_does_not_cost_the_others_their_precision() -> None:
    torch.manual_seed(0)
    weight = torch.randn(16, 32)
    weight[3] *= 1e6
    x = torch.randn(4, 32)
    error = (Fp8Linear(weight)(x) - F.linear(x, weight)).abs()
    others = torch.arange(16) != 3
    assert error[:, others].max() < 1.0


def scaled_mm(
    a_TI: torch.Tensor,
    b_IO: torch.Tensor,
    *,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    out_dtype: torch.dtype,
    use_fast_accum: bool,
) -> torch.Tensor:
    """Replaces torch._scaled_mm with scales by row. Checks its conditions on a GPU
    (aten/src/ATen/native/cuda/ScaledBlas.cpp)."""
    assert a_TI.dtype is b_IO.dtype is FP8
    assert a_TI.stride() == (a_TI.shape[1], 1), "row-major"
    assert b_IO.stride() == (1, b_IO.shape[0]), "column-major"
    assert b_IO.shape[0] % 16 == b_IO.shape[1] % 16 == 0
    assert scale_a.dtype is scale_b.dtype is torch.float32
    assert scale_a.shape == (len(a_TI), 1)
    assert scale_b.shape == (1, b_IO.shape[1])
    assert scale_a.is_contiguous()
    assert scale_b.is_contiguous()
    assert out_dtype is torch.bfloat16, "CUTLASS has no other"
    assert use_fast_accum
    return ((a_TI.double() * scale_a) @ (b_IO.double() * scale_b)).to(out_dtype)


@pytest.mark.parametrize("num_rows", [1, 5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_product_of_two_8_bit_operands(
    dtype: torch.dtype, num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    weight, bias = torch.randn(48, 32).to(dtype), torch.randn(48).to(dtype)
    x = (torch.randn(num_rows, 32) * 20).to(dtype)
    monkeypatch.setattr("engine.layers.linear.can_multiply_fp8", lambda _: True)
    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    found = Fp8Linear(weight, bias)(x)
    assert found.dtype is dtype
    (q, q_scale), (w, w_scale) = quantize_rows(x), quantize_rows(weight)
    expected = (q.double() * q_scale) @ (w.double() * w_scale).T + bias.double()
    torch.testing.assert_close(found.double(), expected, rtol=2**-7, atol=2**-7 * 20)


def test_only_a_gpu_that_can_multiplies_8_bit_floats(monkeypatch: pytest.MonkeyPatch) -> None:
    class Weight:
        def __init__(self, device: str, dtype: torch.dtype, *shape: int) -> None:
            self.device, self.dtype, self.shape = torch.device(device), dtype, shape

    def can(device: str, capability: tuple[int, int], dtype: torch.dtype, *shape: int) -> bool:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
        return can_multiply_fp8(Weight(device, dtype, *shape))  # type: ignore[arg-type]

    assert can("cuda", (9, 0), torch.bfloat16, 48, 32)
    assert can("cuda", (8, 9), torch.float16, 48, 32)
    assert not can("cuda", (8, 0), torch.bfloat16, 48, 32)
    assert not can("cuda", (9, 0), torch.float32, 48, 32)
    assert not can("cuda", (9, 0), torch.bfloat16, 48, 40)
    assert not can("cuda", (9, 0), torch.bfloat16, 40, 32)
    assert not can("cpu", (9, 0), torch.bfloat16, 48, 32)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("num_rows", [1, 3, 16, 300])
def test_on_a_gpu_the_product_equals_the_one_written_out(num_rows: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    device = torch.device("cuda")
    weight, bias = torch.randn(192, 256, device=device).to(dtype), torch.randn(192, device=device).to(dtype)
    x = torch.randn(num_rows, 256, device=device).to(dtype)
    found = Fp8Linear(weight, bias)(x)
    assert found.dtype is dtype
    (q, q_scale), (w, w_scale) = quantize_rows(x), quantize_rows(weight)
    expected = (q.double() * q_scale) @ (w.double() * w_scale).T + bias.double()
    torch.testing.assert_close(found.double(), expected, rtol=2**-6, atol=2**-6 * 16)


@pytest.mark.parametrize(
    ("capability", "quantization", "kv_cache_dtype", "key"),
    [
        ((8, 0), "fp8", "auto", "model.quantization"),
        ((8, 6), "auto", "fp8", "engine.kv_cache_dtype"),
        ((8, 0), "auto", "auto", None),
        ((8, 9), "fp8", "fp8", None),
    ],
)
def test_gpus_without_8_bit_floats_refuse_them_by_the_key(
    capability: tuple[int, int],
    quantization: Literal["auto", "fp8"],
    kv_cache_dtype: KVCacheDtype,
    key: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise their kernels would fail to compile, after the weights have been loaded."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    config = ModelConfig(quantization=quantization)
    check_fp8(config, kv_cache_dtype, torch.device("cpu"))
    if key is None:
        check_fp8(config, kv_cache_dtype, torch.device("cuda", 0))
        return
    with pytest.raises(ConfigError, match=f"{key}: 'fp8' needs .* this one has 8"):
        check_fp8(config, kv_cache_dtype, torch.device("cuda", 0))
