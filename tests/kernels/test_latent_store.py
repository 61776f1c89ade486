"""Rotation of queries, and latents into the pool, beside torch."""

from collections.abc import Callable

import pytest
import torch

from engine.kernels.latent_store import latent_store
from tests.kernels.float8 import assert_same_float8

FP8 = torch.float8_e4m3fn


def _launch(num_heads: int, kv_dtype: torch.dtype = torch.bfloat16) -> Callable[[], None]:
    def launch() -> None:
        latent_store(
            torch.empty(1, num_heads + 1, 576, dtype=torch.bfloat16),
            torch.zeros(1, dtype=torch.int32),
            torch.zeros(1, dtype=torch.int32),
            torch.empty(64, 64),
            torch.empty(2, 2, 64, 576, dtype=kv_dtype)[:, 1],
        )

    return launch


LAUNCHES = {"DeepSeek-V3": _launch(128), "DeepSeek-V2-Lite, float8 cache": _launch(16, FP8)}


def latent_store_reference(
    rows_TPD: torch.Tensor,
    positions_T: torch.Tensor,
    slots_T: torch.Tensor,
    cos_sin_XR: torch.Tensor,
    latents_NSD: torch.Tensor,
) -> None:
    """`latent_store` in torch."""
    rotary_dim = cos_sin_XR.shape[1]
    is_used_T = slots_T >= 0
    rotated_TPD = rows_TPD.to(torch.float32, copy=True)
    cos_T1H, sin_T1H = cos_sin_XR[positions_T.long()].unsqueeze(1).chunk(2, -1)
    first_TPH, second_TPH = rotated_TPD[..., -rotary_dim:].chunk(2, -1)
    rotated_TPD[..., -rotary_dim:] = torch.cat(
        (first_TPH * cos_T1H - second_TPH * sin_T1H, second_TPH * cos_T1H + first_TPH * sin_T1H), -1
    )
    stored_TD = rotated_TPD[:, -1]
    if latents_NSD.dtype is FP8:
        stored_TD = stored_TD.clamp(-448, 448)
    for row, slot in enumerate(slots_T.tolist()):
        if slot >= 0:
            latents_NSD[slot // latents_NSD.shape[1], slot % latents_NSD.shape[1]] = stored_TD[row].to(
                latents_NSD.dtype
            )
    rows_TPD[is_used_T, :-1] = rotated_TPD[is_used_T, :-1].to(rows_TPD.dtype)


@pytest.mark.parametrize(
    ("num_heads", "rank", "rotary_dim", "dtype", "kv_dtype"),
    [
        (4, 32, 16, torch.float32, torch.float32),
        (37, 20, 6, torch.float16, torch.float16),
        (3, 24, 8, torch.float32, FP8),
        (2, 32, 8, torch.bfloat16, torch.bfloat16),
    ],
)
def test_is_what_torch_computes(
    num_heads: int,
    rank: int,
    rotary_dim: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    device: torch.device,
    generator: torch.Generator,
) -> None:
    drawing = torch.Generator(device).manual_seed(3)
    size = rank + rotary_dim
    rows_TPD = (20 * torch.randn(3, num_heads + 1, size, generator=drawing, device=device)).to(dtype)
    rows_TPD[0, -1, :2] = 1000.0  # more than float8 has
    positions_T = torch.tensor([7, 0, 3], dtype=torch.int32, device=device)
    slots_T = torch.tensor([6, -1, 1], dtype=torch.int32, device=device)
    cos_sin_XR = torch.rand(8, rotary_dim, generator=drawing, device=device)
    pools = [torch.zeros(3, 2, 4, size, device=device).to(kv_dtype) for _ in range(2)]
    expected_TPD = rows_TPD.clone()
    latent_store(rows_TPD, positions_T, slots_T, cos_sin_XR, pools[0][:, 1])
    latent_store_reference(expected_TPD, positions_T, slots_T, cos_sin_XR, pools[1][:, 1])
    torch.testing.assert_close(rows_TPD, expected_TPD)
    if kv_dtype is FP8:
        assert_same_float8(pools[0], pools[1])
    else:
        torch.testing.assert_close(pools[0], pools[1])
    assert torch.equal(rows_TPD[:, -1], expected_TPD[:, -1])
