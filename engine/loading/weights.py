"""Sources of a model's tensors: a folder's safetensors files, or random numbers; knows no architecture.

Another source is in `gguf_weights`. `quantized_checkpoint` and `quantized_weights` have sources that use
other sources.
"""

import hashlib
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import torch
from safetensors import safe_open

from baton.errors import ModelError
from engine.layers.backend import Matrix
from engine.loading.commit import commit_of
from engine.loading.gguf import read_gguf
from engine.loading.gguf_folder import gguf_of
from engine.loading.safetensors_index import (
    CheckpointIndex,
    StoredTensor,
    open_safetensors,
    types_for,
    weight_files,
)

DIGEST_WINDOWS = 64
DIGEST_WINDOW_BYTES = 4096

OnProgress = Callable[[int, int], None]
"""Called after each tensor with loaded and total bytes, on the thread that builds the model."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Slice number `rank` of `num_ranks` equal slices of a tensor, or of a part of a tensor, along `dim`."""

    dim: int
    rank: int
    num_ranks: int
    first: int = 0
    """The first index of the part that is divided."""
    size: int | None = None
    """The size of this part; None: up to the end."""

    def slice_of(self, name: str, shape: Sequence[int]) -> slice:
        """The slice of dimension `dim` of a tensor of `shape`; ModelError if the ranks do not divide it."""
        assert 0 <= self.rank < self.num_ranks, f"rank {self.rank} of {self.num_ranks}"
        whole = shape[self.dim] - self.first if self.size is None else self.size
        size, rest = divmod(whole, self.num_ranks)
        if rest:
            raise ModelError(
                f"tensor {name} (shape {list(shape)}): dimension {self.dim} of {whole} cannot "
                f"be divided among {self.num_ranks} ranks"
            )
        begin = self.first + self.rank * size
        return slice(begin, begin + size)


class WeightSource(Protocol):
    """Provides tensors by their Hugging Face names."""

    def take(self, name: str, *shape: int, shard: Shard | None = None) -> torch.Tensor:
        """The tensor, or only its `shard`, in the target dtype, on the source's device.

        `shape` is the shape of the whole tensor. ModelError if there is no such tensor, or it cannot be
        divided equally.
        """
        ...

    def take_matrix(
        self, name: str, num_outputs: int, num_inputs: int, *, shard: Shard | None = None
    ) -> Matrix:
        """The same for a matrix that is only multiplied or looked up by row; it may stay quantized."""
        return self.take(name, num_outputs, num_inputs, shard=shard)

    def take_float32(self, name: str, *shape: int) -> torch.Tensor:
        """A whole tensor in float32, for numbers that the target dtype would round too much."""
        return self.take(name, *shape).to(torch.float32)


def is_whole_groups(inputs: slice, group_size: int) -> bool:
    """Whether a slice of a row's inputs consists of whole groups."""
    return bool(inputs.start % group_size == 0 and inputs.stop % group_size == 0)


@dataclass(frozen=True, slots=True)
class Take:
    """The arguments of one call of `WeightSource.take`."""

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
        """The same, with the dimensions in the file's order."""
        if not stored.is_transposed:
            return self
        shard = None if self.shard is None else replace(self.shard, dim=1 - self.shard.dim)
        return Take(self.name, self.shape[::-1], shard)


@dataclass(slots=True)
class TakeRecorder(WeightSource):
    """Satisfies WeightSource without weights: records which tensors a model requests while it is built.

    The model's tensors are on the meta device. So the order of reading ahead is known before a byte is read.
    """

    dtype: torch.dtype | None = None
    """The dtype of the returned tensors; None: torch's default."""
    takes: list[Take] = field(default_factory=list)

    def take(self, name: str, *shape: int, shard: Shard | None = None) -> torch.Tensor:
        self.takes.append(Take(name, shape, shard))
        return torch.empty(self.takes[-1].part_shape, dtype=self.dtype, device="meta")


class CheckpointWeights(WeightSource):
    """Tensors of a folder's safetensors files, on a CPU, memory-mapped: a page is read when it is touched.

    A context manager. Call `check_all_taken` at its end, so that no weight is silently ignored.
    """

    def __init__(
        self,
        path: Path,
        dtype: torch.dtype | None,
        takes: Sequence[Take] = (),
        on_progress: OnProgress | None = None,
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

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles.values():
            handle.__exit__(kind, error, trace)

    def take(self, name: str, *shape: int, shard: Shard | None = None) -> torch.Tensor:
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
        """ModelError if the files have tensors that were not requested.

        Exceptions are names that end with one of `allowed` or begin with one of `unread`, and tensors in
        `elsewhere`, which other ranks request."""
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

    def take(self, name: str, *shape: int, shard: Shard | None = None) -> torch.Tensor:
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


def model_digest(
    path: Path,
    *,
    dummy_device: torch.device | None = None,
    quantization: str | None = None,
    activations: str | None = None,
    rotation: str | None = None,
    kv_scales: str | None = None,
) -> str:
    """Identifies the model that a folder contains, with everything that changes its keys and values.

    Copies of a folder have the same digest; two fine-tunes of a model, or two commits of the Hub, have
    different ones.

    `dummy_device`: the device of dummy weights, if the model has no other weights; different GPUs make
    different numbers. `quantization`: how weights are stored in memory, if not as in the folder.
    `activations`: the data type of activations, if the KV cache has another one. `rotation`: which of
    config.json's factors LongRoPE uses. `kv_scales`: identifies the divisors of keys and values.

    The digest is the SHA-256 over config.json and, for each weight file, its name, its size, its header, and
    64 windows of 4 KiB that are spread evenly over the content. Hashing everything would read the whole model
    at every start.
    """
    digest = hashlib.sha256((path / "config.json").read_bytes())
    parts = (quantization, activations, rotation, kv_scales, commit_of(path))
    suffix = "".join(f"-{part}" for part in parts if part is not None)
    if dummy_device is not None:
        return f"{digest.hexdigest()}-dummy{_kind_of(dummy_device)}{suffix}"
    gguf = gguf_of(path)
    for file in weight_files(path) if gguf is None else [gguf]:
        digest.update(json.dumps([file.name, file.stat().st_size]).encode())
        header_bytes = _header_bytes(file) if gguf is None else read_gguf(gguf).data_offset
        for window in _windows(file, header_bytes):
            digest.update(window)
    return f"{digest.hexdigest()}{suffix}"


def _kind_of(device: torch.device) -> str:
    """Empty for CPUs, which make equal random numbers; else the GPU's name, since its size matters."""
    return "" if device.type == "cpu" else f"-{device.type}-{torch.cuda.get_device_name(device)}"


def _header_bytes(safetensors: Path) -> int:
    with safetensors.open("rb") as stream:
        return 8 + int.from_bytes(stream.read(8), "little")


def _windows(file: Path, header_bytes: int) -> Iterator[bytes]:
    """The header, then evenly spread windows of the rest."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        header_bytes = min(header_bytes, size)
        yield stream.read(header_bytes)
        last = max(size - DIGEST_WINDOW_BYTES, header_bytes)
        for i in range(DIGEST_WINDOWS):
            stream.seek(header_bytes + (last - header_bytes) * i // (DIGEST_WINDOWS - 1))
            yield stream.read(DIGEST_WINDOW_BYTES)
