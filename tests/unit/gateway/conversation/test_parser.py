"""Every family's calls are read as they come, and what is no call stays text."""

import json
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from gateway.conversation import Text, Vocabulary, answer_format_of
from gateway.conversation.formats import deepseek
from gateway.conversation.messages import Tool, ToolChoice, ToolUse
from gateway.conversation.python_call import MAX_CALL_CHARACTERS
from gateway.conversation.reader import MAX_ATTEMPT_CHARACTERS
from tests.factories.conversations import (
    ASKED,
    TEMPLATES,
    THINKING,
    TOOLS,
    called,
    calls_in,
    format_of,
    merged_events,
    parts_of,
    random_answer,
    written_answer,
)
from tests.factories.costs import expect_cost_in_proportion

CALLS = (
    ("get_weather", '{"city": "Zürich \\"Süd\\"", "days": 3, "hourly": true}'),
    ("search", '{"query": "<tool_call> {\\"a\\": [1}\\n</tool_call>"}'),
    ("get_weather", '{"city": "x"}'),
)
ODDITIES = (
    "[TOOL_CALLS]",
    "</tool_call>",
    "<tool_call>\n",
    '{"name": "',
    "{",
    '"',
    "\\",
    "[f(",
    "<think>",
    "</think>",
    "<arg_key>",
    "</arg_value>",
    '<minimax:tool_call><invoke name="',
    "<function_calls>search(",
    "</function_calls>",
    "</invoke>",
)
HOSTILE = (
    *(marker * 2_000 for marker in ("<tool_call>", "<tool_call>{", "[TOOL_CALLS][", deepseek.BEGIN + deepseek.CALL)),
    "{" * 1_000_000,
    '<tool_call>{"name": "f", "arguments": ' + "{" * 1_000_000,
    '<tool_call>{"name": "f", "arguments": {"a": "' + "\\" * 100_001,
    '<tool_call>{"name": "' + "x" * 100_000,
    '{"name": "search", "parameters": ' + '{"a":' * 100_000,
    "[search(a=" + "[" * 100_000,
    "[search(a=" + "-" * 100_000 + "1)]",
    "<tool_call>\n<function=search>\n" + "<parameter=a>" * 20_000,
    "<tool_call>\n<function=search>\n" + "<parameter=a>{</parameter>" * 10_000,
    "<tool_call>\n<function=search>\n<parameter=query>\n" + "\n" * 100_000,
    "<tool_call>search" + "<arg_key>" * 20_000,
    "<tool_call>search" + "<arg_key>a</arg_key><arg_value>{</arg_value>" * 5_000,
    "<tool_call>search<arg_key>query</arg_key><arg_value>" + " \n" * 50_000,
    "<tool_call>search<arg_key>a</arg_key><arg_value>" + "</arg_value" * 10_000,
    "<tool_call>search\n" * 5_000,
    "<minimax:tool_call>" * 2_000,
    "<function_calls>search(" * 5_000,
    "<function_calls>search()" * 5_000,
    "<function_calls>" + "search(a=1)\n" * 5_000,
    "<function_calls>search(a=" + "[" * 100_000,
    '<minimax:tool_call><invoke name="' + "x" * 100_000,
    "<minimax:tool_call>" + '<invoke name="search">' * 5_000,
    '<minimax:tool_call><invoke name="search">' + '<parameter name="a">{</parameter>' * 5_000,
    " \n" * 100_000,
    "<think>" * 10_000 + "</think" * 10_000,
    "<" * 100_000,
)  # fmt: skip


@pytest.mark.parametrize("family", TEMPLATES)
def test_what_a_template_writes_is_read_back(family: str) -> None:
    answer_format = format_of(family)

    for number in (1, 2, 3):
        answer = written_answer(answer_format, TEMPLATES[family], called(*CALLS[:number]))
        parts = parts_of(answer_format, [answer])

        assert [(name, json.loads(json_), whole) for name, json_, whole in calls_in(parts)] == [
            (name, json.loads(arguments), True) for name, arguments in CALLS[:number]
        ]
        assert parts.text == ""


@pytest.mark.parametrize("family", TEMPLATES)
def test_text_alone_stays_as_it_is(family: str) -> None:
    for text in (
        "Yes.",
        "  a\n\n b \n",
        "{}",
        "[1, 2]",
        '{"name": 1}',
        "a < b",
        "<tool_call>",
        '{"name": "no_tool", "x": {}}',
        '<tool_call>{"arguments": {}, "name": "f"}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "x"}',
        "[TOOL_CALLS]f [1]",
        '[TOOL_CALLS]{"a": 1}',
        "",
    ):
        assert parts_of(format_of(family), [text]).text == text


@pytest.mark.parametrize("family", sorted({*TEMPLATES} - {"llama", "pythonic", "mistral", "deepseek_v3"}))
def test_text_around_calls_is_text(family: str) -> None:
    answer_format = format_of(family)
    call = written_answer(answer_format, TEMPLATES[family], called(CALLS[0])).strip()

    parts = parts_of(answer_format, [f"I look.\n{call}\n{call} Done.\n"])

    assert parts.text == "I look.Done.\n"
    assert len(parts.calls) == 2


@pytest.mark.parametrize("family", TEMPLATES)
def test_60_answers_give_the_same_events_wherever_they_are_cut(family: str) -> None:
    """More than 500 over all families: cut everywhere at once, and once at any place."""
    answer_format = format_of(family)
    rng = random.Random(family)
    pieces = [
        *(written_answer(answer_format, TEMPLATES[family], called(*CALLS[:number])) for number in (1, 3)),
        *ODDITIES, "Hello. ", "\n", " ",
    ]  # fmt: skip

    for _ in range(60):
        answer = random_answer(rng, pieces)
        whole = merged_events(answer_format, [answer])

        assert merged_events(answer_format, [*answer]) == whole
        for cut in rng.sample(range(len(answer)), min(len(answer), 40)):
            assert merged_events(answer_format, [answer[:cut], answer[cut:]]) == whole


@pytest.mark.slow
@pytest.mark.parametrize("family", TEMPLATES)
@pytest.mark.parametrize("number", range(len(HOSTILE)))
def test_hostile_text_costs_time_in_proportion(family: str, number: int) -> None:
    text = HOSTILE[number]

    def read(length: int) -> None:
        parser = format_of(family).new_parser(ASKED, "")
        assert parser is not None
        for begin in range(0, length, 50):
            parser.push(text[begin : min(begin + 50, length)])
        parser.flush()

    expect_cost_in_proportion(lambda length: partial(read, length), len(text))


@pytest.mark.slow
@pytest.mark.parametrize("keyword", ["enum", "anyOf"])
def test_many_values_of_a_large_schema_cost_time_in_proportion(keyword: str) -> None:
    def prepare(number: int) -> Callable[[], object]:
        part: object = "x" if keyword == "enum" else {"type": "string"}
        tool = Tool("f", None, {"properties": {"a": {keyword: [part] * number}}})
        answer = f"<tool_call><function=f>{'<parameter=a>x</parameter>' * number}</function>"
        return partial(parts_of, format_of("qwen_coder"), [answer], replace(ASKED, tools=(tool,)))

    expect_cost_in_proportion(prepare, 4_000)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen_coder", "glm"])
def test_a_long_guided_value_costs_time_in_proportion(family: str) -> None:
    tool = Tool("f", None, {"properties": {"a": {"type": "array"}}}, strict=True)
    chat = replace(ASKED, tools=(tool,))

    def prepare(length: int) -> Callable[[], object]:
        call = TAGGED[family].format(f'["{"x" * length}"]')
        return lambda: parts_of(format_of(family), [*call], chat)

    expect_cost_in_proportion(prepare, 400_000)


@pytest.mark.parametrize(
    ("family", "begin"),
    [
        ("hermes", '<tool_call>{"id": "'),
        ("pythonic", "[search(query='"),
        ("olmo", "<function_calls>search(query='"),
    ],
)
def test_what_does_not_become_a_call_is_not_held_back_for_ever(family: str, begin: str) -> None:
    parser = format_of(family).new_parser(ASKED, "")
    assert parser is not None
    limit = MAX_ATTEMPT_CHARACTERS if family == "hermes" else MAX_CALL_CHARACTERS
    parser.push(begin)

    num_shown = sum(
        len(event.text)
        for _ in range(2 * limit // 64)
        for event in parser.push("x" * 64)
        if isinstance(event, Text)
    )

    assert num_shown >= limit


@pytest.mark.parametrize("family", TEMPLATES)
def test_behind_a_call_no_part_of_another_one_is_text(family: str) -> None:
    """The answer ends anywhere (`max_tokens`), and comes in any pieces: calls and nothing else."""
    answer_format = format_of(family)
    one, three = (
        written_answer(answer_format, TEMPLATES[family], called(*CALLS[:number])) for number in (1, 3)
    )
    num_ends = 0
    for end in range(len(three) + 1):
        answer = three[:end]
        parts = parts_of(answer_format, [answer])
        if not parts.calls or not parts.calls[0].is_whole:
            continue
        num_ends += 1
        assert parts.text == "", answer
        assert all(call.is_whole for call in parts.calls[:-1])
        whole = merged_events(answer_format, [answer])
        assert merged_events(answer_format, [*answer]) == whole
        for cut in range(max(0, end - 40 + end % 5), end, 5):  # over all ends, at every distance
            assert merged_events(answer_format, [answer[:cut], answer[cut:]]) == whole
    assert num_ends > 50
    assert parts_of(answer_format, [f"{one} Done <tool"]).text.strip().endswith("Done <tool")


@pytest.mark.parametrize("family", TEMPLATES)
def test_what_never_became_a_first_call_is_text_unless_a_call_is_required(family: str) -> None:
    answer_format = format_of(family)
    call = written_answer(answer_format, TEMPLATES[family], called(CALLS[0]))
    required = replace(ASKED, tool_choice=ToolChoice(ToolUse.REQUIRED))
    for end in range(len(call)):
        parts = parts_of(answer_format, [*call[:end]])
        assert parts.calls or parts.text == call[:end]
        assert parts_of(answer_format, [*call[:end]], required).text == ""


def test_the_beginning_of_reasoning_is_text_unless_a_call_is_required() -> None:
    answer_format = answer_format_of(THINKING, Vocabulary())
    required = replace(ASKED, tool_choice=ToolChoice(ToolUse.REQUIRED))
    assert parts_of(answer_format, [*"<thi"]).text == "<thi"
    assert parts_of(answer_format, [*"<thi"], required).text == ""


def test_behind_reasoning_what_is_no_call_is_text() -> None:
    parts = parts_of(answer_format_of(THINKING, Vocabulary()), ["<think>Hm.</think><tool_call>{no}"])
    assert (parts.reasoning, parts.text) == ("Hm.", "<tool_call>{no}")


TAGGED = {
    "qwen_coder": "<tool_call><function=f><parameter=a>{}</parameter></function></tool_call>",
    "minimax": '<minimax:tool_call><invoke name="f"><parameter name="a">{}</parameter></invoke></minimax:tool_call>',
    "glm": "<tool_call>f<arg_key>a</arg_key><arg_value>{}</arg_value></tool_call>",
}
"""Calls in the formats that write arguments between tags."""


@pytest.mark.parametrize("family", TAGGED)
@pytest.mark.parametrize(
    ("value", "json_"),
    [
        ("True", "true"),
        (" None", "null"),
        ("NaN", '"NaN"'),
        (" -1e999", "-1e999"),
        ('{"a":[8e999]}', '{"a":[8e999]}'),
        ("[1,2]", "[1, 2]"),
        ("['x']", "\"['x']\""),
        (" x  ", '" x  "'),
        ('"a\\"{end}"', '"a\\"{end}"'),
        (r'"\ud83d\ude00"', '"😀"'),
        (r'"\ud83d"', r'"\ud83d"'),
        (r'{"a": ["\ude00"]}', r'{"a": ["\ude00"]}'),
    ],
)
def test_values_without_quotes_become_json_by_what_they_are(family: str, value: str, json_: str) -> None:
    """This holds whether or not there is such a tool, and whatever is wrong with its schema."""
    end = TAGGED[family].partition("{}")[2].partition(">")[0] + ">"
    call = TAGGED[family].format(value.replace("{end}", end))
    schemas: tuple[dict[str, Any], ...] = (
        {},
        {"properties": []},
        {"properties": {"a": 1}},
        {"properties": {"a": {"type": 1}}},
        {"properties": {"a": {"anyOf": [{}, {"type": "string"}]}}},
    )
    for tools in (TOOLS, *((Tool("f", None, schema),) for schema in schemas)):
        parts = parts_of(format_of(family), [*call], replace(ASKED, tools=tools))
        assert calls_in(parts) == [("f", f'{{"a": {json_.replace("{end}", end)}}}', True)]


@pytest.mark.parametrize("family", TAGGED)
@pytest.mark.parametrize(
    ("schema", "value", "json_"),
    [
        ({"type": "string"}, '"x"', '"\\"x\\""'),
        ({"type": "string", "minLength": 1}, "2024", '"2024"'),
        ({"type": "string", "minLength": 1}, '"2024"', '"2024"'),
        ({"type": "string", "format": "date"}, "{", '"{"'),
        ({"type": "string", "format": "date"}, '"2024"', '"2024"'),
        ({"type": "string", "format": "path"}, '"x"', '"\\"x\\""'),
        ({"type": "string", "format": ["date"]}, "2024", '"2024"'),
        ({"type": ["string", "null"]}, "True", '"True"'),
        ({"type": ["string", "null"]}, "null", "null"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "[1]", '"[1]"'),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "1", "1"),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "1.0", "1.0"),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "1.10", '"1.10"'),
        ({"type": ["string", "number"]}, "1.10", "1.1"),
        ({"oneOf": [{"type": "string"}, {"type": "array"}]}, "[1]", "[1]"),
        ({"type": "integer"}, "1.0", "1.0"),
        ({"type": "integer"}, "x", '"x"'),
        ({"type": "integer"}, "['x']", "\"['x']\""),
        (
            {"type": "array"},
            "['x', None, '</arg_value></parameter>']",
            '["x", null, "</arg_value></parameter>"]',
        ),
        ({"type": ["object", "null"]}, "{'x': 1,}", '{"x": 1}'),
        ({"type": ["object", "null"]}, "{'x'", "\"{'x'\""),
        ({"type": ["string", "array"]}, "['x']", "\"['x']\""),
        ({"$ref": "#/$defs/year"}, "2024", '"2024"'),
        ({"allOf": [{"$ref": "#/$defs/year"}]}, "2024", '"2024"'),
        ({"anyOf": [{"$ref": "#/$defs/year"}, {"type": "null"}]}, "null", "null"),
        ({"anyOf": [{"$ref": "#/$defs/year"}, {"$ref": "#/$defs/year"}]}, "1", '"1"'),
        ({"anyOf": [{"$ref": "#/$defs/year"}, {"$ref": "#/$defs/unknown"}]}, "1", "1"),
        ({"$ref": "#/$defs/itself"}, "1", "1"),
        ({"$ref": "#/$defs/far0"}, "1", "1"),
        ({"enum": ["1", "2", None]}, "1", '"1"'),
        ({"enum": ["1", "2", None]}, "null", "null"),
        ({"enum": [1, 2]}, "1", "1"),
        ({"anyOf": [{"const": "1"}] * 1_000}, "1", "1"),
        ({"anyOf": []}, "1", "1"),
        ({"const": "1"}, "1", '"1"'),
    ],
)
def test_what_cannot_be_another_value_by_its_schema_is_a_string(
    family: str, schema: dict[str, Any], value: str, json_: str
) -> None:
    chain = {f"far{i}": {"$ref": f"#/$defs/far{i + 1}"} for i in range(3_000)}
    definitions = {"year": {"enum": ["2024"]}, "itself": {"$ref": "#/$defs/itself"}, **chain}
    tool = Tool("f", None, {"type": "object", "properties": {"a": schema}, "$defs": definitions})
    parts = parts_of(format_of(family), [TAGGED[family].format(value)], replace(ASKED, tools=(tool,)))
    assert calls_in(parts) == [("f", f'{{"a": {json_}}}', True)]


@pytest.mark.parametrize(
    ("family", "answer", "text"),
    [
        ("hermes", '<tool_call>{"name": "f"}</tool_call> a <tool_call>{"na', "a"),
        ("hermes", '<tool_call>{"name": "f"}</tool_call> a <tool', "a <tool"),
        ("hermes", '<tool_call>{"name": "f"}</tool_call><tool_call>{"name": "f f"', '<tool_call>{"name": "f f"'),
        ("hermes", '<tool_call>{"name": "f"}</tool_call>\n<p', "<p"),
        ("hermes", '<tool_call>{"name": "f" , "arguments": {}}</tool_call> a', "a"),
        ("mistral_named", "[TOOL_CALLS]f{}[TOOL_CALLS]g( x", "[TOOL_CALLS]g( x"),
        ("llama", '{"name": "search", "parameters": {}}; and', "; and"),
        ("pythonic", "[search(query='x'), no_tool", ""),
        ("pythonic", "[search(query='x'), no_tool()", ", no_tool()"),
    ],
)  # fmt: skip
def test_behind_a_call_only_what_can_be_no_call_is_text(family: str, answer: str, text: str) -> None:
    assert parts_of(format_of(family), [*answer]).text == text
