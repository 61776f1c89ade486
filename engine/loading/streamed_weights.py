"""StreamedWeights: a checkpoint's tensors on a GPU, read ahead in the order in which the model asks for them."""

from collections import deque
from collections.abc import Iterable, Sequence
from math import prod
from pathlib import Path

import torch

from engine.loading.safetensors_index import CheckpointIndex, StoredTensor, types_for
from engine.loading.weight_stream import CudaCopies, FilePart, WeightStream
from engine.loading.weights import FileWeights, OnLoaded, Shard, Take


class StreamedWeights(FileWeights):
    """The weights of a checkpoint, for a model that requests exactly `takes`, in this order (see TakeRecorder).

    Reads only requested tensors. Copies bytes to the device as they are stored, and converts them to `dtype`
    there.
    """

    def __init__(
        self,
        path: Path,
        dtype: torch.dtype | None,
        takes: Sequence[Take],
        copies: CudaCopies,
        on_progress: OnLoaded | None = None,
    ) -> None:
        """ModelError, before weights are read, if a tensor is missing, misshapen or cannot be divided.

        `dtype` None: tensors stay as they are stored, perhaps as codes.
        """
        self._dtype = dtype
        self._index = CheckpointIndex.read(path)
        types = types_for(dtype)
        self._takes = deque((take, self._index.find(take.name, take.shape, types)) for take in takes)
        self._names = {take.name for take in takes}
        parts = [part_of(take, stored) for take, stored in self._takes]
        self._on_progress = on_progress
        self._loaded_bytes, self._total_bytes = 0, sum(part.num_bytes for part in parts)
        self._stream = WeightStream(parts, copies)

    def close(self) -> None:
        self._stream.close()

    def take_tensor(self, name: str, *shape: int, shard: Shard | None = None) -> torch.Tensor:
        tensor = self._next(name, shape, shard)
        return tensor if self._dtype is None else tensor.to(self._dtype)

    def take_float32(self, name: str, *shape: int) -> torch.Tensor:
        return self._next(name, shape, None).to(torch.float32)

    def _next(self, name: str, shape: tuple[int, ...], shard: Shard | None) -> torch.Tensor:
        take, stored = self._takes.popleft()
        assert take == Take(name, shape, shard), f"the model should have asked for {take}, not for {name}"
        flat = self._stream.next_part()
        self._loaded_bytes += flat.numel()
        if self._on_progress is not None:
            self._on_progress(self._loaded_bytes, self._total_bytes)
        tensor = flat.view(stored.dtype).view(take.as_stored(stored).part_shape)
        return tensor.t() if stored.is_transposed else tensor

    def check_all_taken(
        self, *, allowed: tuple[str, ...] = (), unread: tuple[str, ...] = (), elsewhere: Iterable[Take] = ()
    ) -> None:
        assert not self._takes, f"the model did not ask for {self._takes[0][0].name}"
        names = self._names.union(take.name for take in elsewhere)
        self._index.check_all_taken(names, allowed=allowed, unread=unread)


def part_of(take: Take, stored: StoredTensor) -> FilePart:
    """The bytes of a slice of a tensor.

    A slice of the first dimension is one run. A slice of another dimension has one run for each index of the
    dimensions before it.
    """
    take = take.as_stored(stored)
    shape, itemsize = take.shape, stored.dtype.itemsize
    if take.shard is None:
        return FilePart(stored.file, stored.offset, prod(shape) * itemsize)
    part, dim = take.shard.slice_of(take.name, shape), take.shard.dim
    element_bytes = prod(shape[dim + 1 :]) * itemsize
    return FilePart(
        stored.file,
        stored.offset + part.start * element_bytes,
        (part.stop - part.start) * element_bytes,
        prod(shape[:dim]),
        shape[dim] * element_bytes,
    )
