"""Hostile frames: messages of every kind with extreme values, and their bit flips, cuts and splices.

Everything is a function of a `random.Random`, so that a seed repeats it.
"""

import math
import random
import struct
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from functools import cache
from typing import Any, Union, get_args, get_origin, get_type_hints

import msgpack

from baton.errors import BatonError, WireError
from baton.kv import PROTOCOL_VERSION, KVFingerprint
from baton.messages.control_codec import CALL_FRAMES, REPLY_FRAMES
from baton.messages.request_plane import TO_GATEWAY, TO_WORKER
from baton.messages.wire import unpack
from baton.sampling import SamplingParams
from cluster.control_api.calls import CONTROL_CODEC
from engine.ranks.messages import FROM_RANK, TO_RANK
from kv_transfer.protocol import messages
from kv_transfer.protocol.messages import (
    MAX_HEADER_BYTES,
    PREFIX_BYTES,
    TO_CONSUMER,
    TO_PRODUCER,
    Open,
    Pieces,
    SealedCodec,
)

CODECS = {
    "TO_WORKER": TO_WORKER,
    "TO_GATEWAY": TO_GATEWAY,
    "TO_PRODUCER": TO_PRODUCER,
    "TO_CONSUMER": TO_CONSUMER,
    "TO_RANK": TO_RANK,
    "FROM_RANK": FROM_RANK,
    "CONTROL_CALLS": CONTROL_CODEC.requests,
    "CALL_FRAMES": CALL_FRAMES,
    "REPLY_FRAMES": REPLY_FRAMES,
}

Maker = Callable[[random.Random], Any]

INTEGERS = (0, 1, 2, 7, 16, 255, 2**31, 2**32 + 1, 2**53 + 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1)
NEGATIVES = (-1, -2, -17, -(2**31), -(2**62), -(2**63))
FLOATS = (0.0, -0.0, 1.0, 0.5, -1.5, 1e308, 5e-324, math.inf, -math.inf, math.nan)
WORDS = (
    "",
    "r",
    "tcp://127.0.0.1:1",
    "zmq_tcp",
    "shared_memory",
    "\x00",
    "\u6f22\u5b57",
    "\U0001f600" * 9,
    "x" * 300,
)


def integer(rng: random.Random) -> int:
    """An integer that is mostly small, and sometimes at the limits of msgpack."""
    if rng.random() < 0.6:
        return rng.randint(-2, 40)
    return rng.choice(INTEGERS + NEGATIVES)


@cache
def maker(hint: Any) -> Maker:
    """Makes values for a field of this type. For a message, makes values that its constructor accepts."""
    if hint is SamplingParams:
        return _sampling_params
    if hint is Any:
        return lambda _: None
    if hint in _SCALARS:
        return _SCALARS[hint]
    if is_dataclass(hint):
        return _maker_of_dataclass(hint)
    if isinstance(hint, type) and issubclass(hint, Enum):
        members = list(hint)
        return lambda rng: rng.choice(members)
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        makers = [maker(arg) for arg in args if arg is not type(None)]
        if len(makers) == len(args):
            return lambda rng: rng.choice(makers)(rng)
        assert len(makers) == 1, f"{hint} does not travel"
        return lambda rng: None if rng.random() < 0.3 else makers[0](rng)
    items = [maker(arg) for arg in args if arg is not Ellipsis]
    if origin is tuple and args[-1] is not Ellipsis:
        return lambda rng: tuple([make(rng) for make in items])
    sizes = (0, 1, 2, 5, 40) if args[0] in _SCALARS else (0, 1, 2)
    if origin in (tuple, frozenset):
        return lambda rng: origin([items[0](rng) for _ in range(rng.choice(sizes))])
    assert issubclass(origin, Mapping), f"{hint} does not travel"
    return lambda rng: {items[0](rng): items[1](rng) for _ in range(rng.choice(sizes))}


def _maker_of_dataclass(kind: Any) -> Maker:
    hints = get_type_hints(kind)
    makers = {field.name: maker(hints[field.name]) for field in fields(kind)}

    def make(rng: random.Random) -> Any:
        while True:
            values = {name: make_field(rng) for name, make_field in makers.items()}
            if kind is Open:
                values["received_versions"] = tuple([integer(rng) for _ in values["received"]])
            if kind is Pieces:
                values["indices"] = tuple(dict.fromkeys(values["indices"]))
                for name in ("piece_ids", "checksums"):
                    values[name] = tuple([integer(rng) for _ in values["indices"]])
            try:
                return kind(**values)
            except BatonError:  # a limit that random values do not know
                continue

    return make


def _sampling_params(rng: random.Random) -> SamplingParams:
    stop = tuple(rng.choice(("a", "\n\n", "\u6f22" * 99)) for _ in range(rng.randint(0, 3)))
    max_tokens = min(abs(integer(rng)), 2**62) + 1
    return SamplingParams(max_tokens=max_tokens, stop=stop, temperature=rng.choice((0.0, 1.0)))


def kinds_of(codec: Any) -> list[Any]:
    inner = codec._codec if isinstance(codec, SealedCodec) else codec
    return list(inner._encoders)


def valid_frame(codec: Any, rng: random.Random) -> bytes:
    frame: bytes = codec.encode(maker(rng.choice(kinds_of(codec)))(rng))
    return frame


def hostile_frame(codec: Any, rng: random.Random) -> bytes:
    """Garbage, or a valid frame after a few mutations.

    Most are sealed if frames are, so that more code reads them.
    """
    is_sealed = isinstance(codec, SealedCodec)
    if rng.random() < 0.05:
        data = rng.randbytes(rng.randint(0, 80))
    else:
        data = valid_frame(codec, rng)[PREFIX_BYTES if is_sealed else 0 :]
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        data = rng.choice(MUTATIONS)(data, rng)
    if not is_sealed:
        return data
    if rng.random() < 0.1:
        return rng.choice(MUTATIONS)(seal(data), rng)
    return seal(data)


def seal(data: bytes) -> bytes:
    """Seals the data as SealedCodec does."""
    return messages.seal(data, PROTOCOL_VERSION)


# mutations


def _flip(data: bytes, rng: random.Random) -> bytes:
    if not data:
        return data
    flipped = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        flipped[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(flipped)


def _cut(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randint(0, len(data))]


def _append(data: bytes, rng: random.Random) -> bytes:
    return data + rng.randbytes(rng.randint(1, 20))


def _insert_header(data: bytes, rng: random.Random) -> bytes:
    """Inserts the beginning of something huge: a string, bytes, an array, a map, or an extension."""
    at, size = rng.randint(0, len(data)), rng.choice((0, 1, len(data), 2**16, 2**31, 2**32 - 1))
    return (
        data[:at]
        + rng.choice((b"\xdb", b"\xc6", b"\xdd", b"\xdf", b"\xc9"))
        + struct.pack(">I", size)
        + data[at:]
    )


def _nest(data: bytes, rng: random.Random) -> bytes:
    """Arrays within arrays. Each claims one item, or about as many items as there are bytes."""
    depth = rng.choice((3, 60, 500, 2_000))
    claim = b"\xdd" + struct.pack(">I", rng.choice((1, len(data), len(data) + 5 * depth - 1)))
    return claim * depth + data


def _splice(data: bytes, rng: random.Random) -> bytes:
    other = valid_frame(rng.choice(list(CODECS.values())), rng)
    return data[: rng.randint(0, len(data))] + other[rng.randint(0, len(other)) :]


def _change_tree(data: bytes, rng: random.Random) -> bytes:
    """Changes one node of the tree: replaces, removes or doubles it."""
    try:
        tree = unpack(data)
    except WireError:
        return data
    path: list[Any] = []
    node = tree
    while isinstance(node, list) and node and (not path or rng.random() < 0.7):
        path.append((node, rng.randrange(len(node))))
        node = node[path[-1][1]]
    if not path:
        return _pack(_anything(rng))
    parent, index = path[-1]
    match rng.randrange(4):
        case 0:
            del parent[index]
        case 1:
            parent.insert(index, node)
        case 2:
            parent[index] = _anything(rng)
        case _:  # a value of the same type, so that it is read
            parent[index] = _SCALARS.get(type(node), _anything)(rng)
    return _pack(tree)


def long_text(rng: random.Random) -> str:
    """A text that makes its message, or the answer to it, about as large as allowed or larger."""
    return "x" * rng.choice((500, 1_000, MAX_HEADER_BYTES - rng.randrange(400)))


def odd_fingerprint(rng: random.Random, fingerprint: KVFingerprint) -> KVFingerprint:
    """The fingerprint with other values of the two fields that may differ; some values no fingerprint can have."""
    odd = replace(fingerprint)
    for name in ("block_size", "num_ranks"):
        object.__setattr__(odd, name, rng.choice((0, -1, 1, 2, 3, 16, 32, 2**40)))
    return odd


def _anything(rng: random.Random, depth: int = 0) -> Any:
    leaves: Sequence[Callable[[], Any]] = (
        lambda: integer(rng),
        lambda: rng.choice(FLOATS),
        lambda: rng.choice(WORDS),
        lambda: rng.randbytes(rng.randint(0, 9)),
        lambda: rng.choice((None, True, False)),
        lambda: msgpack.ExtType(rng.randint(0, 127), b"x"),
        lambda: msgpack.Timestamp(rng.randint(0, 2**40)),
        lambda: [integer(rng)] * rng.choice((1, 1_000)),
    )
    if depth > 3 or rng.random() < 0.6:
        return rng.choice(leaves)()
    items = [_anything(rng, depth + 1) for _ in range(rng.randint(0, 3))]
    if rng.random() < 0.7:
        return items
    return {rng.choice((integer(rng), rng.choice(WORDS), rng.choice(FLOATS))): item for item in items}


def _pack(tree: Any) -> bytes:
    data: bytes = msgpack.packb(tree)
    return data


MUTATIONS = (_flip, _cut, _append, _insert_header, _nest, _splice, _change_tree, _change_tree, _change_tree)
_SCALARS: dict[Any, Maker] = {
    int: integer,
    float: lambda rng: rng.choice(FLOATS),
    str: lambda rng: rng.choice(WORDS),
    bytes: lambda rng: rng.randbytes(rng.choice((0, 1, 16, 100))),
    bool: lambda rng: rng.random() < 0.5,
}
