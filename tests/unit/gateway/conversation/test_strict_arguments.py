"""Limits of arguments that a family writes in a way of its own: no such way leads past the schema."""

import json
import tracemalloc
from dataclasses import replace
from typing import Any

import pytest

from baton.errors import InvalidRequest
from baton.sampling import GrammarKind, StructuredOutput
from gateway.conversation import Tool, ToolChoice, ToolUse
from gateway.conversation.argument_tags import MAX_VALUE_CHARACTERS
from gateway.conversation.guided_schema import divisible
from gateway.conversation.python_literals import keyword_arguments
from tests.factories.conversations import ASKED, calls_in, format_of, parts_of
from tests.factories.guided import Guide
from tests.unit.gateway.conversation.test_parser import TAGGED
from tests.unit.gateway.conversation.test_turn_grammar import grammar_of

GUIDE = Guide(has_markers=False)
REQUIRED = ToolChoice(ToolUse.REQUIRED)
MINIMAX_ACT = """<minimax:tool_call>
<invoke name="act">
<parameter name="unit">{}</parameter>
</invoke>
</minimax:tool_call>"""


def with_tool(name: str, properties: dict[str, Any], choice: ToolChoice) -> Any:
    schema = {"type": "object", "properties": properties, "required": [*properties]}
    return replace(ASKED, tools=(Tool(name, None, schema, strict=True),), tool_choice=choice)


@pytest.mark.parametrize(
    "unit",
    [
        {"type": "string", "const": "metric"},
        {"type": "string", "oneOf": [{"const": "metric"}, {"const": "imperial"}]},
        {"type": "string", "anyOf": [{"const": "metric"}, {"pattern": "^m"}]},
    ],
    ids=str,
)
def test_a_string_without_quotes_follows_all_of_its_schema(unit: dict[str, Any]) -> None:
    for family, call in (
        (
            "qwen_coder",
            "<tool_call>\n<function=act>\n<parameter=unit>\n{}\n</parameter>\n</function>\n</tool_call>",
        ),
        ("glm", "<tool_call>act\n<arg_key>unit</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>"),
        ("minimax", MINIMAX_ACT),
        ("glm 4.7", "<tool_call>act<arg_key>unit</arg_key><arg_value>{}</arg_value></tool_call>"),
    ):
        grammar = grammar_of(GUIDE, family, with_tool("act", {"unit": unit}, REQUIRED))
        assert not GUIDE.accepts(grammar, call.format("zzz"))
        assert GUIDE.accepts(grammar, call.format('"metric"'))


@pytest.mark.parametrize("name", ["get-weather", "weather/get", "a:b", "2d_weather"])
def test_a_call_of_any_name_follows_its_schema(name: str) -> None:
    auto = ToolChoice(ToolUse.AUTO)
    grammar = grammar_of(GUIDE, "pythonic", with_tool(name, {"city": {"type": "string"}}, auto))
    assert GUIDE.accepts(grammar, f'[{name}(city="x")]')
    assert not GUIDE.accepts(grammar, f"[{name}(days=5)]")
    assert GUIDE.accepts(grammar, "Read [this](https://example.org/a-b) or [1].")


def test_a_parameter_that_python_could_not_name_is_written_and_read_or_refused() -> None:
    grammar = grammar_of(GUIDE, "pythonic", with_tool("act", {"user-id": {"type": "string"}}, REQUIRED))
    assert GUIDE.accepts(grammar, '[act(user-id="a")]')
    assert keyword_arguments('user-id="a"') == {"user-id": "a"}
    with pytest.raises(InvalidRequest, match=r"cannot write 'user id' of 'act'") as refused:
        grammar_of(GUIDE, "pythonic", with_tool("act", {"user id": {"type": "string"}}, REQUIRED))
    assert refused.value.field == "tools"


@pytest.mark.parametrize(
    ("family", "name"),
    [("qwen_coder", "a>b"), ("qwen_coder", "a\nb"), ("glm", "a<b"), ("glm", "x" * 501), ("minimax", 'a"b')],
)
def test_a_parameter_whose_name_would_end_early_is_refused(family: str, name: str) -> None:
    with pytest.raises(InvalidRequest, match=r"tools: this model writes names .* of 'act'"):
        grammar_of(GUIDE, family, with_tool("act", {name: {"type": "string"}}, REQUIRED))


@pytest.mark.parametrize(
    ("others", "value", "wrong", "json_"),
    [
        ({"type": "string"}, "2024", None, '"2024"'),
        ({"type": "integer"}, "2024", "x", "2024"),
        ({"$ref": "#/$defs/year"}, '"2024"', "x", '"2024"'),
        (True, "null", "x", "null"),
    ],
)
def test_a_tool_that_lists_no_properties_may_have_others(
    others: Any, value: str, wrong: str | None, json_: str
) -> None:
    schema = {"additionalProperties": others, "$defs": {"year": {"type": "string", "pattern": "^[0-9]+$"}}}
    for family, begin, argument, end in (
        (
            "qwen_coder",
            "<tool_call>\n<function=act>\n",
            "<parameter={}>\n{}\n</parameter>\n",
            "</function>\n</tool_call>",
        ),
        ("glm 4.7", "<tool_call>act", "<arg_key>{}</arg_key><arg_value>{}</arg_value>", "</tool_call>"),
        (
            "minimax",
            '<minimax:tool_call>\n<invoke name="act">\n',
            '<parameter name="{}">{}</parameter>\n',
            "</invoke>\n</minimax:tool_call>",
        ),
        ("olmo", "<function_calls>act(", "{}={}", ")</function_calls>"),
        ("pythonic", "[act(", "{}={}", ")]"),
    ):
        is_python = end.startswith(")")
        key, between = ("b", ", ") if is_python else ("b c", "")
        is_quoted = is_python and others == {"type": "string"}
        written = f'"{value}"' if is_quoted else value
        asked = replace(ASKED, tools=(Tool("act", None, schema),), tool_choice=REQUIRED)
        grammar = grammar_of(GUIDE, family, asked)
        call = f"{begin}{argument.format('a', written)}{between}{argument.format(key, written)}{end}"
        assert GUIDE.accepts(grammar, call)
        assert GUIDE.accepts(grammar, begin + end)
        assert wrong is None or not GUIDE.accepts(grammar, begin + argument.format("a", wrong) + end)
        parts = parts_of(format_of(family), [*call], asked)
        assert calls_in(parts) == [("act", f'{{"a": {json_}, "{key}": {json_}}}', True)]


@pytest.mark.parametrize(
    ("family", "begin", "argument", "between", "end"),
    [
        (
            "qwen_coder",
            "<tool_call>\n<function=act>\n",
            "<parameter={}>\n{}\n</parameter>\n",
            "",
            "</function>\n</tool_call>",
        ),
        ("glm 4.7", "<tool_call>act", "<arg_key>{}</arg_key><arg_value>{}</arg_value>", "", "</tool_call>"),
        ("olmo", "<function_calls>act(", "{}={}", ", ", ")</function_calls>"),
    ],
)
def test_a_reference_may_lead_to_the_whole_schema_or_to_another_property(
    family: str, begin: str, argument: str, between: str, end: str
) -> None:
    properties = {
        "size": {"type": "integer"},
        "least": {"$ref": "#/properties/size"},
        "parts": {"type": "array", "items": {"$ref": "#"}},
    }
    grammar = grammar_of(GUIDE, family, with_tool("act", properties, REQUIRED))
    for least, parts, is_valid in (
        ("1", '[{"size": 1, "least": 0, "parts": []}]', True),
        ("x", "[]", False),
        ("1", "[[]]", False),
        ("1", '[{"size": 1, "least": 0, "parts": ["x"]}]', False),
    ):
        arguments = (("size", "2"), ("least", least), ("parts", parts))
        call = begin + between.join(argument.format(*each) for each in arguments) + end
        assert GUIDE.accepts(grammar, call) is is_valid


def test_what_looks_like_a_reference_in_a_constant_stays() -> None:
    constant = {"$ref": "#/x"}
    properties = {
        "a": {"const": constant},
        "b": {"$ref": "#/$defs/x-whole"},
        "const": {"$ref": "#/properties/c"},
    }
    schema = {"properties": properties, "$defs": {"x-whole": {"type": "integer"}}}
    divided = divisible(json.dumps(schema))
    assert divided["properties"]["a"] == {"const": constant}
    assert divided["properties"]["b"] == properties["b"]
    assert divided["$defs"]["x-whole"] == {"type": "integer"}
    name = divided["properties"]["const"]["$ref"].split("/")[2]
    assert divided["$defs"][name]["properties"]["a"] == {"const": constant}


def test_a_reference_to_the_whole_schema_means_the_arguments_beside_json_too() -> None:
    properties = {"v": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}
    schema = {"type": "object", "properties": {"first": {"type": "integer"}}, "required": ["first"]}
    answer = StructuredOutput(GrammarKind.JSON_SCHEMA, json.dumps(schema))
    asked = with_tool("act", properties, ToolChoice(ToolUse.AUTO))
    grammar = format_of("llama", GUIDE.vocabulary).grammar(asked, "", answer)
    assert grammar is not None
    call = '{{"name": "act", "parameters": {{"v": 1, "next": {}}}}}'
    assert GUIDE.accepts(grammar, call.format('{"v": 2, "next": null}'))
    assert not GUIDE.accepts(grammar, call.format('{"name": "act", "parameters": {"v": 2, "next": null}}'))


@pytest.mark.parametrize("family", ["qwen_coder", "glm", "minimax", "olmo", "pythonic"])
@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {f"p{number}": {"$ref": "#/$defs/a"} for number in range(100)}},
        {"required": [f"p{number}" for number in range(100)], "additionalProperties": {"$ref": "#/$defs/a"}},
    ],
    ids=["listed", "only required"],
)
def test_c58_large_definitions_are_not_written_once_for_each_of_many_properties(
    family: str, schema: dict[str, Any]
) -> None:
    whole = {"type": "object", "$defs": {"a": {"enum": ["x" * 100_000]}}, **schema}
    asked = replace(ASKED, tools=(Tool("act", None, whole),), tool_choice=REQUIRED)
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequest, match=r"tools: .* more than 100000 characters, at most 100000"):
            grammar_of(GUIDE, family, asked)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 3_000_000, "each property would take 100 kB"


def test_what_is_required_but_not_listed_follows_the_listed_properties() -> None:
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["b", "a"],
    }
    for others, value, wrong in (({"type": "boolean"}, "true", "1"), (True, "[1]", None)):
        tool = Tool("act", None, {**schema, "additionalProperties": others})
        asked = replace(ASKED, tools=(tool,), tool_choice=REQUIRED)
        for family, begin, argument, end in (
            ("glm 4.7", "<tool_call>act", "<arg_key>{}</arg_key><arg_value>{}</arg_value>", "</tool_call>"),
            ("pythonic", "[act(", "{}={}", ")]"),
        ):
            grammar, between = grammar_of(GUIDE, family, asked), ", " if family == "pythonic" else ""
            listed = begin + argument.format("a", 1)
            assert GUIDE.accepts(grammar, listed + between + argument.format("b", value) + end)
            assert not GUIDE.accepts(grammar, listed + end)
            assert wrong is None or not GUIDE.accepts(
                grammar, listed + between + argument.format("b", wrong) + end
            )
    forbidding = Tool("act", None, {**schema, "additionalProperties": False})
    with pytest.raises(InvalidRequest, match="'act' require 'b', but additionalProperties: false forbids it"):
        grammar_of(GUIDE, "minimax", replace(ASKED, tools=(forbidding,), tool_choice=REQUIRED))
    only_required = Tool("act", None, {"required": ["b"], "additionalProperties": {"type": "integer"}})
    grammar = grammar_of(GUIDE, "pythonic", replace(ASKED, tools=(only_required,), tool_choice=REQUIRED))
    assert GUIDE.accepts(grammar, "[act(b=1)]")
    assert not GUIDE.accepts(grammar, "[act()]")


def test_what_python_calls_may_have_beyond_lists_is_read() -> None:
    """A name may come twice, as in JSON. Letters are those that Python's regular expressions know, too."""
    tool = Tool("act", None, {"additionalProperties": {"type": "integer"}})
    asked = replace(ASKED, tools=(tool,), tool_choice=REQUIRED)
    grammar = grammar_of(GUIDE, "pythonic", asked)
    twice = "[act(a=1, b=1, a=2)]"
    assert GUIDE.accepts(grammar, twice)
    assert calls_in(parts_of(format_of("pythonic"), [*twice], asked)) == [("act", '{"a": 2, "b": 1}', True)]
    assert not GUIDE.accepts(grammar, "[act(a\u0301=1)]")


@pytest.mark.parametrize(
    "more", [{"minProperties": 2}, {"patternProperties": {"^x": {"type": "string"}}}], ids=str
)
@pytest.mark.parametrize("family", ["pythonic", "olmo", "glm 4.7"])
def test_what_says_more_than_a_list_of_properties_is_refused_without_a_list_too(
    family: str, more: dict[str, Any]
) -> None:
    tool = Tool("act", None, {"additionalProperties": {"type": "integer"}, **more})
    with pytest.raises(InvalidRequest, match=f"remove {next(iter(more))}"):
        grammar_of(GUIDE, family, replace(ASKED, tools=(tool,), tool_choice=REQUIRED))


@pytest.mark.parametrize("family", TAGGED)
@pytest.mark.parametrize("choice", [REQUIRED, ToolChoice(ToolUse.AUTO)], ids=["required", "auto"])
def test_an_answer_that_ends_in_a_string_with_the_tag_after_a_value_has_no_text(
    family: str, choice: ToolChoice
) -> None:
    """The value is JSON up to the end of the answer, and not a text up to the tag."""
    conversation = with_tool("f", {"a": {"type": ["string", "null"]}}, choice)
    begin, end = TAGGED[family].split("{}")
    value = json.dumps(f"x{end.partition('>')[0]}>y")
    whole = f'{{"a": {value}}}'
    answer = f"{begin}{value}{end}"
    (only,) = parts_of(format_of(family), [answer], conversation).calls
    assert (only.arguments, only.is_whole) == (whole, True)
    for at in range(len(begin), len(answer)):
        parts = parts_of(format_of(family), [*answer[:at]], conversation)
        assert parts.text == ""
        assert whole.startswith(parts.calls[0].arguments)


@pytest.mark.parametrize("family", TAGGED)
def test_a_guided_value_is_json_to_its_end_however_long_it_is(family: str) -> None:
    conversation = with_tool("f", {"a": {"type": ["string", "null"]}}, REQUIRED)
    begin, end = TAGGED[family].split("{}")
    value = json.dumps("x" * MAX_VALUE_CHARACTERS + end.partition(">")[0] + ">y")
    parts = parts_of(format_of(family), [begin, value, end], conversation)
    (only,) = parts.calls
    assert (only.arguments, only.is_whole) == (f'{{"a": {value}}}', True)
    assert parts.text == ""
