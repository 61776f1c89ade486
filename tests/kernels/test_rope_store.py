"""Rotation of queries in place, and of keys on their way into the pool."""
# ruff: noqa: N815 - fields that are tensors carry their shape, like local names do

import dataclasses
from typing import Any

import pytest
import torch

from engine.kernels.rope_store import rope_store
from engine.kv_cache import KVBlockShape, KVPool
from engine.layers.rope import RotaryEmbedding, rotate_
from engine.rope_config import RopeConfig
from tests.kernels.float8 import assert_same_float8
from tests.kernels.references import rope_store_reference

MAX_POSITIONS = 40


def empty_launch(pool_dtype: torch.dtype, has_norm: bool, head_dim: int = 128, num_tokens: int = 2) -> None:
    x_TXD = torch.empty(num_tokens, 32 + 2 * 8, head_dim, dtype=torch.bfloat16)
    indices_T = torch.zeros(num_tokens, dtype=torch.int32)
    norm_D = torch.empty(head_dim, dtype=torch.bfloat16) if has_norm else None
    rope_store(
        x_TXD,
        indices_T,
        indices_T,
        torch.empty(8, head_dim),
        torch.empty(2, 4, 2, 8, 64, head_dim, dtype=pool_dtype)[:, 1],
        q_norm_D=norm_D,
        k_norm_D=norm_D,
    )


LAUNCHES = {
    "Llama-3.1-8B": lambda: empty_launch(torch.bfloat16, has_norm=False),
    "Llama-3.1-8B, float8 pool": lambda: empty_launch(torch.float8_e4m3fn, has_norm=False),
    "Qwen3-8B": lambda: empty_launch(torch.bfloat16, has_norm=True),
    "Qwen3-8B, float8 pool": lambda: empty_launch(torch.float8_e4m3fn, has_norm=True),
    "head size 96": lambda: empty_launch(torch.bfloat16, has_norm=False, head_dim=96),
}
RARE = ("Llama-3.1-8B, float8 pool",)


def cos_sin(head_dim: int) -> torch.Tensor:
    angles_PF = torch.outer(torch.arange(MAX_POSITIONS), 100.0 ** -torch.linspace(0, 1, head_dim // 2))
    return 1.1 * torch.cat((angles_PF.cos(), angles_PF.sin()), -1)


@dataclasses.dataclass
class Inputs:
    """The inputs of a step with a padded row in its middle."""

    qkv_TXD: torch.Tensor
    positions_T: torch.Tensor
    slots_T: torch.Tensor
    cos_sin_PD: torch.Tensor
    pool: KVPool
    options: dict[str, Any]

    def copy(self) -> "Inputs":
        pool = KVPool(self.pool.num_blocks, self.pool.shape, self.qkv_TXD.device)
        pool.blocks_NLKHTD.view(torch.uint8).copy_(self.pool.blocks_NLKHTD.view(torch.uint8))
        qkv_TX = self.qkv_TXD.flatten(1)  # rows that lie apart stay so
        wide = torch.zeros(len(qkv_TX), qkv_TX.shape[1] + 16, dtype=qkv_TX.dtype, device=qkv_TX.device)
        wide[:, 8:-8] = qkv_TX
        return dataclasses.replace(self, pool=pool, qkv_TXD=wide[:, 8:-8].view(self.qkv_TXD.shape))

    def arguments(self, layer: int) -> tuple[torch.Tensor, ...]:
        return (
            self.qkv_TXD,
            self.positions_T,
            self.slots_T,
            self.cos_sin_PD,
            self.pool.blocks_NLKHTD[:, layer],
        )


def inputs(
    generator: torch.Generator,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    pool_dtype: torch.dtype | None = None,
    num_q_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    has_norm: bool = False,
    norm_dtype: torch.dtype | None = None,
) -> Inputs:
    slots_T = torch.tensor([5, 22, -1, 23, 4], dtype=torch.int32)
    shape = KVBlockShape(3, num_kv_heads, 4, head_dim, pool_dtype or dtype)
    pool = KVPool(6, shape, device)
    pool.blocks_NLKHTD.view(torch.uint8).fill_(3)  # bytes that must not change
    num_heads = num_q_heads + 2 * num_kv_heads
    qkv_TXD = torch.randn(len(slots_T), num_heads, head_dim, generator=generator).to(dtype)
    options: dict[str, Any] = {}
    if has_norm:
        q_norm_D, k_norm_D = 1 + 0.3 * torch.randn(2, head_dim, generator=generator)
        norms = {"q_norm_D": q_norm_D, "k_norm_D": k_norm_D}
        options |= {name: norm_D.to(norm_dtype or dtype).to(device) for name, norm_D in norms.items()}
        options |= {"eps": 1e-2}
    if pool_dtype is torch.float8_e4m3fn:
        qkv_TXD *= 200  # large values saturate
    return Inputs(
        qkv_TXD.to(device),
        torch.tensor([0, 39, 1000, 7, 3], dtype=torch.int32, device=device),
        slots_T.to(device),
        cos_sin(head_dim).to(device),
        pool,
        options,
    )


@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("num_q_heads", "num_kv_heads", "head_dim"), [(4, 2, 16), (14, 1, 12), (17, 9, 8)])
def test_is_what_torch_computes(
    has_norm: bool,
    dtype: torch.dtype,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    device: torch.device,
    generator: torch.Generator,
) -> None:
    expected = inputs(
        generator,
        device,
        dtype,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        has_norm=has_norm,
    )
    actual = expected.copy()
    rope_store(*actual.arguments(1), **actual.options)
    rope_store_reference(*expected.arguments(1), **expected.options)
    torch.testing.assert_close(actual.qkv_TXD, expected.qkv_TXD)
    torch.testing.assert_close(actual.pool.blocks_NLKHTD, expected.pool.blocks_NLKHTD)


def test_norms_may_have_float32_weights(device: torch.device, generator: torch.Generator) -> None:
    expected = inputs(generator, device, torch.bfloat16, has_norm=True, norm_dtype=torch.float32)
    actual = expected.copy()
    rope_store(*actual.arguments(1), **actual.options)
    rope_store_reference(*expected.arguments(1), **expected.options)
    torch.testing.assert_close(actual.qkv_TXD, expected.qkv_TXD)
    torch.testing.assert_close(actual.pool.blocks_NLKHTD, expected.pool.blocks_NLKHTD)


@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_float8_pool_holds_saturated_values(
    has_norm: bool, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> None:
    expected = inputs(generator, device, dtype, torch.float8_e4m3fn, has_norm=has_norm)
    actual = expected.copy()
    rope_store(*actual.arguments(2), **actual.options)
    rope_store_reference(*expected.arguments(2), **expected.options)
    assert expected.pool.blocks_NLKHTD.to(torch.float32).max() == 448, "some saturate"
    assert_same_float8(actual.pool.blocks_NLKHTD, expected.pool.blocks_NLKHTD, max_share=0.01)
    torch.testing.assert_close(actual.qkv_TXD, expected.qkv_TXD)


def test_touches_nothing_but_its_rows(device: torch.device, generator: torch.Generator) -> None:
    before = inputs(generator, device)
    after = before.copy()
    rope_store(*after.arguments(1), **after.options)
    changed = after.pool.blocks_NLKHTD != before.pool.blocks_NLKHTD
    slots = changed[:, 1].any(dim=(1, 2, 4)).flatten().nonzero().flatten()
    assert slots.tolist() == [4, 5, 22, 23]
    assert not changed[:, [0, 2]].any()
    torch.testing.assert_close(after.qkv_TXD[2], before.qkv_TXD[2], rtol=0, atol=0)
    torch.testing.assert_close(after.qkv_TXD[:, 4:], before.qkv_TXD[:, 4:], rtol=0, atol=0)


def test_rotates_as_the_layers_in_torch_do(device: torch.device, generator: torch.Generator) -> None:
    step = inputs(generator, device)
    rope = RotaryEmbedding(RopeConfig(theta=10_000.0), 16, device)
    positions_P = torch.arange(MAX_POSITIONS, device=device)
    cos_P1D, sin_P1D = rope.angles(positions_P, torch.float32)
    step.cos_sin_PD = torch.cat((cos_P1D[:, 0, :8], sin_P1D[:, 0, 8:]), -1).contiguous()
    expected_TXD = step.qkv_TXD.clone()
    rows = step.slots_T >= 0
    rope_store(*step.arguments(0))
    positions = step.positions_T[rows].long()
    rotated_TXD = expected_TXD[rows]
    rotate_(rotated_TXD[:, :6], cos_P1D[positions], sin_P1D[positions])
    torch.testing.assert_close(step.qkv_TXD[rows, :4], rotated_TXD[:, :4])
    flat_NSKHD = step.pool.blocks_NLKHTD[:, 0].permute(0, 3, 1, 2, 4).flatten(0, 1)
    torch.testing.assert_close(flat_NSKHD[step.slots_T[rows].long()].flatten(1, 2), rotated_TXD[:, 4:])
