"""A stream's events: the orders that OpenAI documents, objects that the `openai` package validates, nothing lost."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from baton.request import TokenLogprobs
from baton.sampling import SamplingParams
from gateway.conversation import AnswerEvent, ArgumentsDelta, CallBegins, CallEnds, Reasoning, Text
from gateway.http.openai.logprobs import ChatTokens
from gateway.http.responses.answers import IncompleteDetails, ResponseError, ResponseObject
from gateway.http.responses.create_request import ResponseRequest
from gateway.http.responses.events import ResponseEvents
from gateway.http.responses.output import ResponseOutput
from gateway.http.responses.response_json import ResponseJson, ResponseState, usage_of
from gateway.text import Tokenizer

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
SHAPE = TypeAdapter(ResponseObject)
DONE = ResponseState(status="completed", completed_at=8, usage=usage_of(5, 3, 2, 1))
BODY = ResponseRequest.model_validate(
    {
        "model": "tiny",
        "input": "Hi",
        "instructions": "Be \u2028 brief",
        "tools": [{"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": True}],
        "tool_choice": {"type": "function", "name": "look"},
        "text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}},
        "reasoning": {"effort": "low", "summary": "auto"},
        "metadata": {"a": "b"},
    }
)

MESSAGE = [
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
]
REASONING = [name.replace("output_text", "reasoning_text") for name in MESSAGE]
CALL = [
    "response.output_item.added",
    "response.function_call_arguments.delta",
    "response.function_call_arguments.done",
    "response.output_item.done",
]
TEXT: list[AnswerEvent] = [Text("Hel"), Text("lo \u2028\u20ac")]
CALLS: list[AnswerEvent] = [
    CallBegins(0, "look"),
    ArgumentsDelta(0, '{"a"'),
    ArgumentsDelta(0, ":1}"),
    CallEnds(0),
]


def response(**fields: Any) -> ResponseJson:
    return ResponseJson(BODY.model_copy(update=fields), SamplingParams(), "resp_r", 7, is_stored=True)


def streamed(
    answer: Iterable[AnswerEvent], state: ResponseState = DONE, *, is_cut: bool = False
) -> list[dict[str, Any]]:
    """Each answer's event by itself; the events as a client reads them."""
    output, events = ResponseOutput("r", None), ResponseEvents(response())
    pieces = [*events.opening()]
    for each in answer:
        pieces += events.of(output.on_events([each]))
    pieces += events.of(output.end(is_cut))
    pieces += events.ending(state, output.items)
    text = "".join(pieces)
    assert text.isascii()
    assert text.endswith("\n\n")
    read = []
    for event in text.removesuffix("\n\n").split("\n\n"):
        name, data = event.split("\n")
        value = json.loads(data.removeprefix("data: "))
        assert name == f"event: {value['type']}"
        read.append(value)
    assert [event["sequence_number"] for event in read] == list(range(len(read)))
    for value in read:
        EVENT.validate_python(value)
    return read


def names(events: Sequence[dict[str, Any]]) -> list[str]:
    """Without repetitions, since a text may have any number of deltas."""
    found = [event["type"] for event in events]
    return [name for before, name in zip([None, *found], found, strict=False) if name != before]


@pytest.mark.parametrize(
    ("answer", "order"),
    [
        (TEXT, MESSAGE),
        ([], [name for name in MESSAGE if not name.endswith("delta")]),
        ([Reasoning("Hm"), *TEXT], [*REASONING, *MESSAGE]),
        (CALLS, CALL),
        (
            [*TEXT, *CALLS, CallBegins(1, "look"), ArgumentsDelta(1, "{}"), CallEnds(1)],
            [*MESSAGE, *CALL, *CALL],
        ),
        ([Reasoning("Hm"), *CALLS], [*REASONING, *CALL]),
    ],
    ids=["text", "nothing", "reasoning", "a call", "text and calls", "reasoning and a call"],
)
def test_the_order_is_the_documented_one(answer: list[AnswerEvent], order: list[str]) -> None:
    events = streamed(answer)
    assert names(events) == ["response.created", "response.in_progress", *order, "response.completed"]
    output = events[-1]["response"]["output"]
    assert [item["status"] for item in output] == ["completed"] * len(output)


def test_what_is_done_is_what_the_deltas_said() -> None:
    events = streamed([Reasoning("Hm"), Reasoning("m"), *TEXT, *CALLS])
    rs, msg, fc = events[-1]["response"]["output"]
    deltas: dict[str, str] = {}
    for event in events:
        if event["type"].endswith(".delta"):
            deltas[event["item_id"]] = deltas.get(event["item_id"], "") + event["delta"]
    assert deltas == {
        rs["id"]: rs["content"][0]["text"],
        msg["id"]: msg["content"][0]["text"],
        fc["id"]: fc["arguments"],
    }
    assert (msg["content"][0]["text"], fc["arguments"]) == ("Hello \u2028\u20ac", '{"a":1}')
    have_logprobs = {event["type"] for event in events if "logprobs" in event}
    assert have_logprobs == {"response.output_text.delta", "response.output_text.done"}
    done = {
        event["item"]["id"]: event["item"] for event in events if event["type"] == "response.output_item.done"
    }
    assert list(done.values()) == [rs, msg, fc]
    assert fc["call_id"].startswith("call_")
    begun = [event["item"] for event in events if event["type"] == "response.output_item.added"]
    assert [item["status"] for item in begun] == ["in_progress"] * 3
    assert (begun[0]["content"], begun[1]["content"], begun[2]["arguments"]) == ([], [], "")


def test_a_response_repeats_what_the_request_asked_for() -> None:
    asked = {
        "instructions": "Be brief",
        "previous_response_id": "resp_q",
        "parallel_tool_calls": False,
        "max_output_tokens": 5,
        "max_tool_calls": 2,
        "top_logprobs": 3,
        "reasoning": {"effort": "low", "summary": "auto"},
        "truncation": "auto",
        "metadata": {"a": "b"},
        "user": "u",
        "safety_identifier": "s",
        "prompt_cache_key": "k",
    }
    needed = {"model": "tiny", "input": "Hi", "include": ["message.output_text.logprobs"]}
    body = ResponseRequest.model_validate(needed | asked)
    written = ResponseJson(body, SamplingParams(), "resp_r", 7, is_stored=True).pieces(DONE, ())
    response_json = json.loads("".join(written))
    assert {name: response_json[name] for name in asked} == asked


def test_an_answer_that_is_cut_off_is_incomplete() -> None:
    cut = ResponseState("incomplete", incomplete_details=IncompleteDetails("max_output_tokens"))
    events = streamed([*TEXT, CallBegins(0, "look"), ArgumentsDelta(0, '{"a')], cut, is_cut=True)
    assert events[-1]["type"] == "response.incomplete"
    assert events[-1]["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [item["status"] for item in events[-1]["response"]["output"]] == ["completed", "incomplete"]
    events = streamed([], cut, is_cut=True)
    assert events[-1]["response"]["output"] == []


def test_a_call_that_the_model_did_not_end_is_incomplete() -> None:
    events = streamed([CallBegins(0, "look"), ArgumentsDelta(0, '{"a')])
    assert events[-1]["response"]["output"][0]["status"] == "incomplete"


def test_a_failure_is_the_last_event_and_says_why() -> None:
    failed = ResponseState("failed", error=ResponseError("server_error", "gone"))
    events = streamed(TEXT, failed, is_cut=True)
    assert names(events)[-1] == "response.failed"
    assert events[-1]["response"]["error"] == {"code": "server_error", "message": "gone"}
    assert events[-1]["response"]["status"] == "failed"


def test_every_response_is_one_of_the_package_and_of_the_description() -> None:
    for event in streamed([Reasoning("Hm"), *TEXT, *CALLS]):
        if "response" in event:
            SHAPE.validate_json(json.dumps(event["response"]), strict=True)
            shown = Response.model_validate(event["response"])
            assert shown.tools[0].type == "function"
            assert not shown.model_extra or set(shown.model_extra) == {"store"}


def test_each_message_of_a_delta_has_its_own_log_probabilities(tokenizer: Tokenizer) -> None:
    output = ResponseOutput("r", ChatTokens(tokenizer))
    tokens = [(number, TokenLogprobs(5 + number, -1.0, 1, ())) for number in (0, 0, 1)]
    list(output.on_events([Text("a"), *CALLS, Text("b")], tokens))
    list(output.end(is_cut=False))
    messages = [json.loads("".join(item.json())) for item in (output.items[0], output.items[-1])]
    parts = [message["content"][0] for message in messages]
    assert [(part["text"], len(part["logprobs"])) for part in parts] == [("a", 2), ("b", 1)]


def test_log_probabilities_that_come_after_their_message_are_added_to_it(tokenizer: Tokenizer) -> None:
    """The text of a long piece may come before its tokens."""
    output = ResponseOutput("r", ChatTokens(tokenizer))
    tokens = [(number, TokenLogprobs(5 + number, -1.0, 1, ())) for number in (0, 0, 0, 1, 1)]
    list(output.on_events([Text("a"), *CALLS, Text("b")], tokens[:1]))
    list(output.on_events([], tokens[1:4]))
    list(output.on_events([Text("b"), *CALLS], tokens[4:]))
    list(output.end(is_cut=False))
    messages = [
        json.loads("".join(item.json())) for item in output.items if "logprobs" in "".join(item.json())
    ]
    shown = [[entry["logprob"] for entry in message["content"][0]["logprobs"]] for message in messages]
    assert list(map(len, shown)) == [3, 2]


@pytest.mark.parametrize("is_cut", [False, True])
def test_log_probabilities_of_an_answer_without_a_message_are_left_out(
    tokenizer: Tokenizer, is_cut: bool
) -> None:
    """The model ended after its reasoning. Its end-of-sequence token comes before the first message, so it has the
    message number -1."""
    output = ResponseOutput("r", ChatTokens(tokenizer))
    list(output.on_events([Reasoning("Hm")], [(-1, TokenLogprobs(5, -1.0, 1, ()))]))
    list(output.end(is_cut))
    assert [json.loads("".join(item.json()))["type"] for item in output.items] == ["reasoning"]


def test_log_probabilities_are_the_texts_and_all_of_them(tokenizer: Tokenizer) -> None:
    """If the text of a token is held back, its log-probabilities come with the next text, or at the end."""
    output, events = ResponseOutput("r", ChatTokens(tokenizer)), ResponseEvents(response())
    tokens = [
        (0, TokenLogprobs(token_id, -float(token_id), 1, ((token_id, -1.0),))) for token_id in range(5, 9)
    ]
    pieces = [
        *events.of(output.on_events([], tokens[:1])),
        *events.of(output.on_events([Text("ab")], tokens[1:3])),
    ]
    pieces += events.of(output.on_events([], tokens[3:]))
    pieces += events.of(output.end(is_cut=False))
    read = [
        json.loads(line.removeprefix("data: ")) for line in "".join(pieces).split("\n") if "data:" in line
    ]
    deltas = [
        token["logprob"]
        for event in read
        if event["type"] == "response.output_text.delta"
        for token in event["logprobs"]
    ]
    (done,) = [event for event in read if event["type"] == "response.output_text.done"]
    part = read[-1]["item"]["content"][0]
    assert deltas == [-5.0, -6.0, -7.0, -8.0]
    assert [token["logprob"] for token in done["logprobs"]] == deltas
    assert part["logprobs"] == done["logprobs"]
    assert part["logprobs"][0]["top_logprobs"][0]["logprob"] == -1.0
    for event in read:
        EVENT.validate_python(event)


words = st.text(max_size=3)
anything = st.lists(
    st.one_of(
        st.builds(Text, words),
        st.builds(Reasoning, words),
        st.tuples(words, st.booleans()).map(
            lambda call: [CallBegins(0, "f"), ArgumentsDelta(0, call[0]), *([CallEnds(0)] if call[1] else [])]
        ),
    ),
    max_size=8,
)


@given(anything, st.booleans())
def test_items_never_overlap_whatever_an_answer_says(
    parts: list[AnswerEvent | list[AnswerEvent]], is_cut: bool
) -> None:
    answer = [each for part in parts for each in (part if isinstance(part, list) else [part])]
    open_item = None
    for event in streamed(answer, is_cut=is_cut):
        if event["type"] == "response.output_item.added":
            assert open_item is None
            open_item = event["output_index"]
        elif event["type"] == "response.output_item.done":
            assert open_item == event["output_index"]
            open_item = None
        elif "output_index" in event:
            assert event["output_index"] == open_item
    assert open_item is None


def test_a_large_item_is_written_in_small_pieces() -> None:
    output, events = ResponseOutput("r", None), ResponseEvents(response())
    list(output.on_events([Text("\u20ac" * 2**18)]))
    assert max(map(len, events.of(output.end(is_cut=False)))) < 2**17


def test_ids_name_their_response() -> None:
    """So a reference to an item finds the response."""
    output = ResponseOutput("abc", None)
    list(output.on_events([Text("x")]))
    assert output.items[0].id == "msg_abc_0"
