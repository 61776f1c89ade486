"""Typed values <-> msgpack bytes, strictly: anything that is not a valid message raises WireError, nothing else.

A `Codec` knows a closed set of dataclasses. On the wire, a message is the array `[kind, field, ...]`. A
nested dataclass is the array of its fields. So the position identifies a field: if positions change, the
version of the plane must change (docs/recipes.md, "Versions"). A field that may hold one of several
dataclasses is encoded like a message. A field of type `Any` is not sent: it must be None. Types are checked
on decoding, at every depth, because a peer's bytes are never trusted; sizes are bounded before anything is
allocated. There is no pickle and no way to name a class that is not registered.
"""

import types
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from operator import attrgetter
from typing import Any, Generic, TypeVar, Union, get_args, get_origin, get_type_hints

import msgpack

from baton.errors import BatonError, WireError

MAX_MESSAGE_BYTES = 32 * 1024 * 1024

M = TypeVar("M")
Convert = Callable[[Any], Any]


class Codec(Generic[M]):
    """Encodes and decodes the given dataclasses; `kind` on the wire is the class name, or its name in `names`."""

    def __init__(
        self, *kinds: type[M], max_bytes: int = MAX_MESSAGE_BYTES, names: Mapping[type[M], str] | None = None
    ) -> None:
        self._names = {kind: (names or {}).get(kind, kind.__name__) for kind in kinds}
        self._encoders = {kind: _dataclass_encoder(kind) for kind in kinds}
        self._decoders = {self._names[kind]: _dataclass_decoder(kind) for kind in kinds}
        self.max_bytes = max_bytes
        """Largest size of a message."""

    def encode(self, message: M) -> bytes:
        """Bytes of one message; WireError if it is larger than a peer would accept."""
        kind = type(message)
        data: bytes = msgpack.packb([self._names[kind], *self._encoders[kind](message)])
        if len(data) > self.max_bytes:
            raise WireError(f"{self._names[kind]} of {len(data)} bytes exceeds the limit of {self.max_bytes}")
        return data

    def decode(self, data: bytes | memoryview) -> M:
        """The message in `data`; WireError names what is wrong and where."""
        size = len(data)
        if size > self.max_bytes:
            raise WireError(f"message of {size} bytes exceeds the limit of {self.max_bytes}")
        parts = unpack(data)
        if not _is_tagged(parts):
            raise WireError("expected an array that starts with the message kind")
        decoder = self._decoders.get(parts[0])
        if decoder is None:
            raise WireError(f"unknown message kind {parts[0][:64]!r}")
        try:
            message: M = decoder(parts[1:])
        except WireError as error:
            raise WireError(f"{parts[0]}{error}") from None
        return message


def unpack(data: bytes | memoryview) -> Any:
    """The plain values in `data`, in memory proportional to its size; WireError if it is not msgpack.

    msgpack allocates every array as soon as its length is read. Nested arrays that each announce as many items as one
    frame could hold would take thousands of times the frame's size. So this first checks that all announced items are
    present.
    """
    try:
        scanner = msgpack.Unpacker(max_buffer_size=len(data) or 1)
        scanner.feed(data)
        scanner.skip()
        return msgpack.unpackb(data, strict_map_key=False)
    except Exception as error:  # msgpack raises ValueError, its own types and UnicodeDecodeError alike
        raise WireError(f"not msgpack: {str(error) or type(error).__name__}") from error


def _dataclass_encoder(kind: type[Any]) -> Convert:
    """A function that encodes a dataclass as a list of its fields. It converts only fields that msgpack cannot pack as
    they are."""
    hints = get_type_hints(kind)
    names = [f.name for f in fields(kind)]
    encoders = [(index, _encoder(hints[name])) for index, name in enumerate(names)]
    plan = [(index, encode) for index, encode in encoders if encode is not _as_it_is]
    read = _reader(names)

    def encode(value: Any) -> list[Any]:
        values = read(value)
        for index, encode_field in plan:
            if values[index] is not None:
                values[index] = encode_field(values[index])
        return values

    return encode


def _reader(names: list[str]) -> Callable[[Any], list[Any]]:
    """A function that reads these attributes of an object, and returns their values as a list."""
    if len(names) > 1:
        read = attrgetter(*names)
        return lambda value: list(read(value))
    return lambda value: [getattr(value, name) for name in names]


def _dataclass_decoder(kind: type[Any]) -> Convert:
    """A function that decodes a dataclass from the list of its fields. It skips fields that have their default, as most
    fields of a RequestOutput do."""
    hints = get_type_hints(kind)
    plan = [(f.name, f.default, _decoder(hints[f.name])) for f in fields(kind)]

    def decode(values: Any) -> Any:
        if not isinstance(values, list) or len(values) != len(plan):
            raise WireError(f": expected {len(plan)} fields, got {_brief(values)}")
        arguments = {}
        for (name, default, convert), value in zip(plan, values, strict=True):
            if value is default:  # None, a flag or a small number; the constructor sets it
                continue
            try:
                arguments[name] = convert(value)
            except WireError as error:
                raise WireError(f".{name}{error}") from None
        try:
            return kind(**arguments)
        except BatonError as error:  # a dataclass that validates itself
            raise WireError(f": {error}") from error

    return decode


def _encoder(hint: Any) -> Convert:
    if hint is Any:
        return _none_only
    inner, *others = _alternatives(hint)
    if inner is not hint:
        encode_inner = _union_encoder([inner, *others]) if others else _encoder(inner)
        if encode_inner is _as_it_is:
            return _as_it_is
        return lambda value: None if value is None else encode_inner(value)
    if is_dataclass(hint):
        return _dataclass_encoder(_as_type(hint))
    if isinstance(hint, type) and issubclass(hint, Enum):
        return attrgetter("_value_")  # `value` is a property, which costs several calls
    if get_origin(hint) in (tuple, frozenset):
        item = get_args(hint)[0]
        if len(get_args(hint)) == 2 and get_args(hint)[1] is Ellipsis and item in (int, str, float):
            return list if get_origin(hint) is frozenset else _as_it_is
        encoders = [_encoder(arg) for arg in get_args(hint) if arg is not Ellipsis]
        if len(encoders) == 1:
            return lambda values: [encoders[0](value) for value in values]
        return lambda values: [encode(value) for encode, value in zip(encoders, values, strict=True)]
    return _mapping_encoder(*get_args(hint)) if _is_mapping(hint) else _as_it_is


def _as_it_is(value: Any) -> Any:
    return value


def _mapping_encoder(key: Any, value: Any) -> Convert:
    if {key, value} <= {int, str, float}:
        return dict
    encode_key, encode_value = _encoder(key), _encoder(value)
    return lambda values: {encode_key(k): encode_value(v) for k, v in values.items()}


def _decoder(hint: Any) -> Convert:
    if hint is Any:
        return _none_only
    inner, *others = _alternatives(hint)
    if inner is not hint:
        decode_inner = _union_decoder([inner, *others]) if others else _decoder(inner)
        if type(None) not in get_args(hint):
            return decode_inner
        return lambda value: None if value is None else decode_inner(value)
    if is_dataclass(hint):
        return _dataclass_decoder(_as_type(hint))
    if isinstance(hint, type) and issubclass(hint, Enum):
        return _enum_decoder(hint)
    if get_origin(hint) is frozenset:
        decode_items = _sequence_decoder(get_args(hint)[0])
        return lambda values: frozenset(decode_items(values))
    if get_origin(hint) is tuple:
        args = get_args(hint)
        return _sequence_decoder(args[0]) if args[-1] is Ellipsis else _fixed_tuple_decoder(args)
    if _is_mapping(hint):
        return _mapping_decoder(*get_args(hint))
    return _scalar_decoder(hint)


def _union_encoder(kinds: list[type[Any]]) -> Convert:
    encoders = {kind: _dataclass_encoder(kind) for kind in kinds}
    return lambda value: [type(value).__name__, *encoders[type(value)](value)]


def _union_decoder(kinds: list[type[Any]]) -> Convert:
    decoders = {kind.__name__: _dataclass_decoder(kind) for kind in kinds}
    assert len(decoders) == len(kinds), f"two of {kinds} have the same name"

    def decode(values: Any) -> Any:
        if not _is_tagged(values) or values[0] not in decoders:
            tag = values[0] if isinstance(values, list) and values else values
            raise WireError(f": expected one of {list(decoders)}, got {_brief(tag)}")
        try:
            return decoders[values[0]](values[1:])
        except WireError as error:
            raise WireError(f".{values[0]}{error}") from None

    return decode


def _is_tagged(values: Any) -> bool:
    return isinstance(values, list) and bool(values) and isinstance(values[0], str)


def _none_only(value: Any) -> None:
    if value is not None:
        raise WireError(f": must be null, got {_brief(value)}")


def _scalar_decoder(hint: type) -> Convert:
    assert hint in (int, float, str, bool, bytes), f"{hint} cannot be encoded"

    def decode(value: Any) -> Any:
        if type(value) is hint:
            return value
        if hint is float and type(value) is int:
            return float(value)
        raise WireError(f": expected {hint.__name__}, got {_brief(value)}")

    return decode


def _enum_decoder(hint: type[Enum]) -> Convert:
    members = {member.value: member for member in hint}
    value_types = set(map(type, members))

    def decode(value: Any) -> Enum:
        if type(value) not in value_types or value not in members:
            raise WireError(f": expected one of {list(members)}, got {_brief(value)}")
        return members[value]

    return decode


def _sequence_decoder(item: Any) -> Convert:
    decode_item, only_int = _decoder(item), {int}

    def decode(values: Any) -> tuple[Any, ...]:
        if not isinstance(values, list):
            raise WireError(f": expected an array, got {_brief(values)}")
        if item is int and set(map(type, values)) <= only_int:
            return tuple(values)
        return tuple([decode_item(value) for value in values])

    return decode


def _fixed_tuple_decoder(items: tuple[Any, ...]) -> Convert:
    decoders = [_decoder(item) for item in items]

    def decode(values: Any) -> tuple[Any, ...]:
        if not isinstance(values, list) or len(values) != len(decoders):
            raise WireError(f": expected an array of {len(decoders)}, got {_brief(values)}")
        return tuple([convert(value) for convert, value in zip(decoders, values, strict=True)])

    return decode


def _mapping_decoder(key: Any, value: Any) -> Convert:
    decode_key, decode_value = _decoder(key), _decoder(value)

    def decode(values: Any) -> dict[Any, Any]:
        if not isinstance(values, dict):
            raise WireError(f": expected a map, got {_brief(values)}")
        return {decode_key(k): decode_value(v) for k, v in values.items()}

    return decode


def _is_mapping(hint: Any) -> bool:
    origin = get_origin(hint)
    return isinstance(origin, type) and issubclass(origin, Mapping)


def _alternatives(hint: Any) -> list[Any]:
    """What a hint allows besides None: `X` of `X | None`, the dataclasses of a union, or the hint itself."""
    if get_origin(hint) not in (Union, types.UnionType):
        return [hint]
    kinds = [arg for arg in get_args(hint) if arg is not type(None)]
    assert len(kinds) == 1 or all(map(is_dataclass, kinds)), (
        f"{hint}: only unions of dataclasses can be decoded"
    )
    return kinds


def _as_type(hint: Any) -> type[Any]:
    assert isinstance(hint, type)
    return hint


def _brief(value: Any) -> str:
    text = repr(value) if isinstance(value, str | int | float | bool | None) else type(value).__name__
    return text[:64]
