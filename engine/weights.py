"""Where a model's tensors come from: a folder's safetensors files, or thin air; knows no architecture."""

import hashlib
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import torch
from safetensors import SafetensorError, safe_open

from baton.errors import ModelError
from engine.model_config import read_json

INDEX_NAME = "model.safetensors.index.json"
DIGEST_WINDOWS = 64
DIGEST_WINDOW_BYTES = 4096


class WeightSource(Protocol):
    """Hands out tensors by their Hugging Face names."""

    def take(self, name: str, *shape: int) -> torch.Tensor:
        """The tensor in the dtype to serve, on CPU; ModelError if it is missing or of another shape."""
        ...


class CheckpointWeights:
    """Tensors of the safetensors files of a folder, memory-mapped: a page is read when it is touched.

    A context manager. Leave it through `check_all_taken`, so that no weight is silently ignored.
    """

    def __init__(self, path: Path, dtype: torch.dtype) -> None:
        self._path = path
        self._dtype = dtype
        self._files = {file: _open(file) for file in weight_files(path)}
        self._file_of = {name: file for file, handle in self._files.items() for name in handle.keys()}  # noqa: SIM118
        self._untaken = set(self._file_of)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._files.values():
            handle.__exit__(kind, error, trace)

    def take(self, name: str, *shape: int) -> torch.Tensor:
        if name not in self._file_of:
            raise ModelError(f"{self._path}: tensor {name} (shape {list(shape)}) is missing")
        tensor: torch.Tensor = self._files[self._file_of[name]].get_tensor(name)
        if tuple(tensor.shape) != shape:
            raise ModelError(
                f"{self._file_of[name]}: tensor {name} has shape {list(tensor.shape)}, config.json says {list(shape)}"
            )
        self._untaken.discard(name)
        return tensor.to(self._dtype)

    def check_all_taken(self, *, allowed: tuple[str, ...] = ()) -> None:
        """ModelError if the files hold tensors that nobody asked for, except those ending in one of `allowed`."""
        unexpected = sorted(name for name in self._untaken if not name.endswith(allowed))
        if unexpected:
            shown = ", ".join(unexpected[:5]) + (", ..." if len(unexpected) > 5 else "")
            raise ModelError(
                f"{self._path}: {len(unexpected)} tensors that the architecture in config.json does not have: {shown}"
            )


class DummyWeights:
    """Random tensors of any name and shape; the same ones in every process."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def take(self, name: str, *shape: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        noise: torch.Tensor = torch.randn(shape, generator=generator)
        if name.endswith("norm.weight"):
            return (1.0 + 0.1 * noise).to(self._dtype)
        scale: float = shape[-1] ** -0.5
        return (noise * scale).to(self._dtype)


def weight_files(path: Path) -> list[Path]:
    """The safetensors files of a model folder, by name: those of its index, else `model.safetensors`."""
    if (path / INDEX_NAME).is_file():
        weight_map = read_json(path / INDEX_NAME).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelError(f"{path / INDEX_NAME}: expected a 'weight_map' from tensor names to files")
        files = sorted({path / str(name) for name in weight_map.values()})
    else:
        files = [path / "model.safetensors"]
    missing = [str(file) for file in files if not file.is_file()]
    if missing:
        raise ModelError(f"{', '.join(missing)} does not exist; weights must be safetensors files")
    return files


def model_digest(path: Path, *, has_weights: bool) -> str:
    """Identifies what a folder computes: equal for copies, different for two fine-tunes of one model.

    SHA-256 over config.json, and of each weight file its name, size, tensor index and 64 windows of 4 KiB spread evenly
    over the content; hashing everything would read the whole model at every start.
    """
    digest = hashlib.sha256((path / "config.json").read_bytes())
    if not has_weights:
        return f"{digest.hexdigest()}-dummy"
    for file in weight_files(path):
        digest.update(json.dumps([file.name, file.stat().st_size]).encode())
        for window in _windows(file):
            digest.update(window)
    return digest.hexdigest()


def _windows(file: Path) -> Iterator[bytes]:
    """The safetensors header, then evenly spread windows of what follows."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        header_bytes = min(8 + int.from_bytes(stream.read(8), "little"), size)
        stream.seek(0)
        yield stream.read(header_bytes)
        last = max(size - DIGEST_WINDOW_BYTES, header_bytes)
        for i in range(DIGEST_WINDOWS):
            stream.seek(header_bytes + (last - header_bytes) * i // (DIGEST_WINDOWS - 1))
            yield stream.read(DIGEST_WINDOW_BYTES)


def _open(file: Path) -> safe_open:
    try:
        handle: safe_open = safe_open(file, framework="pt", device="cpu").__enter__()
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file} is not a readable safetensors file: {error}") from error
    return handle
