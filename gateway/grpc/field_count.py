"""Counts the fields of a long message before it is parsed: while protobuf parses a message, nothing else runs."""

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError

from baton.errors import InvalidRequest
from gateway.turn_budget import TurnBudget

MAX_FIELDS = 2**18
"""A message has at most this many fields, those of its parts included; parsing them takes some 20 ms. A message with
fewer bytes has fewer fields."""
FIELDS_PER_TURN = 2**10


async def check_num_fields(body: bytes, kind: Descriptor) -> None:
    """Raises InvalidRequest if a message of this kind has too many fields. Lets other tasks run in between.

    Packed numbers, such as the ids of a prompt, are one field. Raises DecodeError where no field can be read.
    Also raises DecodeError at a group: proto3 has no groups, and protobuf would skip the fields within an
    unknown group, which this function would count.
    """
    if len(body) <= MAX_FIELDS:
        return
    budget, num_fields = TurnBudget(), 0
    at, end = 0, len(body)
    outer: list[tuple[Descriptor, int]] = []  # the messages around the present one, each with its end
    try:
        while True:
            while at >= end:
                if not outer:
                    return
                kind, end = outer.pop()
            num_fields += 1
            if num_fields > MAX_FIELDS:
                raise InvalidRequest("request", f"the message has more than {MAX_FIELDS} fields; send fewer")
            if num_fields % FIELDS_PER_TURN == 0:
                await budget.pause_if_spent()
            tag, at = _varint(body, at)
            match tag & 7:
                case 0:
                    _, at = _varint(body, at)
                case 1:
                    at += 8
                case 2:
                    size, at = _varint(body, at)
                    field = kind.fields_by_number.get(tag >> 3)
                    if field is None or field.message_type is None:
                        at += size
                    else:
                        outer.append((kind, end))
                        kind, end = field.message_type, at + size
                case 5:
                    at += 4
                case _:
                    raise DecodeError(f"wire type {tag & 7}")
    except IndexError:
        raise DecodeError("the message ends within a field, or a number is too long") from None


def _varint(body: bytes, at: int) -> tuple[int, int]:
    """The number that begins at `at`, and where it ends. Raises IndexError if it has more than 64 bits."""
    if (value := body[at]) < 0x80:
        return value, at + 1
    value &= 0x7F
    for shift in range(7, 64, 7):
        at += 1
        byte = body[at]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at + 1
    raise IndexError(at)
