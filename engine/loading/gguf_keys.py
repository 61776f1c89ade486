"""Reads and checks values of a GGUF file's metadata, and small tensors; knows no architecture."""

import struct

from baton.errors import ModelError
from engine.loading.gguf import GgufFile, GgufType


def size_in(file: GgufFile, key: str, *, default: int | None = None, most: int = 2**18) -> int:
    """A length or count of the metadata; ModelError if the value is not from 1 to `most`."""
    value = file.need(key, int) if default is None or key in file.metadata else default
    if not 1 <= value <= most:
        raise ModelError(f"{file.path}: {key} must be from 1 to {most:,}, got {value:,}")
    return value


def positive_in(file: GgufFile, key: str, *, default: float | None = None) -> float:
    """A positive number of the metadata, neither tiny nor huge, which is safe to divide by."""
    value = file.need(key, float) if default is None or key in file.metadata else default
    if not 1e-30 < value < 1e30:
        raise ModelError(f"{file.path}: {key} must be a positive number, got {value}")
    return value


def floats_in(file: GgufFile, name: str) -> tuple[float, ...]:
    """The numbers of a tensor that must be a list of F32."""
    tensor = file.tensors[name]
    if tensor.type is not GgufType.F32 or len(tensor.shape) != 1:
        raise ModelError(f"{file.path}: tensor {name} must be a list of F32 numbers")
    with file.path.open("rb") as content:
        content.seek(tensor.offset)
        return struct.unpack(f"<{tensor.shape[0]}f", content.read(tensor.num_bytes))
