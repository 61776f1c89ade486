"""JSON in pieces: what it says is what one piece would say, and others run while it is written."""

import json
from collections.abc import Iterator

import pytest
from pydantic_core import to_json
from starlette.types import Message

from gateway.http.whole_json import (
    PIECE_CHARACTERS,
    WRITE_CHARACTERS,
    in_ascii,
    send_json,
    string_pieces,
)
from gateway.turn_budget import TURN_S
from tests.factories.answers import WorkClock

TEXT = 'é "\\\n\x00\x1f\x7f\u2028\U0001f600' * PIECE_CHARACTERS


def sent(pieces: Iterator[str], clock: WorkClock | None = None) -> list[Message]:
    messages: list[Message] = []

    async def send(message: Message) -> None:
        messages.append(message)

    (clock or WorkClock()).run(send_json(pieces, send))
    return messages


@pytest.mark.parametrize("length", [0, 1, PIECE_CHARACTERS, PIECE_CHARACTERS + 1, len(TEXT)])
def test_a_string_in_pieces_is_the_string(length: int) -> None:
    text = TEXT[:length]
    assert f'"{"".join(string_pieces(text))}"'.encode() == to_json(text)


def test_a_pieces_length_is_bounded() -> None:
    assert max(map(len, string_pieces("\x00" * len(TEXT)))) == PIECE_CHARACTERS * len("\\u0000")


def test_ascii_json_has_the_same_meaning() -> None:
    written = json.dumps(TEXT[:100], ensure_ascii=False)
    assert in_ascii(written).isascii()
    assert json.loads(in_ascii(written)) == TEXT[:100]
    assert in_ascii("plain") == "plain"


def test_a_short_answer_goes_out_at_once_and_says_how_long_it_is() -> None:
    start, body = sent(iter(['{"a":', '"é"}']))
    assert (start["status"], dict(start["headers"])) == (
        200,
        {b"content-length": b"10", b"content-type": b"application/json"},
    )
    assert body == {"type": "http.response.body", "body": '{"a":"é"}'.encode()}


def test_a_long_answer_goes_out_in_parts_and_others_run_in_between() -> None:
    clock = WorkClock()

    def pieces() -> Iterator[str]:
        for _ in range(3 * WRITE_CHARACTERS // 1000):
            clock.work(TURN_S / 10)
            yield "x" * 1000

    start, *parts = sent(pieces(), clock)
    assert dict(start["headers"]) == {b"content-type": b"application/json"}
    assert b"".join(part["body"] for part in parts) == b"x" * (3 * WRITE_CHARACTERS // 1000 * 1000)
    assert [part.get("more_body", False) for part in parts] == [True] * (len(parts) - 1) + [False]
    assert max(len(part["body"]) for part in parts) <= WRITE_CHARACTERS + 1000
    assert clock.longest_turn_s < 1.2 * TURN_S
