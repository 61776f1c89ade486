"""Streams: the order of events is that of Anthropic's documentation, and joined they are the whole answer."""

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pytest
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import Message as PackageMessage
from anthropic.types import RawMessageStreamEvent
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from gateway.conversation import AnswerEvent, ArgumentsDelta, CallBegins, CallEnds, Reasoning, Text
from gateway.http.anthropic.answers import (
    Message,
    MessageEnd,
    MessageTokensDetails,
    MessageUsage,
    StreamEvent,
)
from gateway.http.anthropic.content import ContentBlocks
from gateway.http.anthropic.events import EventWriter
from gateway.http.anthropic.whole import CollectedMessage, MessageHead

PACKAGE_EVENT = TypeAdapter[Any](RawMessageStreamEvent)
OUR_EVENT = TypeAdapter[Any](StreamEvent)

HEAD = MessageHead("r-1", "tiny")
AT_FIRST = MessageUsage(25, 0, 0, 0, MessageTokensDetails(0))
AT_THE_END = MessageUsage(5, 0, 20, 15, MessageTokensDetails(6))
END_TURN = MessageEnd("end_turn", None)

DELTA = "content_block_delta"
BASIC = (
    "message_start", "content_block_start text", "ping", f"{DELTA} text_delta", "content_block_stop", "message_delta",
    "message_stop",
)  # fmt: skip
TOOL_USE = (
    "message_start", "content_block_start text", "ping", f"{DELTA} text_delta", "content_block_stop",
    "content_block_start tool_use", f"{DELTA} input_json_delta", "content_block_stop", "message_delta", "message_stop",
)  # fmt: skip
THINKING = (
    "message_start", "content_block_start thinking", "ping", f"{DELTA} thinking_delta", f"{DELTA} signature_delta",
    "content_block_stop", "content_block_start text", f"{DELTA} text_delta", "content_block_stop", "message_delta",
    "message_stop",
)  # fmt: skip
"""Orders in "Streaming messages" of Anthropic's documentation (https://platform.claude.com/docs), deltas of one kind as
one. Pings may come anywhere; its examples have one behind the first content_block_start."""

SAID: list[AnswerEvent] = [Text("Hello"), Text("!")]
THOUGHT: list[AnswerEvent] = [Reasoning("Let me "), Reasoning("think")]
CALLED: list[AnswerEvent] = [
    CallBegins(0, "get_weather"),
    ArgumentsDelta(0, '{"location": "San'),
    ArgumentsDelta(0, ' Francisco"}'),
    CallEnds(0),
]


def stream_of(
    cut: Iterable[Sequence[AnswerEvent]], stop: MessageEnd = END_TURN, shows_thinking: bool = True
) -> bytes:
    """A stream to which events come in these portions."""
    writer, blocks = EventWriter(HEAD), ContentBlocks(shows_thinking)
    parts = [writer.opening(AT_FIRST), *(writer.steps(blocks.on_events(portion)) for portion in cut)]
    return b"".join([*parts, writer.steps(blocks.end()), writer.closing(stop, AT_THE_END)])


def whole_of(
    events: Sequence[AnswerEvent], stop: MessageEnd = END_TURN, shows_thinking: bool = True
) -> dict[str, Any]:
    blocks, message = ContentBlocks(shows_thinking), CollectedMessage()
    message.on_steps(blocks.on_events(events))
    parsed: dict[str, Any] = json.loads("".join(message.write(HEAD, stop, AT_THE_END)))
    return parsed


DEEP = f'{{"a": {"[" * 300}{"]" * 300}}}'
"""Deeper than pydantic reads."""


@pytest.mark.parametrize(
    ("arguments", "written"),
    [
        ('{"a": 1e400, "b": "ü"}', '{"a": 1e400, "b": "ü"}'),
        ('{"a": 1e400, "b": ["x"], "c": "y', '{"a": 1e400, "b": ["x"]}'),
        (DEEP, DEEP),
        ('["x"]', "{}"),
        ("", "{}"),
    ],
)
def test_the_input_of_a_whole_call_is_as_it_was_written(arguments: str, written: str) -> None:
    blocks, message = ContentBlocks(True), CollectedMessage()
    message.on_steps(blocks.on_events([CallBegins(0, "f"), ArgumentsDelta(0, arguments), CallEnds(0)]))
    whole = "".join(message.write(HEAD, MessageEnd("tool_use", None), AT_THE_END))
    assert f'"input":{written}}}' in whole


def read(stream: bytes) -> Iterator[dict[str, Any]]:
    assert stream.isascii()
    for event in stream.decode().removesuffix("\n\n").split("\n\n"):
        name, data = event.split("\n")
        parsed = json.loads(data.removeprefix("data: "))
        assert name == f"event: {parsed['type']}"
        yield parsed


def order_of(stream: bytes) -> list[str]:
    """Types of events, deltas of one kind in a row as one."""
    order: list[str] = []
    for event in read(stream):
        inner = event.get("content_block") or (event["type"] == DELTA and event["delta"])
        name = f"{event['type']} {inner['type']}" if inner else event["type"]
        if order[-1:] != [name] or not name.startswith(DELTA):
            order.append(name)
    return order


def accumulated(stream: bytes) -> dict[str, Any]:
    """The message that the `anthropic` package makes of a stream."""
    message: Any = None
    buffers: dict[int, bytes] = {}
    for event in read(stream):
        if event["type"] != "ping":
            typed = PACKAGE_EVENT.validate_python(event)
            message = accumulate_event(event=typed, current_snapshot=message, json_bufs=buffers)
    made: dict[str, Any] = message.to_dict()
    assert made.pop("stop_details") is None, "the package adds it"
    return made


@pytest.mark.parametrize(
    ("events", "order"),
    [(SAID, BASIC), (SAID + CALLED, TOOL_USE), (THOUGHT + SAID, THINKING)],
    ids=["text", "a call", "thinking"],
)
def test_the_order_is_that_of_the_documentation(events: list[AnswerEvent], order: tuple[str, ...]) -> None:
    assert order_of(stream_of([event] for event in events)) == list(order)


def test_every_event_is_as_it_is_described() -> None:
    events = [*THOUGHT, *SAID, *CALLED]
    for event in read(stream_of([events], MessageEnd("stop_sequence", "é"))):
        OUR_EVENT.validate_json(json.dumps(event), strict=True, extra="forbid")
    TypeAdapter(Message).validate_python(whole_of(events), extra="forbid")


def test_two_calls_are_two_blocks_with_ids_of_their_own() -> None:
    second: list[AnswerEvent] = [CallBegins(1, "get_time"), CallEnds(1)]
    content = whole_of([*CALLED, *second])["content"]
    assert [block["name"] for block in content] == ["get_weather", "get_time"]
    assert [block["input"] for block in content] == [{"location": "San Francisco"}, {}]
    assert len({block["id"] for block in content}) == 2
    assert all(block["id"].startswith("toolu_") for block in content)


def test_thinking_that_is_left_out_is_a_block_without_text() -> None:
    stream = stream_of([THOUGHT + SAID], shows_thinking=False)
    assert f"{DELTA} thinking_delta" not in order_of(stream)
    assert f"{DELTA} signature_delta" in order_of(stream)
    content = whole_of(THOUGHT + SAID, shows_thinking=False)["content"]
    assert content[0] == {"type": "thinking", "thinking": "", "signature": ""}
    assert accumulated(stream)["content"] == content


def test_an_answer_without_anything_is_a_message_without_content() -> None:
    assert order_of(stream_of([])) == ["message_start", "message_delta", "message_stop"]
    assert whole_of([])["content"] == []


@pytest.mark.parametrize(
    "arguments", ['{"a": [1, {"b": "tru', '{"a": "x', '{"a', '{"a": tr', "", "{", '{"a": -']
)
def test_a_call_that_was_cut_off_has_what_is_whole_of_its_input(arguments: str) -> None:
    events: list[AnswerEvent] = [CallBegins(0, "f"), ArgumentsDelta(0, arguments)]
    stop = MessageEnd("max_tokens", None)
    assert whole_of(events, stop)["content"] == accumulated(stream_of([events], stop))["content"]


@pytest.mark.parametrize("arguments", ["[1]", "1", '{"a": NaN}', "{a: 1}", '"{}"'])
def test_a_call_whose_arguments_are_no_object_has_no_input(arguments: str) -> None:
    """Such arguments come only from a model that no grammar guides."""
    (call,) = whole_of([CallBegins(0, "f"), ArgumentsDelta(0, arguments), CallEnds(0)])["content"]
    assert call["input"] == {}


JSON = st.dictionaries(
    st.text(max_size=4), st.text(max_size=8) | st.integers(-9, 9) | st.lists(st.booleans())
)


@st.composite
def answers(draw: st.DrawFn) -> list[AnswerEvent]:
    """Any answer, its pieces cut anywhere, ended anywhere."""
    events: list[AnswerEvent] = []
    num_calls = 0
    for kind in draw(st.lists(st.sampled_from("trc"), max_size=5)):
        text = (
            json.dumps(draw(JSON), ensure_ascii=draw(st.booleans()))
            if kind == "c"
            else draw(st.text(min_size=1))
        )
        at = draw(st.integers(0, len(text)))
        pieces = [piece for piece in (text[:at], text[at:]) if piece]
        match kind:
            case "t":
                events += map(Text, pieces)
            case "r":
                events += map(Reasoning, pieces)
            case "c":
                events.append(CallBegins(num_calls, "f"))
                events += [ArgumentsDelta(num_calls, piece) for piece in pieces]
                events.append(CallEnds(num_calls))
                num_calls += 1
    return events[: draw(st.integers(0, len(events)))] if draw(st.booleans()) else events


@given(
    answers(),
    st.booleans(),
    st.sampled_from([END_TURN, MessageEnd("stop_sequence", "\u2028"), MessageEnd("tool_use", None)]),
)
def test_a_stream_adds_up_to_the_whole_answer(
    events: list[AnswerEvent], shows_thinking: bool, stop: MessageEnd
) -> None:
    """The `anthropic` package adds up the stream, and its types check the answer."""
    whole = whole_of(events, stop, shows_thinking)
    PackageMessage.model_validate(whole, strict=True)
    assert accumulated(stream_of(([event] for event in events), stop, shows_thinking)) == whole
    assert accumulated(stream_of([events], stop, shows_thinking)) == whole
