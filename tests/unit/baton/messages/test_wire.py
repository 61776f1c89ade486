"""The codec: what goes in comes out, and what is not ours is refused with its reason."""

from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import WireError
from baton.kv import KVTransferParams, TransferRole, WorkerRef
from baton.messages.request_plane import TO_GATEWAY, TO_WORKER, Hello, Outputs, SubmitRequest
from baton.messages.wire import Codec
from baton.request import EngineRequest, FinishReason, RequestOutput, StageTimes, TokenLogprobs
from baton.sampling import SamplingParams


class Colour(Enum):
    RED = "red"


@dataclass(frozen=True, slots=True)
class Inner:
    number: int


@dataclass(frozen=True, slots=True)
class Other:
    number: int
    """Alike on the wire, but for its name."""


@dataclass(frozen=True, slots=True)
class Everything:
    text: str
    share: float
    blob: bytes
    maybe: Inner | None
    pairs: tuple[tuple[int, float], ...]
    names: frozenset[str]
    table: dict[str, int]
    colour: Colour
    either: tuple[Inner | Other, ...]
    either_or_none: Inner | Other | None
    by_name: dict[str, Inner]
    opaque: Any = None


@dataclass(frozen=True, slots=True)
class Either:
    value: Inner | Other


CODEC: Codec[Everything] = Codec(Everything, max_bytes=10_000)

everything = st.builds(
    Everything,
    text=st.text(max_size=20),
    share=st.floats(allow_nan=False),
    blob=st.binary(max_size=20),
    maybe=st.none() | st.builds(Inner, st.integers(-(2**63), 2**63 - 1)),
    pairs=st.lists(st.tuples(st.integers(0, 9), st.floats(allow_nan=False)), max_size=4).map(tuple),
    names=st.frozensets(st.text(max_size=5), max_size=4),
    table=st.dictionaries(st.text(max_size=5), st.integers(0, 99), max_size=4),
    colour=st.sampled_from(Colour),
    either=st.lists(st.builds(Inner, st.integers(0, 9)) | st.builds(Other, st.integers(0, 9))).map(tuple),
    either_or_none=st.none() | st.builds(Other, st.integers(0, 9)),
    by_name=st.dictionaries(st.text(max_size=5), st.builds(Inner, st.integers(0, 9)), max_size=4),
)


@given(everything)
def test_round_trip(message: Everything) -> None:
    assert CODEC.decode(CODEC.encode(message)) == message


@given(st.binary(max_size=200))
def test_arbitrary_bytes_only_ever_raise_wire_error(data: bytes) -> None:
    with pytest.raises(WireError):
        CODEC.decode(data)


@given(everything, st.data())
def test_a_flipped_byte_never_raises_anything_else(message: Everything, data: st.DataObject) -> None:
    encoded = bytearray(CODEC.encode(message))
    at = data.draw(st.integers(0, len(encoded) - 1))
    encoded[at] ^= data.draw(st.integers(1, 255))
    try:
        decoded = CODEC.decode(bytes(encoded))
    except WireError:
        return
    assert isinstance(decoded, Everything)


def test_request_plane_messages_survive_the_wire() -> None:
    request = EngineRequest(
        request_id="r",
        prompt_token_ids=(1, 2, 3),
        sampling_params=SamplingParams(logit_bias={7: -1.5}, stop=("x",), seed=2**62, logprobs=2),
        timeout_s=1.5,
        kv_transfer=KVTransferParams(
            TransferRole.PRODUCER, "t", 0, WorkerRef("d0", "i", ("tcp://127.0.0.1:1",), 16)
        ),
    )
    assert TO_WORKER.decode(TO_WORKER.encode(SubmitRequest(request, 1))) == SubmitRequest(request, 1)
    output = RequestOutput(
        request_id="r",
        first_position=0,
        token_ids=(5,),
        logprobs=(TokenLogprobs(5, -0.5, 1, ((5, -0.5), (6, -1.0))),),
        finish_reason=FinishReason.HANDED_OVER,
        num_cached_tokens=2,
        num_draft_tokens=4,
        num_accepted_draft_tokens=3,
        stage_times=StageTimes(queue_s=0.1),
    )
    assert TO_GATEWAY.decode(TO_GATEWAY.encode(Outputs((output,)))) == Outputs((output,))


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (msgpack.packb(["Nobody"]), "unknown message kind 'Nobody'"),
        (msgpack.packb(["Hello"]), "Hello: expected 6 fields"),
        (msgpack.packb(["Hello", 2, 5, "g", 1, 1, 0]), "Hello.incarnation: expected str, got 5"),
        (msgpack.packb(["Hello", 2, None, "g", 1, None, 0]), "Hello.incarnation: expected str, got None"),
        (msgpack.packb(["AbortRequests", [1], 1]), "AbortRequests.request_ids: expected str, got 1"),
        (msgpack.packb(["SubmitRequest", [], 1]), "SubmitRequest.request: expected 12 fields"),
        (msgpack.packb({"kind": "Hello"}), "expected an array"),
        (b"\xdd\xff\xff\xff\xff", "not msgpack"),
        (b"", "not msgpack"),
    ],
)
def test_a_refusal_names_what_is_wrong_and_where(data: bytes, complaint: str) -> None:
    with pytest.raises(WireError, match=complaint.replace("(", r"\(")):
        TO_WORKER.decode(data)


def test_a_value_that_contradicts_itself_is_a_wire_error() -> None:
    good = EngineRequest(request_id="r", prompt_token_ids=(1,), sampling_params=SamplingParams())
    parts = msgpack.unpackb(TO_WORKER.encode(SubmitRequest(good, 1)))
    parts[1][2][0] = 0  # sampling_params.max_tokens
    with pytest.raises(
        WireError, match=r"SubmitRequest.request.sampling_params: max_tokens: must be at least 1"
    ):
        TO_WORKER.decode(msgpack.packb(parts))


def test_what_is_opaque_does_not_travel() -> None:
    message = Everything("", 0.0, b"", None, (), frozenset(), {}, Colour.RED, (), None, {}, opaque=Inner(1))
    with pytest.raises(WireError, match="must be null, got Inner"):
        CODEC.encode(message)
    parts = msgpack.unpackb(CODEC.encode(replace(message, opaque=None)))
    with pytest.raises(WireError, match=r"Everything.opaque: must be null, got 7"):
        CODEC.decode(msgpack.packb([*parts[:-1], 7]))


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        (["Colour", 1], r"Either.value: expected one of \['Inner', 'Other'\], got 'Colour'"),
        ([1, 1], r"Either.value: expected one of \['Inner', 'Other'\], got 1"),
        ([], "Either.value: expected one of .*, got list"),
        (None, "Either.value: expected one of .*, got None"),
        (["Inner", "1"], "Either.value.Inner.number: expected int, got '1'"),
        (["Inner"], "Either.value.Inner: expected 1 fields"),
    ],
)
def test_one_of_several_dataclasses_is_recognized_by_its_name(value: object, complaint: str) -> None:
    codec: Codec[Either] = Codec(Either)
    with pytest.raises(WireError, match=complaint):
        codec.decode(msgpack.packb(["Either", value]))


def test_a_bool_is_not_an_int() -> None:
    codec: Codec[Inner] = Codec(Inner)
    with pytest.raises(WireError, match="expected int, got True"):
        codec.decode(msgpack.packb(["Inner", True]))


def test_size_limits_hold_on_both_ends() -> None:
    codec: Codec[Hello] = Codec(Hello, max_bytes=64)
    with pytest.raises(WireError, match="exceeds the limit of 64"):
        codec.encode(Hello("x" * 64, "g", 1, None, 0))
    with pytest.raises(WireError, match="exceeds the limit of 64"):
        codec.decode(b"x" * 65)


class Level(Enum):
    LOW = 1


@dataclass(frozen=True, slots=True)
class Usual:
    size: int = 0
    share: float = 0.0
    is_new: bool = False
    level: Level = Level.LOW
    maybe: Inner | None = None


USUAL: Codec[Usual] = Codec(Usual)


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ([False, 0.0, False, 1, None], "size: expected int, got False"),
        ([None, 0.0, False, 1, None], "size: expected int, got None"),
        ([0, False, False, 1, None], "share: expected float, got False"),
        ([0, 0.0, 0, 1, None], "is_new: expected bool, got 0"),
        ([0, 0.0, False, True, None], "level: expected one of .1., got True"),
        ([0, 0.0, False, [1], None], "level: expected one of .1., got list"),
        ([0, 0.0, False, 1, False], "maybe: expected 1 fields, got False"),
    ],
)
def test_a_value_that_only_equals_the_default_is_refused(values: list[Any], complaint: str) -> None:
    with pytest.raises(WireError, match=complaint):
        USUAL.decode(msgpack.packb(["Usual", *values]))


def test_a_whole_number_may_be_the_default_of_a_share() -> None:
    decoded = USUAL.decode(msgpack.packb(["Usual", 0, 0, False, 1, None]))
    assert decoded == Usual()
    assert type(decoded.share) is float
