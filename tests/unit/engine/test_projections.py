"""A checkpoint's projections: merged or not, in another order, in groups of bits, and divided among ranks."""

from typing import Any

import pytest
import torch

from engine.collectives import SilentRank
from engine.layers.grouped_weight import GroupedWeight
from engine.layers.rope import RotaryEmbedding, head_order, rotate_
from engine.layers.torch_backend import TorchBackend
from engine.loading.quantized_weights import QuantizedWeights
from engine.loading.weights import Shard, WeightSource
from engine.models.projections import Columns, Projections
from engine.rope_config import RopeConfig

HEAD_DIM = 8
NUM_INPUTS = 32


class Given(WeightSource):
    """Tensors by name."""

    def __init__(self, **tensors: torch.Tensor) -> None:
        self._tensors = tensors

    def take_tensor(self, name: str, *shape: int, shard: Shard | None = None) -> torch.Tensor:
        tensor = self._tensors[name.replace(".", "_")]
        assert tensor.shape == shape
        if shard is None:
            return tensor
        part = shard.slice_of(name, shape)
        return tensor.narrow(shard.dim, part.start, part.stop - part.start)


def made_of(source: WeightSource, parts: list[Columns], rank: int = 0, num_ranks: int = 1) -> list[Any]:
    """What a rank's linear layer is made of: its matrix and its bias."""
    made: list[Any] = []

    def linear(matrix: Any, bias: Any) -> Any:
        made.extend((matrix, bias))

    ranks = SilentRank(rank, num_ranks)
    Projections(source, TorchBackend(), linear, ranks).columns(parts, NUM_INPUTS, has_bias=True)
    return made


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_merged_projections_are_divided_each(num_ranks: int) -> None:
    q, k, v = (torch.randn(size, NUM_INPUTS) for size in (16, 8, 8))
    biases = [torch.randn(len(each)) for each in (q, k, v)]
    merged = Given(qkv_weight=torch.cat([q, k, v]), qkv_bias=torch.cat(biases))
    firsts = (0, 16, 24)
    parts = [
        Columns(name="qkv", size=len(each), first=first, num_outputs=32)
        for each, first in zip((q, k, v), firsts, strict=True)
    ]
    for rank in range(num_ranks):
        matrix, bias = made_of(merged, parts, rank, num_ranks)
        assert torch.equal(matrix, torch.cat([each.chunk(num_ranks)[rank] for each in (q, k, v)]))
        assert torch.equal(bias, torch.cat([each.chunk(num_ranks)[rank] for each in biases]))


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_heads_are_reordered_also_in_groups_of_bits(num_ranks: int) -> None:
    order = head_order(HEAD_DIM, 4, is_interleaved=True)
    assert order is not None
    assert order.tolist() == [0, 2, 4, 5, 1, 3, 6, 7]
    weight, bias = torch.randn(16, NUM_INPUTS), torch.randn(16)
    every = torch.cat([order, order + HEAD_DIM])
    for rank in range(num_ranks):
        share = every.chunk(num_ranks)[rank]
        parts = [Columns(name="q", size=16, order_D=order)]
        plain, plain_bias = made_of(Given(q_weight=weight, q_bias=bias), parts, rank, num_ranks)
        assert torch.equal(plain, weight[share])
        assert torch.equal(plain_bias, bias[share])
        source = QuantizedWeights(Given(q_weight=weight, q_bias=bias), 8)
        grouped, _ = made_of(source, parts, rank, num_ranks)
        assert isinstance(grouped, GroupedWeight)
        assert torch.equal(grouped.dequantized(), GroupedWeight.quantize(weight, 8).dequantized()[share])


@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [2, 4, 8])
def test_a_reordered_head_rotates_as_the_checkpoint_means(rotary_dim: int, is_interleaved: bool) -> None:
    """Pairs of the first dimensions rotate; the others stay."""
    x, positions = torch.randn(5, 1, HEAD_DIM), torch.arange(5)
    angles = positions[:, None] / 100.0 ** (torch.arange(0, rotary_dim, 2) / rotary_dim)
    turned = x.clone()
    for pair in range(rotary_dim // 2):
        i, j = (2 * pair, 2 * pair + 1) if is_interleaved else (pair, pair + rotary_dim // 2)
        cos, sin = angles[:, pair].cos(), angles[:, pair].sin()
        turned[:, 0, i] = x[:, 0, i] * cos - x[:, 0, j] * sin
        turned[:, 0, j] = x[:, 0, j] * cos + x[:, 0, i] * sin
    order = head_order(HEAD_DIM, rotary_dim, is_interleaved=is_interleaved)
    assert (order is None) == (rotary_dim == HEAD_DIM and not is_interleaved)
    index = torch.arange(HEAD_DIM) if order is None else order
    config = RopeConfig(theta=100.0, rotary_dim=None if rotary_dim == HEAD_DIM else rotary_dim)
    rope = RotaryEmbedding(config, HEAD_DIM, torch.device("cpu"))
    found = x[..., index].clone()
    rotate_(found, *rope.angles(positions, torch.float32))
    torch.testing.assert_close(found, turned[..., index])


def test_a_layer_without_rotation_has_the_angle_0_everywhere() -> None:
    table = RotaryEmbedding(None, HEAD_DIM, torch.device("cpu")).table(3)
    assert torch.equal(table, torch.tensor([1.0] * 4 + [0.0] * 4).expand(3, -1))
