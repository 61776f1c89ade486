"""QuantizedWeights: quantizes another source's matrices to a number of bits while they are loaded."""

from typing import Literal

import torch

from baton.errors import ModelError
from engine.layers.backend import Matrix
from engine.layers.grouped_weight import GroupedWeight
from engine.loading.vocabulary import ROUNDED_GROUP_SIZE
from engine.loading.weights import Shard, WeightSource

Bits = Literal[4, 8]

_VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")
"""Matrices that are rounded to 8 bits, never to 4. 4 bits would save little time: a step reads the projection only
once, and few rows of the embeddings. But they would lose much precision: these matrices distinguish between similar
tokens."""


class QuantizedWeights(WeightSource):
    """The weights of another source, with quantized matrices. Matrices that already have at most this number of bits,
    as in some GGUF files, stay unchanged.

    Each rank quantizes its own part. The part consists of whole groups, so the groups are the same for any
    number of ranks.
    """

    def __init__(self, source: WeightSource, bits: Bits) -> None:
        self._source = source
        self._bits = bits

    def take_tensor(self, name: str, *shape: int, shard: Shard | None = None) -> torch.Tensor:
        return self._source.take_tensor(name, *shape, shard=shard)

    def take_float32(self, name: str, *shape: int) -> torch.Tensor:
        return self._source.take_float32(name, *shape)

    def take_matrix(
        self, name: str, num_outputs: int, num_inputs: int, *, shard: Shard | None = None
    ) -> Matrix:
        """The quantized matrix; ModelError if its inputs, or a rank's part of them, are not whole groups."""
        return self._rounded(name, self._source.take_matrix(name, num_outputs, num_inputs, shard=shard))

    def take_interleaved(
        self, name: str, num_outputs: int, num_inputs: int, *, shard: Shard | None = None
    ) -> tuple[Matrix, Matrix]:
        first, second = self._source.take_interleaved(name, num_outputs, num_inputs, shard=shard)
        return self._rounded(name, first), self._rounded(name, second)

    def _rounded(self, name: str, matrix: Matrix) -> Matrix:
        bits: Bits = 8 if name in _VOCABULARY else self._bits
        if isinstance(matrix, GroupedWeight) and matrix.bits <= bits:
            return matrix
        if not isinstance(matrix, torch.Tensor):
            matrix = matrix.dequantized()
        if matrix.shape[1] % ROUNDED_GROUP_SIZE:
            raise ModelError(
                f"tensor {name} cannot be quantized: a rank has {matrix.shape[1]} of its input columns, not a "
                f"multiple of the group size {ROUNDED_GROUP_SIZE}; use model.quantization: none, or another number of "
                "ranks"
            )
        return GroupedWeight.quantize(matrix, bits, ROUNDED_GROUP_SIZE)
