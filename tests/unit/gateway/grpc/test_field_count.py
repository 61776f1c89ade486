"""Messages with very many fields are refused before protobuf parses them, and so are malformed ones."""

import asyncio

import pytest
from google.protobuf.message import DecodeError

from baton.errors import InvalidRequest
from baton.v1 import generation_service_pb2 as pb
from baton.v1 import sampling_pb2
from gateway.grpc.field_count import MAX_FIELDS, check_num_fields

KIND = pb.GenerateRequest.DESCRIPTOR
LONG = "x" * (MAX_FIELDS + 1)
TURN = pb.Chat.Message(role="user", content="x" * 300)
"""Has three fields: itself and two others."""


def number(value: int) -> bytes:
    """A varint."""
    return bytes([value & 0x7F | 0x80]) + number(value >> 7) if value >= 0x80 else bytes([value])


def field(tag: int, content: bytes) -> bytes:
    return number(tag << 3 | 2) + number(len(content)) + content


MANY: dict[str, bytes] = {
    "empty messages": field(4, field(1, b"") * MAX_FIELDS),
    "messages with fields": pb.GenerateRequest(
        chat=pb.Chat(messages=[TURN] * (MAX_FIELDS // 3 + 1))
    ).SerializeToString(),
    "calls of one message": field(4, field(1, field(4, field(1, b"x")) * (MAX_FIELDS // 2))),
    "entries of a map": field(5, field(10, b"") * MAX_FIELDS),
    "numbers that are not packed": field(3, b"\x08\x01" * MAX_FIELDS),
    "unknown fields": b"\xf8\x01\x01" * (MAX_FIELDS + 1),
    "unknown fixed numbers": b"\xf9\x01" * 5 + (b"\xfd\x01" + b"\xf5" * 4) * (MAX_FIELDS + 1),
}


@pytest.mark.parametrize("name", MANY)
async def test_too_many_fields_are_refused(name: str) -> None:
    with pytest.raises(InvalidRequest, match=f"request: the message has more than {MAX_FIELDS} fields"):
        await check_num_fields(MANY[name], KIND)


FEW: dict[str, pb.GenerateRequest] = {
    "a long text": pb.GenerateRequest(text=LONG),
    "many ids": pb.GenerateRequest(token_ids=pb.TokenIds(ids=[2**31] * MAX_FIELDS)),
    "long messages": pb.GenerateRequest(
        chat=pb.Chat(messages=[pb.Chat.Message(role="user", content="\x0a\x00" * 2000)] * 1000),
        sampling_params=sampling_pb2.SamplingParams(stop=["x", "y"], logit_bias={1: 2.0}, seed=2**63),
        priority=-1,
    ),
}


@pytest.mark.parametrize("name", FEW)
async def test_all_others_are_accepted(name: str) -> None:
    await check_num_fields(FEW[name].SerializeToString(), KIND)


MALFORMED = {
    "a key that is too long": b"\xff" * MAX_FIELDS,
    "a number that is too long": b"\x08" + b"\xff" * 20,
    "a message beyond the end": b"\x22\xff\xff\xff\x7f",
    "no length": b"\x12",
    "an unknown wire type": b"\x0e",
    "the end of a group": b"\xfc\x01",
}


@pytest.mark.parametrize("name", MALFORMED)
async def test_malformed_bytes_are_refused(name: str) -> None:
    body = FEW["a long text"].SerializeToString() + MALFORMED[name]
    with pytest.raises(DecodeError):
        pb.GenerateRequest.FromString(body)
    with pytest.raises(DecodeError):
        await check_num_fields(body, KIND)


async def test_nothing_hides_behind_a_group() -> None:
    group = b"\xfb\x01" + field(4, b"\xff" * 11) + b"\xfc\x01"
    with pytest.raises(DecodeError, match="wire type 3"):
        await check_num_fields(group + MANY["empty messages"], KIND)


async def test_other_tasks_run_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.turn_budget.TURN_S", 0.0)
    num_turns = 0

    async def count() -> None:
        nonlocal num_turns
        while True:
            num_turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    body = pb.GenerateRequest(chat=pb.Chat(messages=[TURN] * (MAX_FIELDS // 4))).SerializeToString()
    await check_num_fields(body, KIND)
    counting.cancel()
    assert num_turns > 10
