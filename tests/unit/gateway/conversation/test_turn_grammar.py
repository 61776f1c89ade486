"""Grammars let through what parses as calls that fit their schemas, and nothing that only seems so."""

import json
import random
import re
from contextlib import suppress
from dataclasses import replace

import jsonschema
import pytest

from baton.errors import InvalidRequest
from baton.sampling import MAX_GRAMMAR_CHARACTERS, GrammarKind, StructuredOutput
from gateway.conversation import (
    Conversation,
    ReasoningOptions,
    Tool,
    ToolChoice,
    ToolUse,
    answer_format_of,
)
from gateway.conversation.lark import ranges
from gateway.grammars.depth import check_depth
from tests.factories.conversations import (
    ASKED,
    TEMPLATES,
    THINKING,
    TOOLS,
    called,
    calls_in,
    format_of,
    parts_of,
    written_answer,
)
from tests.factories.guided import GUIDES, Guide, both

families = pytest.mark.parametrize("family", TEMPLATES)

REQUIRED = replace(ASKED, tool_choice=ToolChoice(ToolUse.REQUIRED))
ONE = ("get_weather", '{"city": "Zürich", "days": 3, "hourly": true}')
TWO = (ONE, ("search", '{"query": "x"}'))
UNMARKED = ("llama", "pythonic")
WRONG = ("get_weather", '{"days": 3}')
JSON_ANSWER = StructuredOutput(
    GrammarKind.JSON_SCHEMA,
    json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}),
)
"""Further properties may follow."""


def grammar_of(
    guide: Guide, family: str, conversation: Conversation, answer: StructuredOutput | None = None
) -> StructuredOutput:
    grammar = format_of(family, guide.vocabulary).grammar(conversation, "", answer)
    assert grammar is not None
    check_depth(grammar)
    return grammar


def written(family: str, *calls: tuple[str, str]) -> str:
    """The calls as a model writes them: without ids."""
    answer = written_answer(format_of(family), TEMPLATES[family], called(*calls)).lstrip("\n")
    return re.sub(r', "id": "\w{9}"|\[CALL_ID\]\w{9}', "", answer)


@both
@families
def test_calls_as_a_template_writes_them_may_be_written(family: str, guide: Guide) -> None:
    one, two = written(family, ONE), written(family, *TWO)

    for conversation in (ASKED, REQUIRED):
        grammar = grammar_of(guide, family, conversation)
        assert guide.accepts(grammar, one)
        assert guide.accepts(grammar, two)


@both
@families
def test_required_calls_are_calls_alone(family: str, guide: Guide) -> None:
    grammar = grammar_of(guide, family, REQUIRED)

    for answer in ("Hello.", "", "Well.\n" + written(family, ONE), written(family, WRONG)):
        assert not guide.accepts(grammar, answer)


@both
@families
def test_of_tools_that_may_be_called_unknown_ones_cannot(family: str, guide: Guide) -> None:
    grammar = grammar_of(guide, family, ASKED)

    assert guide.accepts(grammar, "Hello, {} [1].\n")
    assert guide.accepts(grammar, written(family, WRONG))
    assert not guide.accepts(grammar, written(family, ONE).replace("get_weather", "get_money"))


@both
@families
def test_arguments_of_strict_tools_match_though_none_need_be_called(family: str, guide: Guide) -> None:
    strict = replace(ASKED, tools=tuple(replace(tool, strict=True) for tool in TOOLS))
    grammar = grammar_of(guide, family, strict)

    assert guide.accepts(grammar, "Hello.")
    assert guide.accepts(grammar, written(family, ONE))
    assert not guide.accepts(grammar, written(family, WRONG))


@both
@families
def test_no_call_where_none_may_be(family: str, guide: Guide) -> None:
    grammar = grammar_of(guide, family, replace(ASKED, tool_choice=ToolChoice(ToolUse.NONE)))

    assert guide.accepts(grammar, "Hello < [x] {}.")
    assert not guide.accepts(grammar, written(family, ONE))


@both
@families
def test_one_call_at_most_where_they_may_not_be_parallel(family: str, guide: Guide) -> None:
    for conversation in (ASKED, REQUIRED):
        grammar = grammar_of(guide, family, replace(conversation, parallel_tool_calls=False))
        assert guide.accepts(grammar, written(family, ONE))
        assert not guide.accepts(grammar, written(family, *TWO))


@both
@families
def test_only_the_named_tool_is_called(family: str, guide: Guide) -> None:
    choice = ToolChoice(ToolUse.REQUIRED, ("search",))
    grammar = grammar_of(guide, family, replace(ASKED, tool_choice=choice))

    assert guide.accepts(grammar, written(family, TWO[1]))
    assert not guide.accepts(grammar, written(family, ONE))


@both
@families
def test_a_response_format_holds_for_text_beside_calls(family: str, guide: Guide) -> None:
    grammar = grammar_of(guide, family, ASKED, JSON_ANSWER)

    assert parts_of(format_of(family), ['{"a": 1}']).text == '{"a": 1}'
    assert guide.accepts(grammar, '{"a": 1}')
    assert guide.accepts(grammar, written(family, ONE))
    assert not guide.accepts(grammar, "Hello.")
    assert not guide.accepts(grammar, '{"a": "x"}')


STRING, NUMBER = {"type": "string"}, {"type": "integer"}


def answer_of(properties: dict[str, object], **others: object) -> StructuredOutput:
    """An answer that matches a closed object, all of whose properties are required."""
    schema = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return StructuredOutput(GrammarKind.JSON_SCHEMA, json.dumps(schema | others))


APART = {
    "another key first": answer_of({"city": STRING, "name": STRING, "parameters": {"type": "object"}}),
    "another key behind the name": answer_of({"name": STRING, "days": NUMBER}),
    "names that are no tools": answer_of({"name": {"enum": ["a", "b"]}, "parameters": {"type": "object"}}),
    "a name that is no text": answer_of({"name": NUMBER}),
    "no object": StructuredOutput(GrammarKind.JSON_SCHEMA, '{"type": "array", "items": {}}'),
    "alternatives": StructuredOutput(
        GrammarKind.JSON_SCHEMA,
        json.dumps({"anyOf": [{"type": "null"}, json.loads(answer_of({"a": STRING}).source)]}),
    ),
    "a regular expression": StructuredOutput(GrammarKind.REGEX, r'(\{"name": "\w+"\}|\[\w+\(\)\]|yes)'),
}
ALIKE = {
    "any object": StructuredOutput(GrammarKind.JSON_SCHEMA, '{"type": "object"}'),
    "anything": StructuredOutput(GrammarKind.JSON_SCHEMA, "{}"),
    "a call": answer_of({"name": STRING, "parameters": {"type": "object"}}),
    "a name alone": answer_of({"name": STRING}),
    "a name and what may be missing": answer_of({"name": STRING, "days": NUMBER}, required=["name"]),
    "names of tools": answer_of({"type": STRING, "name": {"enum": ["search", "b"]}}),
    "a reference": StructuredOutput(GrammarKind.JSON_SCHEMA, '{"$ref": "#/$defs/a", "$defs": {"a": {}}}'),
    "alternatives": StructuredOutput(
        GrammarKind.JSON_SCHEMA, json.dumps({"anyOf": [json.loads(answer_of({"name": STRING}).source), {}]})
    ),
}


@pytest.mark.parametrize("family", UNMARKED)
@pytest.mark.parametrize("form", APART)
def test_an_answer_in_a_given_form_is_never_read_as_a_call(family: str, form: str) -> None:
    guide = GUIDES["markers are text"]
    answer_format, rng = format_of(family, guide.vocabulary), random.Random(f"{family} {form}")
    conversation = replace(ASKED, tools=tuple(replace(tool, strict=True) for tool in TOOLS))
    grammar = grammar_of(guide, family, conversation, APART[form])
    assert guide.accepts(grammar, written(family, *TWO))
    alone = grammar_of(guide, family, replace(ASKED, tool_choice=ToolChoice(ToolUse.NONE)), APART[form])
    num_whole = 0
    for _ in range(10):
        answer, has_ended = guide.random_answer(grammar, rng)
        parts = parts_of(answer_format, [answer])
        if has_ended and not parts.calls:
            num_whole += 1
            assert guide.accepts(alone, answer)
        elif has_ended:
            assert parts.text == ""
    assert num_whole >= 1


@pytest.mark.parametrize("name", ALIKE)
def test_json_that_may_look_like_a_bare_call_is_refused(name: str) -> None:
    guide = GUIDES["markers are text"]

    with pytest.raises(
        InvalidRequest, match=r"structured_output: .* other than name, type, id, .* tool_choice"
    ):
        grammar_of(guide, "llama", ASKED, ALIKE[name])
    assert guide.accepts(grammar_of(guide, "pythonic", ASKED, ALIKE[name]), written("pythonic", ONE))


@pytest.mark.parametrize(
    "source",
    [
        '{"anyOf": 5}',
        '{"properties": 5}',
        '{"properties": {"a": {}}, "required": 5}',
        '{"anyOf": [' * 400 + "{}" + "]}" * 400,
        '{"anyOf": [' * 5_000 + "{}" + "]}" * 5_000,
    ],
    ids=["anyOf", "properties", "required", "deep", "too deep to be read"],
)
def test_schemas_that_are_none_or_too_deep_break_nothing_beside_calls(source: str) -> None:
    """The remaining wrong schemas are refused when they are compiled, or because they are too large."""
    answer = StructuredOutput(GrammarKind.JSON_SCHEMA, source)
    with pytest.raises(InvalidRequest):
        format_of("llama").grammar(ASKED, "", answer)
    with suppress(InvalidRequest):
        assert format_of("pythonic").grammar(ASKED, "", answer) is not None


@pytest.mark.parametrize("family", UNMARKED)
def test_where_nothing_is_to_be_told_apart_any_form_will_do(family: str) -> None:
    guide = GUIDES["markers are text"]
    none = replace(ASKED, tool_choice=ToolChoice(ToolUse.NONE))
    assert guide.accepts(grammar_of(guide, family, none, JSON_ANSWER), '{"a": 1}')
    assert guide.accepts(grammar_of(guide, family, REQUIRED, JSON_ANSWER), written(family, ONE))


PLACE = {
    "type": "object",
    "properties": {"lat": {"type": "number"}, "kind": {"enum": ["é", "b"]}},
    "required": ["lat"],
}
SCHEMAS = {
    "empty": {"type": "object", "properties": {}},
    "nested": {
        "type": "object",
        "properties": {"to": {"$ref": "#/$defs/place"}, "via": {"type": "array", "items": {"$ref": "#/$defs/place"}}},
        "required": ["to"],
        "$defs": {"place": PLACE},
    },
    "optional": {
        "type": "object",
        "properties": {
            "a": {"type": "boolean"}, "b": {"type": ["string", "null"]}, "c": {"type": "string"}, "d": {"const": 1},
            "e": {"type": "string", "maxLength": 4}, "f": {"enum": ["x y", "</parameter>", "</arg_value>"]},
            "g": {"type": "null"},
        },
        "required": ["c", "f"],
    },
}  # fmt: skip


@both
@families
@pytest.mark.parametrize("name", SCHEMAS)
def test_whatever_a_grammar_lets_through_parses_and_fits(family: str, guide: Guide, name: str) -> None:
    tool = Tool("act", None, SCHEMAS[name])
    rng = random.Random(f"{family} {name}")
    num_whole = 0
    for conversation in (
        replace(REQUIRED, tools=(tool,)),
        replace(ASKED, tools=(replace(tool, strict=True), *TOOLS)),
    ):
        answer_format = format_of(family, guide.vocabulary)
        grammar = answer_format.grammar(conversation, "", None)
        assert grammar is not None
        for _ in range(7):
            answer, has_ended = guide.random_answer(grammar, rng)
            parts = parts_of(answer_format, [answer], conversation)
            for call in parts.calls:
                assert call.is_whole or not has_ended
                if call.is_whole and call.name == tool.name:
                    jsonschema.validate(json.loads(call.arguments), tool.parameters)
                    num_whole += 1
            if conversation.tool_choice.use is ToolUse.REQUIRED and has_ended:
                assert parts.calls
                assert parts.text == ""
    assert num_whole >= 3


THINKER = answer_format_of(THINKING, GUIDES["markers are tokens"].vocabulary)


@pytest.mark.parametrize("prompt_end", ["assistant\n", "assistant\n<think>\n"])
def test_calls_come_behind_reasoning(prompt_end: str) -> None:
    guide = GUIDES["markers are tokens"]
    begin = "" if prompt_end.endswith("<think>\n") else "<think>"
    grammar = THINKER.grammar(REQUIRED, prompt_end, None)
    assert grammar is not None

    answer = f"{begin}\nI see <b>.\n</think>\n\n" + written("hermes", ONE)

    assert guide.accepts(grammar, answer)
    assert not guide.accepts(grammar, f"{begin}I see.</think>Hello.")
    assert guide.accepts(grammar, written("hermes", ONE)) is bool(begin)
    parts = parts_of(THINKER, [*answer], REQUIRED, prompt_end)
    assert (parts.reasoning, parts.text) == ("I see <b>.", "")
    assert [name for name, _, _ in calls_in(parts)] == ["get_weather"]


def test_a_response_format_holds_behind_reasoning() -> None:
    guide = GUIDES["markers are tokens"]
    asked = replace(ASKED, tools=())
    grammar = THINKER.grammar(asked, "", JSON_ANSWER)
    assert grammar is not None

    assert guide.accepts(grammar, '<think>x</think>\n\n{"a": 1}')
    assert not guide.accepts(grammar, "<think>x</think>Hello.")
    assert THINKER.grammar(asked, "<think>\n\n</think>\n\n", JSON_ANSWER) is JSON_ANSWER


@both
def test_text_and_calls_come_behind_reasoning_that_a_model_begins(guide: Guide) -> None:
    thinker = answer_format_of(THINKING, guide.vocabulary)
    grammar = thinker.grammar(ASKED, "", None)
    assert grammar is not None

    for thought in ("", "<think>x < y</think>", "<think>\nx\n</think>\n\n"):
        for rest in ("Hello.", written("hermes", ONE), "Well.\n" + written("hermes", *TWO) + "\nDone."):
            assert guide.accepts(grammar, thought + rest)
    assert not guide.accepts(grammar, "<think>x</think>" + written("hermes", ONE).replace('{"city', "{city"))
    assert not guide.accepts(grammar, "<think>x")


def test_reasoning_ends_at_its_budget_of_tokens() -> None:
    guide = GUIDES["markers are tokens"]
    asked = replace(ASKED, tools=(), reasoning=ReasoningOptions(max_tokens=5))
    grammar = THINKER.grammar(asked, "", None)
    assert grammar is not None

    assert guide.accepts(grammar, "<think>" + "#" * 5 + "</think>Hello there.")
    assert guide.accepts(grammar, "<think></think>Hello there.")
    assert guide.accepts(grammar, "Hello there.")
    assert not guide.accepts(grammar, "<think>" + "#" * 6 + "</think>Hello there.")
    without = THINKER.grammar(replace(asked, reasoning=ReasoningOptions(max_tokens=0)), "", None)
    assert without is not None
    assert guide.accepts(without, "<think></think>Hello there.")
    assert not guide.accepts(without, "<think>#</think>Hello there.")
    assert ranges([7, 0, 1, 2, 8, 5]) == "0-2,5-5,7-8", "no id between them"


def test_a_plain_conversation_has_no_grammar() -> None:
    for answer_format in (THINKER, format_of("generic")):
        assert answer_format.grammar(replace(ASKED, tools=()), "", None) is None


def test_tools_that_are_too_large_are_refused_by_their_field() -> None:
    parameters = {"type": "object", "properties": {"a": {"enum": ["x" * MAX_GRAMMAR_CHARACTERS]}}}
    large = replace(REQUIRED, tools=(Tool("large", None, parameters),))

    with pytest.raises(InvalidRequest, match=r"tools: .* at most 100000 are allowed") as refused:
        format_of("hermes").grammar(large, "", None)

    assert refused.value.field == "tools"
    assert format_of("hermes").grammar(replace(large, tool_choice=ToolChoice()), "", None) is not None


@pytest.mark.parametrize(
    ("field", "conversation"),
    [
        ("reasoning", replace(ASKED, reasoning=ReasoningOptions(is_enabled=True))),
        ("reasoning", replace(ASKED, reasoning=ReasoningOptions(max_tokens=3))),
        ("template_options", replace(ASKED, template_options={"no_such": True})),
        ("template_options", replace(ASKED, template_options={"messages": []})),
        ("chat", replace(ASKED, messages=(called(("search", "[]")),))),
    ],
)
def test_what_a_model_cannot_do_is_refused_by_its_field(field: str, conversation: Conversation) -> None:
    with pytest.raises(InvalidRequest) as refused:
        format_of("hermes").template_arguments(conversation)
    assert refused.value.field == field


def test_parameters_that_are_nested_too_deep_are_refused() -> None:
    parameters: dict[str, object] = {}
    for _ in range(200):
        parameters = {"type": "object", "properties": {"a": parameters}}
    with pytest.raises(InvalidRequest, match="tools: "):
        format_of("hermes").grammar(replace(REQUIRED, tools=(Tool("a", None, parameters),)), "", None)
