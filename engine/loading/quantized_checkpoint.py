"""QuantizedCheckpoint: a checkpoint's quantized matrices, still quantized or as numbers; knows no layout."""

import logging
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch

from engine.layers.backend import Matrix
from engine.layers.fp8 import FP8, Fp8Weight
from engine.loading.coded_matrix import CodedMatrix
from engine.loading.safetensors_index import CheckpointIndex, open_safetensors
from engine.loading.stored_matrix import StoredMatrix
from engine.loading.weights import FileWeights, Shard, Take, WeightSource
from engine.quantization_config import Quantization

logger = logging.getLogger(__name__)

_WITHOUT_USE = (".q_scale", ".input_scale", ".input_zero_point")
"""Endings of tensors that are not used: scales and zero points with which other programs round queries and inputs.
Baton computes the scales of activations itself (docs/weights.md)."""


class QuantizedCheckpoint(FileWeights):
    """The weights in a checkpoint with quantized matrices.
    The tensors show which matrices are quantized: a matrix without scales consists of plain numbers. The
    configuration describes how they are quantized. Each rank decodes its own part.
    """

    def __init__(
        self,
        path: Path,
        quantization: Quantization,
        dtype: torch.dtype,
        takes: Sequence[Take],
        open_stored: Callable[[Sequence[Take]], FileWeights],
        *,
        keeps_groups: bool,
        keeps_fp8: bool,
    ) -> None:
        """`takes`: all future requests, in order; ModelError if a tensor is missing or misshapen.

        `open_stored`: opens a source for a list of requests; the source returns tensors as they are stored.

        `keeps_groups`, `keeps_fp8`: which matrices stay quantized; the others become numbers of `dtype`.
        """
        self._quantization = quantization
        self._dtype = dtype
        self._index = CheckpointIndex.read(path)
        self._keeps_groups = keeps_groups
        self._keeps_fp8 = keeps_fp8
        self._num_kept = self._num_converted = 0
        self._stored = open_stored([part for take in takes for part in self._parts_of(take)])

    def close(self) -> None:
        self._stored.close()

    def take_tensor(self, name: str, *shape: int, shard: Shard | None = None) -> torch.Tensor:
        if (stored := self._find(Take(name, shape, shard))) is not None:  # such as a mixture's router
            self._num_converted += 1
            return self._coded(stored).numbers(self._dtype)
        self._index.find(name, shape)  # ModelError if the tensor has codes, but no scales
        return self._stored.take_tensor(name, *shape, shard=shard).to(self._dtype)

    def take_float32(self, name: str, *shape: int) -> torch.Tensor:
        if self._find(Take(name, shape, None)) is not None:
            return self.take_tensor(name, *shape).to(torch.float32)
        self._index.find(name, shape)
        return self._stored.take_float32(name, *shape)

    def take_matrix(
        self, name: str, num_outputs: int, num_inputs: int, *, shard: Shard | None = None
    ) -> Matrix:
        stored = self._find(Take(name, (num_outputs, num_inputs), shard))
        if stored is None:
            return self.take_tensor(name, num_outputs, num_inputs, shard=shard)
        coded = self._coded(stored)
        kept = self._kept(stored, coded)
        if kept is None:
            self._num_converted += 1
            return coded.numbers(self._dtype)
        self._num_kept += 1
        return kept

    def check_all_taken(
        self, *, allowed: tuple[str, ...] = (), unread: tuple[str, ...] = (), elsewhere: Iterable[Take] = ()
    ) -> None:
        self._stored.check_all_taken(
            allowed=(*allowed, *_WITHOUT_USE, *self._zero_biases()),
            unread=unread,
            elsewhere=(part for take in elsewhere for part in self._parts_of(take)),
        )
        logger.info(
            "quantization_config %s: %d matrices stay quantized, %d were dequantized to %s",
            self._quantization.method,
            self._num_kept,
            self._num_converted,
            str(self._dtype).removeprefix("torch."),
        )

    def _coded(self, stored: StoredMatrix) -> CodedMatrix:
        """Reads a quantized matrix."""
        tensors = {
            role: self._stored.take_tensor(part.name, *part.shape, shard=part.shard)
            for role, part in stored.parts.items()
        }
        return stored.coded(tensors)

    def _find(self, take: Take) -> StoredMatrix | None:
        """How a quantized matrix is stored; None if the tensor is not a quantized matrix."""
        return _stored_matrix(self._index, self._quantization, take)

    def _parts_of(self, take: Take) -> list[Take]:
        """The stored tensors that are read for this request, in order."""
        stored = self._find(take)
        if stored is not None:
            return list(stored.parts.values())
        self._index.find(take.name, take.shape)
        return [take]

    def _kept(self, stored: StoredMatrix, coded: CodedMatrix) -> Matrix | None:
        """The matrix, still quantized, if a kernel supports it; else None."""
        if self._keeps_groups and stored.scheme.can_stay_in_groups:
            return coded.grouped()
        return coded.in_fp8(self._dtype) if self._keeps_fp8 and _may_stay_in_fp8(stored) else None

    def _zero_biases(self) -> list[str]:
        """Those biases of quantized matrices that contain only zeros. AutoGPTQ writes a bias for each matrix."""
        return [name for name in self._index.names if name.endswith(".bias") and self._is_zero_bias(name)]

    def _is_zero_bias(self, name: str) -> bool:
        qweight = f"{name.removesuffix('.bias')}.qweight"
        if qweight not in self._index.names:
            return False
        stored = self._index.stored(name)
        with open_safetensors(stored.file) as handle:
            return not bool(handle.get_tensor(name).any())


class OutlinedCheckpoint(WeightSource):
    """The weights of an outline: meta tensors of the same kinds as in `QuantizedCheckpoint`."""

    def __init__(self, path: Path, quantization: Quantization, dtype: torch.dtype) -> None:
        """The outline is that of a device that keeps 8-bit floats, but no groups."""
        self._index = CheckpointIndex.read(path)
        self._quantization = quantization
        self._dtype = dtype

    def take_tensor(self, name: str, *shape: int, shard: Shard | None = None) -> torch.Tensor:
        return torch.empty(Take(name, shape, shard).part_shape, dtype=self._dtype, device="meta")

    def take_matrix(
        self, name: str, num_outputs: int, num_inputs: int, *, shard: Shard | None = None
    ) -> Matrix:
        numbers_OI = self.take_tensor(name, num_outputs, num_inputs, shard=shard)
        stored = _stored_matrix(self._index, self._quantization, Take(name, (num_outputs, num_inputs), shard))
        if stored is None or not _may_stay_in_fp8(stored):
            return numbers_OI
        scales_O1 = numbers_OI.new_empty(len(numbers_OI), 1, dtype=torch.float32)
        return Fp8Weight(numbers_OI.to(FP8), scales_O1, self._dtype)


def _stored_matrix(index: CheckpointIndex, quantization: Quantization, take: Take) -> StoredMatrix | None:
    """How a quantized matrix is stored; None if the tensor is not a quantized matrix."""
    if len(take.shape) != 2:
        return None
    scheme = quantization.scheme_of(take.name.removesuffix(".weight"))
    return None if scheme is None else StoredMatrix.find(index, scheme, take)


def _may_stay_in_fp8(stored: StoredMatrix) -> bool:
    """Whether a matrix may keep 8-bit floats. Embeddings may not, since single rows of such a matrix cannot be read."""
    return stored.scheme.can_stay_in_fp8 and stored.take.name != "model.embed_tokens.weight"
