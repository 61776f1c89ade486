"""Whatever comes in on either plane, decoders raise WireError and endpoints nothing; wire_fuzz.py is the long run."""

import mmap
import random
import struct
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.errors import WireError
from baton.messages.wire import MAX_MESSAGE_BYTES
from kv_transfer.protocol.messages import MAX_HEADER_BYTES, PREFIX_BYTES, SealedCodec
from tests.factories.wire_values import CODECS, hostile_frame, kinds_of, maker, seal, valid_frame
from tests.property.wire_fuzz import check_cost, check_decoder, fuzz_endpoint

codecs = pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
rngs = st.integers(0, 2**32).map(random.Random)
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=5)
)
trees = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(scalars, inner, max_size=3),
    max_leaves=20,
)


def framed(codec: Any, data: bytes) -> bytes:
    """The data as a frame, sealed if frames are sealed, so that the inner decoder reads it."""
    return seal(data) if isinstance(codec, SealedCodec) else data


@codecs
@given(data=st.binary(max_size=300))
def test_arbitrary_bytes_are_no_message(codec: Any, data: bytes) -> None:
    for frame in (data, framed(codec, data)):
        with pytest.raises(WireError):
            codec.decode(frame)


@codecs
@given(data=st.data())
def test_arbitrary_values_in_place_of_fields(codec: Any, data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(kinds_of(codec)))
    values = data.draw(st.lists(trees, max_size=10))
    check_decoder(codec, framed(codec, msgpack.packb([kind.__name__, *values])))


@codecs
@given(rng=rngs)
def test_valid_messages_come_back_equal(codec: Any, rng: random.Random) -> None:
    for kind in kinds_of(codec):
        assert check_decoder(codec, codec.encode(maker(kind)(rng))) is not None


@codecs
@given(rng=rngs)
def test_damaged_messages_are_refused_or_still_make_sense(codec: Any, rng: random.Random) -> None:
    check_cost(codec, valid_frame(codec, rng))
    check_cost(codec, hostile_frame(codec, rng))
    check_decoder(codec, hostile_frame(codec, rng))


@codecs
@given(rng=rngs, at=st.floats(0.0, 1.0, exclude_max=True), bit=st.integers(0, 7))
def test_a_flipped_bit_is_never_overlooked_where_frames_are_sealed(
    codec: Any, rng: random.Random, at: float, bit: int
) -> None:
    frame = bytearray(valid_frame(codec, rng))
    frame[int(at * len(frame))] ^= 1 << bit
    message = check_decoder(codec, bytes(frame))
    assert message is None or not isinstance(codec, SealedCodec)


SHAPE_BYTES, NUM_CLAIMS = 20_000, 500
SHAPES = {
    "nested arrays that each claim the frame": lambda n: (
        (b"\xdd" + struct.pack(">I", n - 5 * NUM_CLAIMS)) * NUM_CLAIMS + b"\x00" * (n - 5 * NUM_CLAIMS)
    ),
    "nesting without end": lambda n: b"\x91" * n,
    "empty maps": lambda n: b"\xdd" + struct.pack(">I", n - 5) + b"\x80" * (n - 5),
    "empty arrays": lambda n: b"\xdd" + struct.pack(">I", n - 5) + b"\x90" * (n - 5),
    "a map of many keys": lambda n: msgpack.packb({key << 40: 0 for key in range(n // 10)}),
    "a string that ends early": lambda n: b"\xdb" + struct.pack(">I", 2**32 - 1) + b"a" * (n - 5),
    "an array that ends early": lambda n: b"\xdd" + struct.pack(">I", 2**32 - 1) + b"\x00" * (n - 5),
}


@codecs
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_costliest_shapes_cost_no_more_than_their_size(codec: Any, shape: Any) -> None:
    check_cost(codec, framed(codec, shape(SHAPE_BYTES)))
    for kind in kinds_of(codec):
        name = msgpack.packb(kind.__name__)
        check_cost(codec, framed(codec, b"\x92" + name + shape(SHAPE_BYTES - 40)))


@codecs
def test_a_frame_over_the_limit_is_refused_unread(codec: Any) -> None:
    limit = MAX_HEADER_BYTES if isinstance(codec, SealedCodec) else codec.max_bytes
    if limit > MAX_MESSAGE_BYTES:  # untouched memory may be of any size
        with pytest.raises(WireError, match="exceeds the limit"):
            codec.decode(memoryview(mmap.mmap(-1, limit + 1)))
        return
    text = b"\x92\xa5Hello\xdb" + struct.pack(">I", limit)
    frame = framed(codec, text + b"a" * (limit + 1 - len(text)))
    frame = frame[: limit + 1] if not isinstance(codec, SealedCodec) else framed(codec, frame[PREFIX_BYTES:])
    with pytest.raises(WireError, match="exceeds the limit"):
        codec.decode(frame)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_an_endpoint_survives_liars_and_gives_every_request_its_end(seed: int) -> None:
    fuzz_endpoint(seed)
