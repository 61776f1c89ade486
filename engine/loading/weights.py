"""Sources of a model's tensors: a folder's safetensors files, or random numbers; knows no architecture.

Another source is in `gguf_weights`. `quantized_checkpoint` and `quantized_weights` have sources that use
other sources.
"""

import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Protocol, Self

import torch
from safetensors import safe_open

from baton.errors import ModelError
from engine.layers.backend import Matrix
from engine.loading.model_files import weight_files
from engine.loading.safetensors_index import (
    CheckpointIndex,
    StoredTensor,
    open_safetensors,
    types_for,
)

OnLoaded = Callable[[int, int], None]
"""Called after each tensor with loaded and total bytes, on the thread that builds the model."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Slice number `rank` of `num_ranks` slices of a tensor, or of a part of a tensor, along `dim`."""

    dim: int
    rank: int = 0
    num_ranks: int = 1
    first: int = 0
    """The first index of the part that is divided."""
    size: int | None = None
    """The size of this part; None: up to the end."""
    is_equal: bool = True
    """Whether all slices have the same size; else the last ones may be shorter."""

    def slice_of(self, name: str, shape: Sequence[int]) -> slice:
        """The slice of dimension `dim` of a tensor of `shape`; ModelError if equal slices are impossible."""
        assert 0 <= self.rank < self.num_ranks, f"rank {self.rank} of {self.num_ranks}"
        whole = shape[self.dim] - self.first if self.size is None else self.size
        size, rest = divmod(whole, self.num_ranks)
        if rest and not self.is_equal:
            first, last = (min(each * (size + 1), whole) for each in (self.rank, self.rank + 1))
            return slice(self.first + first, self.first + last)
        if rest:
            raise ModelError(
                f"tensor {name} (shape {list(shape)}): dimension {self.dim} of {whole} cannot "
                f"be divided among {self.num_ranks} ranks"
            )
        begin = self.first + self.rank * size
        return slice(begin, begin + size)


class WeightSource(Protocol):
    """Provides tensors by their Hugging Face names."""

    def take_tensor(self, name: str, *shape: int, shard: Shard | None = None) -> torch.Tensor:
        """The tensor, or only its `shard`, in the target dtype, on the source's device.

        `shape` is the shape of the whole tensor. ModelError if there is no such tensor, or it cannot be
        divided as `shard` asks.
        """
        ...

    def take_matrix(
        self, name: str, num_outputs: int, num_inputs: int, *, shard: Shard | None = None
    ) -> Matrix:
        """Like `take_tensor`, for a matrix that is only multiplied or looked up by row; it may stay quantized."""
        return self.take_tensor(name, num_outputs, num_inputs, shard=shard)

    def take_interleaved(
        self, name: str, num_outputs: int, num_inputs: int, *, shard: Shard | None = None
    ) -> tuple[Matrix, Matrix]:
        """Like `take_matrix`, for two matrices that are stored as one: the even outputs are the first matrix, the odd
        ones the second."""
        matrix = self.take_matrix(name, num_outputs, num_inputs, shard=shard)
        first, second = (_every_other(matrix, number) for number in range(2))
        return first, second

    def take_float32(self, name: str, *shape: int) -> torch.Tensor:
        """A whole tensor in float32, for numbers that the target dtype would round too much."""
        return self.take_tensor(name, *shape).to(torch.float32)


def _every_other(matrix: Matrix, first: int) -> Matrix:
    outputs = slice(first, None, 2)
    return matrix[outputs] if isinstance(matrix, torch.Tensor) else matrix.outputs(outputs)


class FileWeights(WeightSource, Protocol):
    """A source that reads files; a context manager. Call `check_all_taken` when the model is built, so that no weight
    is ignored."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends reading."""
        ...

    def check_all_taken(
        self, *, allowed: tuple[str, ...] = (), unread: tuple[str, ...] = (), elsewhere: Iterable["Take"] = ()
    ) -> None:
        """ModelError if the files have tensors that were not requested.

        Exceptions are names that end with one of `allowed` or begin with one of `unread`, and tensors in
        `elsewhere`, which other ranks request."""
        ...


@dataclass(frozen=True, slots=True)
class Take:
    """The arguments of one call of `WeightSource.take_tensor`."""

    name: str
    shape: tuple[int, ...]
    shard: Shard | None

    @property
    def part_shape(self) -> tuple[int, ...]:
        """Shape of the returned tensor."""
        if self.shard is None:
            return self.shape
        part = self.shard.slice_of(self.name, self.shape)
        dim = self.shard.dim
        return (*self.shape[:dim], part.stop - part.start, *self.shape[dim + 1 :])

    def as_stored(self, stored: StoredTensor) -> "Take":
        """This request, with the dimensions in the file's order."""
        if not stored.is_transposed:
            return self
        shard = None if self.shard is None else replace(self.shard, dim=1 - self.shard.dim)
        return Take(self.name, self.shape[::-1], shard)


@dataclass(slots=True)
class TakeRecorder(WeightSource):
    """A source without weights, which records the tensors that a model requests while it is built.
    The model's tensors are on the meta device. So the order of reading ahead is known before a byte is read.
    """

    dtype: torch.dtype | None = None
    """The dtype of the returned tensors; None: torch's default."""
    takes: list[Take] = field(default_factory=list)

    def take_tensor(self, name: str, *shape: int, shard: Shard | None = None) -> torch.Tensor:
        self.takes.append(Take(name, shape, shard))
        return torch.empty(self.takes[-1].part_shape, dtype=self.dtype, device="meta")


class CheckpointWeights(FileWeights):
    """The weights of a folder's safetensors files, on a CPU. The files are mapped: touching a page reads it."""

    def __init__(
        self,
        path: Path,
        dtype: torch.dtype | None,
        takes: Sequence[Take] = (),
        on_progress: OnLoaded | None = None,
    ) -> None:
        """`dtype` None: tensors stay as they are stored, perhaps as codes.

        `takes`: the tensors that will be requested; only `on_progress` needs this list."""
        self._dtype = dtype
        self._types = types_for(dtype)
        self._index = CheckpointIndex.read(path)
        self._handles = {file: open_safetensors(file) for file in weight_files(path)}
        self._taken: set[str] = set()
        self._on_progress = on_progress
        self._loaded_bytes = 0
        self._total_bytes = sum(
            prod(take.part_shape) * self._index.find(take.name, take.shape, self._types).dtype.itemsize
            for take in takes
        )

    def close(self) -> None:
        for handle in self._handles.values():
            handle.__exit__(None, None, None)

    def take_tensor(self, name: str, *shape: int, shard: Shard | None = None) -> torch.Tensor:
        tensor = self._stored(name, shape, shard)
        return tensor if self._dtype is None else tensor.to(self._dtype)

    def take_float32(self, name: str, *shape: int) -> torch.Tensor:
        return self._stored(name, shape, None).to(torch.float32)

    def _stored(self, name: str, shape: tuple[int, ...], shard: Shard | None) -> torch.Tensor:
        stored = self._index.find(name, shape, self._types)
        tensor = _read(self._handles[stored.file], Take(name, shape, shard), stored)
        self._taken.add(name)
        self._loaded_bytes += tensor.nbytes
        if self._on_progress is not None:
            self._on_progress(self._loaded_bytes, self._total_bytes)
        return tensor

    def check_all_taken(
        self, *, allowed: tuple[str, ...] = (), unread: tuple[str, ...] = (), elsewhere: Iterable[Take] = ()
    ) -> None:
        names = self._taken.union(take.name for take in elsewhere)
        self._index.check_all_taken(names, allowed=allowed, unread=unread)


def _read(handle: safe_open, take: Take, stored: StoredTensor) -> torch.Tensor:
    """Reads only the requested part of the tensor."""
    tensor: torch.Tensor
    own = take.as_stored(stored)
    cut = () if own.shard is None else (slice(None),) * own.shard.dim
    if own.shard is not None:
        cut = (*cut, own.shard.slice_of(take.name, own.shape))
    if stored.part_of is not None:
        whole, number = stored.part_of
        tensor = handle.get_slice(whole)[(number, *cut)]
    else:
        tensor = handle.get_slice(take.name)[cut] if cut else handle.get_tensor(take.name)
    return tensor.t() if stored.is_transposed else tensor


class DummyWeights(WeightSource):
    """Random tensors of any name and shape, the same in every process on the same kind of device.

    The device makes them, since 8 billion numbers take minutes on the host. Each kind of device makes
    different random numbers, so the model's digest names the kind (see `model_digest`). Every rank makes the
    whole tensor and keeps its slice, so that the slices fit together.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._device = device

    def take_tensor(self, name: str, *shape: int, shard: Shard | None = None) -> torch.Tensor:
        generator = torch.Generator(self._device).manual_seed(zlib.crc32(name.encode()))
        tensor: torch.Tensor = torch.randn(shape, generator=generator, device=self._device)
        if name.endswith("norm.weight"):
            tensor.mul_(0.1).add_(1.0)
        else:
            tensor.mul_(shape[-1] ** -0.5)
        if shard is not None:
            part = shard.slice_of(name, shape)
            tensor = tensor.narrow(shard.dim, part.start, part.stop - part.start)
        return tensor.to(self._dtype, memory_format=torch.contiguous_format, copy=shard is not None)
