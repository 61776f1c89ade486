"""GgufFile: the metadata of a GGUF file, and the positions of its tensors; knows no model or tensor library.

The format (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md), little-endian, without padding before
the data:

    "GGUF"  version: u32  tensor count: u64  metadata count: u64
    metadata    key: string  type: u32  value            a string is its length in bytes (u64), then UTF-8
    tensors     name: string  dimensions: u32  sizes: u64 each, the innermost first  type: u32  offset: u64
    data        begins at a multiple of `general.alignment`; offsets count from there

Every length is checked against the file's size before it is used.
"""

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from math import prod
from pathlib import Path
from typing import Literal, Self, TypeVar

from baton.errors import ModelError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_DIMENSIONS = 4
MAX_LIST = 2**24
"""A list of the metadata may have at most this many values, since a value needs more bytes in memory than in the
file."""

Value = int | float | bool | str | list[int] | list[float] | list[str]
"""The value of a metadata key."""
T = TypeVar("T", int, float, bool, str)


class GgufType(Enum):
    """How a tensor is stored: blocks of `block_size` values in `block_bytes` bytes, along the innermost dimension.

    In memory, floats stay as they are. Other values are kept in groups (see GroupedWeight): `group_size` values of
    `kept_bits` bits have a scale. A group also has a minimum, unless one number means zero in all groups of the type.
    """

    F32 = (0, 1, 4)
    F16 = (1, 1, 2)
    BF16 = (30, 1, 2)
    Q4_0 = (2, 32, 18, 4)
    Q4_1 = (3, 32, 20, 4, 32, True)
    Q5_0 = (6, 32, 22, 8)
    Q5_1 = (7, 32, 24, 8, 32, True)
    Q8_0 = (8, 32, 34, 8)
    Q4_K = (12, 256, 144, 4, 32, True)
    Q5_K = (13, 256, 176, 8, 32, True)
    Q6_K = (14, 256, 210, 8, 16)
    MXFP4 = (39, 32, 17, 4)

    def __init__(
        self,
        number: int,
        block_size: int,
        block_bytes: int,
        kept_bits: Literal[4, 8] | None = None,
        group_size: int = 32,
        has_minimum: bool = False,
    ) -> None:
        """`kept_bits`: None for floats. Values of 5 and 6 bits are kept in 8."""
        self.number = number
        self.block_size = block_size
        self.block_bytes = block_bytes
        self.kept_bits = kept_bits
        self.group_size = group_size
        self.has_minimum = has_minimum

    @property
    def memory_bits(self) -> float:
        """Bits of a value in a CPU's memory, with its part of the scale and the minimum, of 16 bits each."""
        if self.kept_bits is None:
            return 8 * self.block_bytes
        return self.kept_bits + 16 * (1 + self.has_minimum) / self.group_size


_TYPES = {kind.number: kind for kind in GgufType}
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Metadata types of a fixed size, as `struct` names them."""
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where one tensor is stored."""

    name: str
    type: GgufType
    shape: tuple[int, ...]
    """Row-major: the innermost dimension last."""
    offset: int
    """Position of the tensor's first byte in the file."""

    @property
    def row_bytes(self) -> int:
        """Bytes of one row along the innermost dimension."""
        return self.shape[-1] // self.type.block_size * self.type.block_bytes

    @property
    def num_bytes(self) -> int:
        return prod(self.shape[:-1]) * self.row_bytes

    def part(self, number: int) -> Self:
        """The part of the tensor at index `number` of its first dimension, with the same name."""
        num_bytes = self.num_bytes // self.shape[0]
        return replace(self, shape=self.shape[1:], offset=self.offset + number * num_bytes)


@dataclass(frozen=True, slots=True)
class GgufFile:
    """The metadata and the tensors of a file, both by name."""

    path: Path
    metadata: dict[str, Value]
    tensors: dict[str, GgufTensor]
    data_offset: int
    """Where the tensors' data begins; everything before is metadata."""

    def get(self, key: str, kind: type[T]) -> T | None:
        """The value of a metadata key; None if the file lacks the key.

        ModelError if the value has another type.
        """
        value = self.metadata.get(key)
        if isinstance(value, int) and kind is float and not isinstance(value, bool):
            value = float(value)
        if value is not None and type(value) is not kind:
            raise ModelError(f"{self.path}: {key} must be of type {kind.__name__}, got {value!r:.80}")
        return value

    def need(self, key: str, kind: type[T]) -> T:
        """The value of a metadata key; ModelError if the key is missing, or the value has another type."""
        value = self.get(key, kind)
        if value is None:
            raise ModelError(f"{self.path}: the metadata key {key} is missing")
        return value

    def strings(self, key: str) -> list[str]:
        """The value of a key that must be a list of strings."""
        value = self.metadata.get(key)
        if not isinstance(value, list) or not value or not isinstance(value[0], str):
            raise ModelError(f"{self.path}: the metadata key {key} must be a list of strings")
        return [str(text) for text in value]

    def numbers(self, key: str) -> list[float]:
        """The value of a key that must be a list of numbers; empty if the file lacks the key."""
        value = self.metadata.get(key, [])
        if not isinstance(value, list) or (value and isinstance(value[0], str)):
            raise ModelError(f"{self.path}: the metadata key {key} must be a list of numbers")
        return [float(number) for number in value]


def read_gguf(path: Path) -> GgufFile:
    """Reads everything except the tensors' data. ModelError names the file and its fault."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return _Reader(path, content).read()
    except (OSError, ValueError) as error:  # mmap refuses an empty file with a ValueError
        raise ModelError(f"cannot read {path}: {error}") from error


def gguf_layers(prefixes: tuple[str, ...]) -> tuple[str, ...]:
    """`model.layers.3.` -> `blk.3.`, for each of these beginnings of names."""
    return tuple(prefix.replace("model.layers.", "blk.") for prefix in prefixes)


class _Reader:
    """Reads the file from its beginning to the start of the data."""

    def __init__(self, path: Path, content: mmap.mmap) -> None:
        self._path = path
        self._content = content
        self._size = len(content)
        self._position = 0

    def read(self) -> GgufFile:
        if self._content[: len(MAGIC)] != MAGIC:
            raise self._error("the file does not begin with 'GGUF'")
        self._position = len(MAGIC)
        version = self._number("I")
        if version not in VERSIONS:
            is_swapped = int.from_bytes(struct.pack("<I", version), "big") in VERSIONS
            reason = (
                "big-endian files are not supported" if is_swapped else f"version {version} is not supported"
            )
            raise self._error(f"{reason}; supported are little-endian files of versions 2 and 3")
        num_tensors = self._count("tensors", 24)
        metadata: dict[str, Value] = {}
        for _ in range(self._count("metadata keys", 13)):
            key = self._string()
            if key in metadata:
                raise self._error(f"the metadata key {key} appears twice")
            metadata[key] = self._value(key)
        infos = [self._tensor_info() for _ in range(num_tensors)]
        alignment = self._alignment(metadata)
        data_offset = -(-self._position // alignment) * alignment
        return GgufFile(self._path, metadata, dict(self._placed(infos, data_offset, alignment)), data_offset)

    def _placed(
        self, infos: list[GgufTensor], data_offset: int, alignment: int
    ) -> Iterator[tuple[str, GgufTensor]]:
        """The tensors with their positions in the file."""
        names = set()
        for info in infos:
            if info.name in names:
                raise self._error(f"tensor {info.name} appears twice")
            names.add(info.name)
            if info.offset % alignment:
                raise self._error(
                    f"tensor {info.name} has offset {info.offset}, which is not a multiple of {alignment}"
                )
            tensor = GgufTensor(info.name, info.type, info.shape, data_offset + info.offset)
            end = tensor.offset + tensor.num_bytes
            if end > self._size:
                raise self._error(f"tensor {info.name} ends at byte {end:,}, but the file has {self._size:,}")
            yield info.name, tensor

    def _alignment(self, metadata: dict[str, Value]) -> int:
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment <= 0 or alignment % 8:
            raise self._error(f"general.alignment must be a positive multiple of 8, got {alignment!r:.80}")
        return alignment

    def _tensor_info(self) -> GgufTensor:
        """Reads where a tensor is stored. The offset still counts from the beginning of the data."""
        name = self._string()
        num_dimensions = self._number("I")
        if not 1 <= num_dimensions <= MAX_DIMENSIONS:
            raise self._error(f"tensor {name} has {num_dimensions} dimensions")
        shape = tuple(self._number("Q") for _ in range(num_dimensions))[::-1]
        number, offset = self._number("I"), self._number("Q")
        kind = _TYPES.get(number)
        if kind is None:
            supported = ", ".join(_TYPES[number].name for number in sorted(_TYPES))
            raise self._error(
                f"tensor {name} has type {number}, which is not supported; supported are {supported}"
            )
        if not all(shape):
            raise self._error(f"tensor {name} has shape {list(shape)}")
        if shape[-1] % kind.block_size:
            raise self._error(
                f"tensor {name} is {kind.name}, but {shape[-1]} is not a multiple of {kind.block_size}"
            )
        return GgufTensor(name, kind, shape, offset)

    def _value(self, key: str) -> Value:
        number = self._number("I")
        if number == _STRING:
            return self._string()
        if number != _ARRAY:
            return self._scalars(key, number, 1)[0]
        number, count = self._number("I"), self._number("Q")
        if count > MAX_LIST:
            raise self._error(f"the metadata key {key} has {count:,} values; supported are {MAX_LIST:,}")
        if number == _STRING:
            return self._strings(count)
        return list(self._scalars(key, number, count))

    def _scalars(self, key: str, number: int, count: int) -> tuple[int, ...]:
        """Integers, floats or truth values."""
        code = _SCALARS.get(number)
        if code is None:
            what = "is a list of lists" if number == _ARRAY else f"has type {number}"
            raise self._error(f"the metadata key {key} {what}, which is not supported")
        return self._unpacked(code, count)

    def _unpacked(self, code: str, count: int) -> tuple[int, ...]:
        """Reads `count` values; `code`: their type, as `struct` names it."""
        size = struct.calcsize(code)
        self._check_fits(count, size)
        values = struct.unpack_from(f"<{count}{code}", self._content, self._position)
        self._position += count * size
        return values

    def _count(self, what: str, min_bytes: int) -> int:
        count = self._number("Q")
        if count * min_bytes > self._size:
            raise self._error(
                f"the file claims to have {count:,} {what}, which do not fit in its {self._size:,} bytes"
            )
        return count

    def _number(self, code: str) -> int:
        return self._unpacked(code, 1)[0]

    def _string(self) -> str:
        (text,) = self._strings(1)
        return text

    def _strings(self, count: int) -> list[str]:
        """Reads `count` strings.

        A vocabulary has about 100,000 strings, so most checks follow after the loop.
        """
        self._check_fits(count, 8)
        content, length_at = self._content, struct.Struct("<Q").unpack_from
        texts, position = [], self._position
        try:
            for _ in range(count):
                start = position + 8
                position = start + length_at(content, position)[0]
                texts.append(content[start:position].decode())
        except (struct.error, OverflowError, UnicodeDecodeError):
            raise self._error(f"the string at byte {start - 8:,} is cut off, or not UTF-8") from None
        if position > self._size:
            raise self._error(f"the string at byte {start - 8:,} is cut off")
        self._position = position
        return texts

    def _check_fits(self, count: int, size: int) -> None:
        if count * size > self._size - self._position:
            raise self._error(
                f"the file ends early: {count * size:,} bytes are missing after byte {self._position:,}"
            )

    def _error(self, what: str) -> ModelError:
        return ModelError(f"{self._path} is not a usable GGUF file: {what}")
