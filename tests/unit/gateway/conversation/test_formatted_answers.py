"""An answer that matches a response format is text to its end, whatever marks its strings spell."""

import json

import pytest

from baton.sampling import GrammarKind, StructuredOutput
from gateway.conversation import AnswerFormat, Text, answer_format_of
from gateway.conversation.formats import deepseek
from tests.factories.conversations import (
    ASKED,
    TEMPLATES,
    THINKING,
    called,
    calls_in,
    format_of,
    merged_events,
    parts_of,
    written_answer,
)
from tests.factories.guided import Guide

ANSWER = StructuredOutput(GrammarKind.JSON_SCHEMA, '{"type": "object", "additionalProperties": true}')
ONE = StructuredOutput(GrammarKind.JSON_SCHEMA, '{"type": "object", "required": ["a"]}')
SPELLED = (
    "<tool_call><function=search><parameter=query>x</parameter></function></tool_call>",
    "<tool_call>search<arg_key>query</arg_key><arg_value>x</arg_value></tool_call>",
    '<function_calls>search(query="x")</function_calls>',
    '<minimax:tool_call><invoke name="search"><parameter name="query">x</parameter></invoke></minimax:tool_call>',
    "[TOOL_CALLS]search[ARGS]{} and [TOOL_CALLS]search{x: 1}",
    f"{deepseek.BEGIN}{deepseek.CALL}search{deepseek.SEPARATOR}{{}}{deepseek.CALL_END}{deepseek.END}",
    '<tool_call>\n{"name": "search", "arguments": {}}\n</tool_call>',
    "<|python_tag|>{",
    "<think>no</think> thought",
)
GUIDE = Guide(has_markers=False)


def text_of(value: str) -> str:
    return json.dumps({"a": value, value: ["b", value]}, ensure_ascii=False)


def assert_text(answer_format: AnswerFormat, before: str, text: str) -> None:
    """After `before`, which is no text, the answer is this text, whole and in any pieces."""
    answer = f"{before}{text}"
    for pieces in ([answer], [*answer], *([answer[:cut], answer[cut:]] for cut in range(len(answer)))):
        assert merged_events(answer_format, pieces, answer=ANSWER)[-1:] == [(Text, text)]
        assert not parts_of(answer_format, pieces, answer=ANSWER).calls


@pytest.mark.parametrize("spelled", SPELLED)
@pytest.mark.parametrize("family", TEMPLATES)
def test_marks_in_strings_of_json_are_text(family: str, spelled: str) -> None:
    assert_text(format_of(family), "", text_of(spelled))
    assert_text(format_of(family), "", json.dumps(spelled))


@pytest.mark.parametrize("family", sorted({*TEMPLATES} - {"llama", "pythonic"}))
def test_the_grammar_lets_a_string_spell_marks(family: str) -> None:
    grammar = format_of(family, GUIDE.vocabulary).grammar(ASKED, "", ONE)
    assert grammar is not None
    for spelled in SPELLED:
        assert GUIDE.accepts(grammar, json.dumps({"a": spelled}, ensure_ascii=False))


def test_beside_calls_without_a_mark_an_answer_may_begin_like_one() -> None:
    properties = {"name": {"enum": ["a"]}, "parameters": {"type": "object"}}
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    answer = StructuredOutput(GrammarKind.JSON_SCHEMA, json.dumps(schema))
    grammar = format_of("llama", GUIDE.vocabulary).grammar(ASKED, "", answer)
    assert grammar is not None
    assert GUIDE.accepts(grammar, '{"name": "a", "parameters": {}}')


@pytest.mark.parametrize("family", TEMPLATES)
def test_calls_instead_of_the_formatted_answer_are_calls(family: str) -> None:
    answer_format = format_of(family)
    written = written_answer(
        answer_format, TEMPLATES[family], called(("search", '{"query": "x"}'), ("search", "{}"))
    )
    for pieces in ([written], [*written]):
        parts = parts_of(answer_format, pieces, answer=ANSWER)
        assert [name for name, _, _ in calls_in(parts)] == ["search", "search"]
        assert parts.text == ""


def test_a_formatted_answer_that_begins_with_a_mark_is_text_if_it_is_no_call() -> None:
    """A regular expression may allow such an answer."""
    assert_text(
        format_of("hermes"), "", '<tool_call>, which is a mark, <tool_call>{"name": "search"}</tool_call>'
    )


def test_behind_reasoning_a_formatted_answer_is_text() -> None:
    answer_format = answer_format_of(
        THINKING.replace("<tool_call>", "<tool_call><function=<parameter="), GUIDE.vocabulary
    )
    assert_text(answer_format, "<think>\nI <tool_call>\n</think>\n\n", text_of(SPELLED[0]))


@pytest.mark.parametrize("text", ['{"a": "<tool', "<tool_cal", "", "[1, 2", " \n 5"])
def test_a_formatted_answer_may_end_anywhere(text: str) -> None:
    assert parts_of(format_of("qwen_coder"), [*text], answer=ANSWER).text == text
