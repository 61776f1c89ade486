"""CheckpointIndex: the tensors in a folder's safetensors files, and their byte ranges; reads headers only.

The format: 8 bytes with the length of the header (little-endian), then the header, a JSON object, then the
tensors' bytes, row-major. For each tensor's name, the header has dtype, shape, and a range of bytes that
counts from the header's end. https://github.com/huggingface/safetensors#format

gpt-oss has one tensor for all experts of a layer. The index lists each expert's part as a separate tensor:
`mlp.experts.3.down_proj.bias` is a part of `mlp.experts.down_proj_bias`.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Self

import torch
from safetensors import SafetensorError, safe_open

from baton.errors import ModelError
from engine.loading.model_files import TensorEntry, stored_tensors, weight_files

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Types of plain numbers."""
CODES = {
    "U8": torch.uint8,
    "I8": torch.int8,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
}
"""Types of quantized values, which have their scales in other tensors; see `quantized_checkpoint`."""
_STACK = re.compile(r"(.+\.experts)\.(gate_up_proj|down_proj)(|_bias|_blocks|_scales)")
_PARTS = {"": "weight", "_bias": "bias", "_blocks": "blocks", "_scales": "scales"}
"""A stacked tensor's suffix, and the name of an expert's part. Matrices of plain numbers have inputs
first."""


def types_for(dtype: torch.dtype | None) -> Mapping[str, torch.dtype]:
    """The stored types that can become numbers of `dtype`; None: all types, since tensors stay unchanged."""
    return DTYPES | CODES if dtype is None else DTYPES


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where one tensor is stored."""

    file: Path
    dtype_name: str
    """The format's name of the data type, such as `BF16`."""
    shape: tuple[int, ...]
    offset: int
    """Position of the tensor's first byte in the file."""
    part_of: tuple[str, int] | None = None
    """Name of a stacked tensor in the file, and the index in its first dimension; None: a whole tensor of the
    file."""
    is_transposed: bool = False
    """Whether the file has the two dimensions of `shape` in the other order."""

    @property
    def dtype(self) -> torch.dtype:
        return (DTYPES | CODES)[self.dtype_name]


class CheckpointIndex:
    """Every tensor of a folder, by name."""

    def __init__(self, path: Path, tensors: dict[str, StoredTensor]) -> None:
        self._path = path
        self._tensors = tensors

    @classmethod
    def read(cls, path: Path) -> Self:
        """Reads the index of a model folder; ModelError names a missing or damaged file, or a tensor of which the files
        have several."""
        for file in weight_files(path):
            open_safetensors(file).__exit__(None, None, None)
        tensors: dict[str, StoredTensor] = {}
        for name, entry in stored_tensors(path).items():
            for part_name, part in _parts_of(name, entry):
                if tensors.setdefault(part_name, part) is not part:
                    raise ModelError(f"{path}: {part_name} is both a tensor and a part of a stacked tensor")
        return cls(path, tensors)

    @property
    def names(self) -> Collection[str]:
        return self._tensors.keys()

    def stored(self, name: str) -> StoredTensor:
        """Where the tensor of this name is stored; it must be one of `names`."""
        return self._tensors[name]

    def find(
        self, name: str, shape: Sequence[int], types: Mapping[str, torch.dtype] = DTYPES
    ) -> StoredTensor:
        """The tensor of this name; ModelError if it is missing, or has another shape or another type."""
        stored = self._tensors.get(name)
        if stored is None:
            raise ModelError(f"{self._path}: tensor {name} (shape {list(shape)}) is missing")
        if stored.shape != tuple(shape):
            raise ModelError(
                f"{stored.file}: tensor {name} has shape {list(stored.shape)}, but config.json implies "
                f"{list(shape)}"
            )
        if stored.dtype_name not in types:
            raise ModelError(
                f"{stored.file}: tensor {name} is stored as {stored.dtype_name}; supported are {', '.join(types)}"
            )
        return stored

    def find_one_of(
        self, name: str, shapes: Sequence[tuple[int, ...]], types: Mapping[str, torch.dtype]
    ) -> StoredTensor:
        """Like `find`, for a tensor that may have any of these shapes."""
        stored = self._tensors.get(name)
        return self.find(name, stored.shape if stored and stored.shape in shapes else shapes[0], types)

    def check_all_taken(
        self, taken: Collection[str], *, allowed: tuple[str, ...] = (), unread: tuple[str, ...] = ()
    ) -> None:
        """ModelError if some tensors were not taken.

        Exceptions are names that end with one of `allowed`, or begin with one of `unread`."""
        unexpected = sorted(
            n
            for n in self._tensors
            if n not in taken and not n.endswith(allowed) and not n.startswith(unread)
        )
        if unexpected:
            shown = ", ".join(unexpected[:5]) + (", ..." if len(unexpected) > 5 else "")
            raise ModelError(
                f"{self._path}: {len(unexpected)} tensors do not belong to the architecture in "
                f"config.json: {shown}"
            )


def open_safetensors(file: Path) -> safe_open:
    """Opens a file; the library checks its header and size. ModelError if the file is damaged."""
    try:
        handle: safe_open = safe_open(file, framework="pt", device="cpu").__enter__()
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file} is not a readable safetensors file: {error}") from error
    return handle


def _parts_of(name: str, whole: TensorEntry) -> Iterator[tuple[str, StoredTensor]]:
    """The tensor, or each expert's part of it."""
    file, dtype, offset = whole.file, whole.dtype, whole.offset
    stack = _STACK.fullmatch(name)
    if stack is None or len(whole.shape) < 2 or not whole.num_values or dtype not in types_for(None):
        yield name, StoredTensor(file, dtype, whole.shape, offset)
        return
    experts, projection, suffix = stack.groups()
    num_experts, *sizes = whole.shape
    part_bytes = prod(sizes) * types_for(None)[dtype].itemsize
    is_transposed = suffix == "" and len(sizes) == 2
    shape = tuple(sizes[::-1] if is_transposed else sizes)
    for number in range(num_experts):
        part = StoredTensor(file, dtype, shape, offset + number * part_bytes, (name, number), is_transposed)
        yield f"{experts}.{number}.{projection}.{_PARTS[suffix]}", part
