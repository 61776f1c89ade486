"""Projections: makes one rank's share of a decoder layer's parts from a checkpoint's tensors; knows no layer.

Shape suffixes: E hidden size, I input and O output features, D head dimension.
"""
# ruff: noqa: N815 - fields that are tensors carry their shape, like local names do

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from engine.collectives import Collectives
from engine.layers.attention import HeadNorm
from engine.layers.backend import Backend, Expert, ExpertRouter, LinearLayer, MakeLinear, Matrix, MixtureLayer
from engine.layers.merged_linear import merged_linear
from engine.layers.projection_norm import ProjectionNorm
from engine.layers.rope import head_order
from engine.layers.scaled_attention import KVScale
from engine.loading.weights import Shard, WeightSource
from engine.mixture_config import Mixture
from engine.model_config import ModelArchitecture


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Some or all output features of a checkpoint's projection."""

    name: str
    size: int
    first: int = 0
    num_outputs: int | None = None
    """Number of outputs of the whole projection, if the `Columns` are only its `size` outputs from `first` on. None:
    the `Columns` are all its outputs."""
    order_D: torch.Tensor | None = None
    """How the outputs of each head are reordered; see `head_order`."""
    is_on_every_rank: bool = False
    """Whether every rank computes all of these outputs, instead of a share."""


class ExpertNames(NamedTuple):
    """A checkpoint's names of the matrices of an expert."""

    gate: str
    up: str
    down: str


@dataclass(frozen=True, slots=True)
class Projections:
    """Makes one rank's share of a layer's parts."""

    weights: WeightSource
    backend: Backend
    linear: MakeLinear
    collectives: Collectives
    kv_scales: Mapping[str, KVScale] = field(default_factory=dict)
    """The divisors of keys and values, by the name of the attention module."""
    expert_parallel: bool = False
    """Whether a rank has some whole experts of a mixture, instead of a share of each expert."""

    def columns(self, parts: Sequence[Columns], num_inputs: int, *, has_bias: bool = False) -> LinearLayer:
        """Projections of one input, as one product. Every rank computes its share of each projection."""
        matrices = [self._matrix(part, num_inputs) for part in parts]
        if not has_bias:
            return merged_linear(self.linear, matrices, None)
        return merged_linear(self.linear, matrices, [self._bias(part) for part in parts])

    def rows(self, name: str, num_outputs: int, num_inputs: int, *, has_bias: bool = False) -> LinearLayer:
        """A projection whose inputs are divided among the ranks. The caller adds up the ranks' results."""
        shard = shard_of(1, self.collectives)
        weight_OI = self.weights.take_matrix(f"{name}.weight", num_outputs, num_inputs, shard=shard)
        bias_O = self.weights.take_tensor(f"{name}.bias", num_outputs) if has_bias else None
        return self.linear(weight_OI, bias_O if self.collectives.rank == 0 else None)

    def numbers(self, name: str, num_outputs: int, num_inputs: int) -> torch.Tensor:
        """This rank's outputs of a projection's matrix, as plain numbers, however the matrix is stored."""
        return self.weights.take_tensor(
            f"{name}.weight", num_outputs, num_inputs, shard=shard_of(0, self.collectives)
        )

    def mixture(
        self,
        mixture: Mixture,
        router: str,
        experts: Iterator[Expert],
        num_inputs: int,
        *,
        has_bias: bool = False,
        choice_bias: str = "",
    ) -> MixtureLayer:
        """A mixture of the experts that `experts` or `interleaved_experts` yields.

        The caller adds up the ranks' results.

        Every rank has the whole router, which is not quantized. `has_bias`: whether the router has a bias.
        `choice_bias`: the name of the bias for the choice, if the mixture has one.
        """
        weight, size = f"{router}.weight", mixture.num_experts
        take = self.weights.take_float32 if mixture.routes_in_float32 else self.weights.take_tensor
        weight_XE = take(weight, size, num_inputs)
        bias_X = self.weights.take_tensor(f"{router}.bias", size) if has_bias else None
        choice_bias_X = None
        if mixture.has_choice_bias:
            choice_bias_X = self.weights.take_float32(choice_bias, size)
        found = ExpertRouter(weight_XE, bias_X, choice_bias_X)
        return self.backend.mixture(mixture, found, experts, self.linear, self._own_experts(mixture))

    def experts(
        self, mixture: Mixture, experts: str, names: ExpertNames, num_inputs: int
    ) -> Iterator[Expert]:
        """This rank's share of a mixture's experts, read one after another."""
        size, take = mixture.intermediate_size, self.weights.take_matrix
        columns, inputs = self._expert_shard(0), self._expert_shard(1)
        for number in self._own_experts(mixture):
            gate, up, down = (f"{experts}.{number}.{name}.weight" for name in names)
            yield Expert(
                take(gate, size, num_inputs, shard=columns),
                take(up, size, num_inputs, shard=columns),
                take(down, num_inputs, size, shard=inputs),
            )

    def interleaved_experts(self, mixture: Mixture, experts: str, num_inputs: int) -> Iterator[Expert]:
        """Like `experts`, for a checkpoint with biases in which one projection has gates and ups in turns."""
        size, columns = mixture.intermediate_size, self._expert_shard(0)
        if columns is not None:
            pairs = columns.slice_of(experts, (size, num_inputs))
            columns = Shard(0, first=2 * pairs.start, size=2 * (pairs.stop - pairs.start))
        has_down_bias = self.expert_parallel or self.collectives.rank == 0
        for number in self._own_experts(mixture):
            gate_up, down = f"{experts}.{number}.gate_up_proj", f"{experts}.{number}.down_proj"
            gate_IE, up_IE = self.weights.take_interleaved(
                f"{gate_up}.weight", 2 * size, num_inputs, shard=columns
            )
            bias_M = self.weights.take_tensor(f"{gate_up}.bias", 2 * size, shard=columns)
            down_EI = self.weights.take_matrix(
                f"{down}.weight", num_inputs, size, shard=self._expert_shard(1)
            )
            down_bias_E = self.weights.take_tensor(f"{down}.bias", num_inputs)
            yield Expert(
                gate_IE,
                up_IE,
                down_EI,
                (bias_M[0::2], bias_M[1::2]),
                down_bias_E if has_down_bias else None,
            )

    def sinks(self, a: ModelArchitecture, heads: str) -> torch.Tensor:
        """The sinks of this rank's query heads, in float32."""
        sinks_Q = self.weights.take_tensor(f"{heads}.sinks", a.num_heads, shard=shard_of(0, self.collectives))
        return sinks_Q.to(torch.float32)

    def norm(self, name: str, size: int, *, from_one: bool = False) -> torch.Tensor:
        """A norm's weights.

        `from_one`: the checkpoint has the weights minus 1 (Gemma); 1 is added in float32.
        """
        weight = self.weights.take_tensor(f"{name}.weight", size)
        return plus_one(weight) if from_one else weight

    def head_norm(
        self,
        a: ModelArchitecture,
        heads: str,
        order_D: torch.Tensor | None = None,
        *,
        from_one: bool = False,
    ) -> HeadNorm | None:
        """The norm of each head of queries and keys, if the architecture has it.

        `order_D`: the new order of a head's dimensions.
        """
        if not a.has_qk_norm:
            return None
        q_weight_D = self.norm(f"{heads}.q_norm", a.head_dim, from_one=from_one)
        k_weight_D = self.norm(f"{heads}.k_norm", a.head_dim, from_one=from_one)
        if order_D is not None:
            q_weight_D, k_weight_D = _reordered(q_weight_D, order_D), _reordered(k_weight_D, order_D)
        if (scale := self.kv_scales.get(heads)) is not None:  # see HeadFactors
            q_weight_D = q_weight_D.to(torch.float32) * scale.key
            k_weight_D = k_weight_D.to(torch.float32) / scale.key
        num_ranks = self.collectives.size
        return HeadNorm(
            q_weight_D, k_weight_D, a.num_heads // num_ranks, a.num_kv_heads // num_ranks, a.rms_norm_eps
        )

    def projection_norm(
        self, a: ModelArchitecture, heads: str, order_D: torch.Tensor | None = None
    ) -> ProjectionNorm:
        """The norm of all queries together, and of all keys together.

        `order_D`: the new order of a head's dimensions.
        """
        q_size, kv_size = _sizes(a)
        weights = [
            self.weights.take_tensor(f"{heads}.{name}.weight", size, shard=shard_of(0, self.collectives))
            for name, size in (("q_norm", q_size), ("k_norm", kv_size))
        ]
        if order_D is not None:
            weights = [_reordered(each, _of_every_head(order_D, len(each))) for each in weights]
        return ProjectionNorm(weights[0], weights[1], a.rms_norm_eps, self.collectives)

    def _own_experts(self, mixture: Mixture) -> range:
        """The experts that are on this rank, wholly or in part."""
        if not self.expert_parallel:
            return range(mixture.num_experts)
        return mixture.experts_on(self.collectives.rank, self.collectives.size)

    def _expert_shard(self, dim: int) -> Shard | None:
        """This rank's part of an expert's matrix; None: the whole matrix."""
        return None if self.expert_parallel else shard_of(dim, self.collectives)

    def _matrix(self, part: Columns, num_inputs: int) -> Matrix:
        num_outputs = part.num_outputs or part.size
        name, shard = f"{part.name}.weight", self._shard_of(part)
        matrix = self.weights.take_matrix(name, num_outputs, num_inputs, shard=shard)
        if part.order_D is None:
            return matrix
        index_O = _of_every_head(part.order_D, matrix.shape[0])
        return _reordered(matrix, index_O) if isinstance(matrix, torch.Tensor) else matrix.outputs(index_O)

    def _bias(self, part: Columns) -> torch.Tensor:
        bias_O = self.weights.take_tensor(
            f"{part.name}.bias", part.num_outputs or part.size, shard=self._shard_of(part)
        )
        if part.order_D is None:
            return bias_O
        return _reordered(bias_O, _of_every_head(part.order_D, len(bias_O)))

    def _shard_of(self, part: Columns) -> Shard | None:
        if part.is_on_every_rank:
            return None
        if part.num_outputs is None:
            return shard_of(0, self.collectives)
        return Shard(0, self.collectives.rank, self.collectives.size, part.first, part.size)


def shard_of(dim: int, collectives: Collectives) -> Shard | None:
    """This rank's share of dimension `dim`; None if there is only one rank."""
    return Shard(dim, collectives.rank, collectives.size) if collectives.size > 1 else None


def plus_one(weight: torch.Tensor) -> torch.Tensor:
    """The weight plus 1, in float32.

    With meta tensors, `weight + 1.0` would import PyTorch's compiler, which takes a second at each start of a worker.
    """
    return weight.to(torch.float32, copy=True).add_(1.0)


def qkv(a: ModelArchitecture, heads: str, order_D: torch.Tensor | None = None) -> list[Columns]:
    """The projections to queries, keys and values.

    `order_D`: the new order of the outputs for queries and keys.
    """
    q_size, kv_size = _sizes(a)
    return [
        Columns(name=f"{heads}.q_proj", size=q_size, order_D=order_D),
        Columns(name=f"{heads}.k_proj", size=kv_size, order_D=order_D),
        Columns(name=f"{heads}.v_proj", size=kv_size),
    ]


def merged_qkv(a: ModelArchitecture, heads: str, order_D: torch.Tensor | None) -> list[Columns]:
    """Like `qkv`, for a checkpoint that has the three as one projection."""
    name, (q_size, kv_size) = f"{heads}.qkv_proj", _sizes(a)
    total = q_size + 2 * kv_size
    return [
        Columns(name=name, size=q_size, num_outputs=total, order_D=order_D),
        Columns(name=name, size=kv_size, first=q_size, num_outputs=total, order_D=order_D),
        Columns(name=name, size=kv_size, first=q_size + kv_size, num_outputs=total),
    ]


def gate_up(mlp: str, size: int) -> list[Columns]:
    """The projections of an MLP of this size to gates and ups."""
    return [Columns(name=f"{mlp}.{name}_proj", size=size) for name in ("gate", "up")]


def merged_gate_up(a: ModelArchitecture, mlp: str) -> list[Columns]:
    """Like `gate_up`, for a checkpoint that has both as one projection."""
    size = a.intermediate_size
    return [
        Columns(name=f"{mlp}.gate_up_proj", size=size, first=first, num_outputs=2 * size)
        for first in (0, size)
    ]


def order_of(a: ModelArchitecture, index: int, *, is_interleaved: bool = False) -> torch.Tensor | None:
    """The new order of the outputs for a head in this layer; None: they keep their order."""
    rope = a.ropes[index]
    rotary_dim = a.head_dim if rope is None else rope.rotary_dim or a.head_dim
    return head_order(a.head_dim, rotary_dim, is_interleaved=is_interleaved)


def _sizes(a: ModelArchitecture) -> tuple[int, int]:
    """The number of outputs for queries, and for keys or values."""
    return a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim


def _of_every_head(order_D: torch.Tensor, num_outputs: int) -> torch.Tensor:
    firsts_H1 = torch.arange(0, num_outputs, len(order_D)).unsqueeze(1)
    return (firsts_H1 + order_D).flatten()


def _reordered(tensor: torch.Tensor, index_O: torch.Tensor) -> torch.Tensor:
    """The reordered tensor. A meta tensor, as in an outline, stays unchanged."""
    return tensor if tensor.is_meta else tensor[index_O.to(tensor.device)]
