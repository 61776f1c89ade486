"""A model's chat template says how it writes calls, and what it can be told."""

from dataclasses import replace
from typing import get_args

import pytest

from baton.config.gateway import AnswerFormatName
from baton.errors import ConfigError, InvalidRequest
from gateway.conversation import (
    FORMAT_NAMES,
    ChatMessage,
    Conversation,
    ReasoningOptions,
    Text,
    Tool,
    Vocabulary,
    answer_format_of,
)
from gateway.conversation.formats.choice import FAMILIES
from gateway.conversation.model_format import ModelFormat
from gateway.conversation.template import ChatTemplate
from gateway.requests.request import Delta
from tests.factories.conversations import (
    ASKED,
    TEMPLATES,
    THINKING,
    called,
    format_of,
    name_of,
    parts_of,
    rendered,
    written_answer,
)

HELLO = Conversation((ChatMessage("user", "Hello"),))


@pytest.mark.parametrize("family", TEMPLATES)
def test_a_template_shows_its_family(family: str) -> None:
    by_template = format_of(family)
    by_name = answer_format_of(TEMPLATES[family], Vocabulary(), name_of(family))

    assert isinstance(by_template, ModelFormat)
    assert isinstance(by_name, ModelFormat)
    assert by_template.syntax is by_name.syntax
    assert by_template.syntax in [each.syntax for each in FAMILIES if each.name == name_of(family)]


def test_glm_is_known_by_its_tags_however_a_template_describes_a_call() -> None:
    for family, other in (("glm", "{name}"), ("glm 4.7", "{name}"), ("glm 4.7", "{function-name}\n  ")):
        template = TEMPLATES[family].replace("{function-name}", other).replace("{arg-key-1}", "{key}")
        own, found = format_of(family), answer_format_of(template, Vocabulary())
        assert isinstance(own, ModelFormat)
        assert isinstance(found, ModelFormat)
        assert found.syntax is own.syntax


LOOKALIKES = {
    "MiniMax-M3": """{%- set ns = ']<]minimax[>[' %}{%- set begin = ns ~ '<tool_call>' %}{{ tools | tojson }}
{{ begin ~ ns ~ '<invoke name="tool-name-1">' ~ ns ~ '<param-1>value-1' ~ ns ~ '</param-1>' ~ ns ~ '</invoke>' }}""",
    "Apriel-1.5": """{{ tools }}Return all function calls as a list of json objects within <tool_call></tool_call> tags:
<tool_calls>[{"name": <function-name-1>, "arguments": <args-dict-1>}, ...]</tool_calls>""",
    "LFM2.5": """{{ tools }}{%- set calls.calls = calls.calls + [func_name + "(" + (args | join(", ")) + ")"] %}
{{ "<|tool_call_start|>[" + (calls.calls | join(", ")) + "]<|tool_call_end|>" }}""",
}
"""Templates with the signs of a family whose form of calls their models do not write."""


@pytest.mark.parametrize("model", LOOKALIKES)
def test_a_template_that_looks_like_one_of_another_model_gets_no_format_of_it(model: str) -> None:
    found = answer_format_of(LOOKALIKES[model], Vocabulary())
    assert "tools" not in found.template_arguments(ASKED), "a system message describes them"


def test_every_format_has_a_template_here_and_can_be_configured() -> None:
    assert {*map(name_of, TEMPLATES), "harmony"} == set(FORMAT_NAMES)
    assert len(TEMPLATES) == len(FAMILIES) - 1, "each row of the table has a template of its own"
    assert {*get_args(AnswerFormatName)} == {"auto", *FORMAT_NAMES}


def test_a_template_that_reads_no_tools_has_them_described() -> None:
    remembers_calls = TEMPLATES["deepseek_v3"].replace("tools", "functions")

    answer = written_answer(
        answer_format_of(remembers_calls, Vocabulary()), remembers_calls, called(("search", "{}"))
    )

    assert answer == '<tool_call>\n{"name": "search", "arguments": {}}\n</tool_call>'
    with pytest.raises(
        ConfigError, match=r"gateway.answer_format: 'hermes' needs a chat template that reads `tools`"
    ):
        answer_format_of(remembers_calls, Vocabulary(), "hermes")
    answer_format_of(remembers_calls, Vocabulary(), "generic")


def test_described_tools_and_results_are_ordinary_turns() -> None:
    messages = (
        ChatMessage("system", "Be brief."),
        ChatMessage("user", "Search.", name="bob"),
        replace(called(("search", '{"query":"a"}'), ("search", '{"query":"ü"}')), content="Yes."),
        ChatMessage("tool", "A", tool_call_id="call_0", name="search"),
        ChatMessage("tool", "B", tool_call_id="call_1", name="search"),
        ChatMessage("user", "And?"),
    )
    conversation = replace(ASKED, messages=messages)

    turns = format_of("generic").template_arguments(conversation)["conversation"]

    assert [turn["role"] for turn in turns] == ["system", "user", "assistant", "user"]
    assert [turn.get("name") for turn in turns] == [None, "bob", None, None]
    assert turns[0]["content"].startswith("Be brief.\n\n")
    assert '"name": "get_weather", "description": "The weather of a city"' in turns[0]["content"]
    assert turns[2]["content"] == (
        'Yes.\n<tool_call>\n{"name": "search", "arguments": {"query": "a"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "search", "arguments": {"query": "ü"}}\n</tool_call>'
    )
    assert turns[3]["content"] == (
        "<tool_response>\nA\n</tool_response>\n<tool_response>\nB\n</tool_response>\nAnd?"
    )


@pytest.mark.parametrize(
    "words", ["System role not supported", "Only user and assistant roles are supported!"]
)
def test_tools_are_described_to_the_user_where_a_template_has_no_system_role(words: str) -> None:
    refusing = f"{{% if messages[0].role == 'system' %}}{{{{ raise_exception('{words}') }}}}{{% endif %}}"
    answer_format = answer_format_of(refusing + TEMPLATES["generic"], Vocabulary())

    turns = answer_format.template_arguments(ASKED)["conversation"]

    assert [turn["role"] for turn in turns] == ["user"]
    assert turns[0]["content"].endswith("\n\nIs it warm in Zürich?")
    assert "Is it warm" in rendered(answer_format, refusing + TEMPLATES["generic"], ASKED)


def test_a_plain_conversation_is_what_it_was() -> None:
    for family in TEMPLATES:
        answer_format = format_of(family)
        assert answer_format.template_arguments(HELLO) == {
            "conversation": [{"role": "user", "content": "Hello"}]
        }
        assert answer_format.new_parser(HELLO, "") is None
    assert Delta(text="<tool_call>").events(None) == [Text("<tool_call>")]


def test_ids_arguments_and_content_are_as_the_family_expects() -> None:
    turn = called(("search", '{"query":"x"}'))

    def turn_in(family: str) -> dict[str, object]:
        asked = replace(ASKED, messages=(turn, ChatMessage("tool", "A", tool_call_id="call_0")))
        first, second = format_of(family).template_arguments(asked)["conversation"]
        (call,) = first["tool_calls"]
        assert call["id"] == second["tool_call_id"]
        return {"id": call["id"], "arguments": call["function"]["arguments"], "content": first["content"]}

    assert turn_in("hermes") == {"id": "call_0", "arguments": {"query": "x"}, "content": ""}
    assert turn_in("deepseek_v3") == {"id": "call_0", "arguments": '{"query":"x"}', "content": None}
    short = turn_in("mistral")["id"]
    assert isinstance(short, str)
    assert len(short) == 9
    assert short.isalnum()


def test_a_switch_of_the_template_turns_reasoning_off_and_on() -> None:
    answer_format = answer_format_of(THINKING, Vocabulary())
    off = replace(HELLO, reasoning=ReasoningOptions(is_enabled=False))

    prompt = rendered(answer_format, THINKING, off)

    assert prompt.endswith("<think>\n\n</think>\n\n")
    assert answer_format.new_parser(off, prompt[-40:]) is None
    on = rendered(answer_format, THINKING, replace(HELLO, reasoning=ReasoningOptions(is_enabled=True)))
    parser = answer_format.new_parser(HELLO, on[-40:])
    assert parser is not None
    same = replace(off, template_options={"enable_thinking": False})
    assert rendered(answer_format, THINKING, same) == prompt
    with pytest.raises(InvalidRequest, match="reasoning: asks for enable_thinking=False"):
        rendered(answer_format, THINKING, replace(off, template_options={"enable_thinking": True}))


def test_a_template_that_only_reads_the_end_of_reasoning_is_of_a_model_that_reasons() -> None:
    template = TEMPLATES["hermes"].replace("m.content or ''", "m.content.split('</think>')[-1]")
    parts = parts_of(answer_format_of(template, Vocabulary()), ["<think>Hm.</think>Yes."], HELLO)
    assert (parts.reasoning, parts.text) == ("Hm.", "Yes.")


def test_only_variables_that_the_template_reads_are_passed() -> None:
    template = TEMPLATES["hermes"] + "{# thinking #}{{ reasoning_effort }} thinking"
    answer_format = answer_format_of(template, Vocabulary())

    low = replace(HELLO, reasoning=ReasoningOptions(effort="low"))
    assert answer_format.template_arguments(low)["reasoning_effort"] == "low"
    without = answer_format_of(TEMPLATES["hermes"], Vocabulary()).template_arguments(low)
    assert "reasoning_effort" not in without, "agents send a level to every model"
    for name in ("enable_thinking", "thinking", "preserve_thinking", "add_vision_id"):
        arguments = answer_format.template_arguments(replace(HELLO, template_options={name: True}))
        assert name not in arguments, "clients send it to every model"
    for name in ("tokenize", "chat_template", "tools", "no_such", "enable_thinkin"):
        with pytest.raises(InvalidRequest, match=f"^template_options: .* no variable '{name}'"):
            answer_format.template_arguments(replace(HELLO, template_options={name: True}))


@pytest.mark.parametrize(
    "before",
    [
        r"{{ 'the user\'s' }}",
        r'{{ "an \" inch" }}',
        "{{ '}}' }}",
        "{{ '%}' ~ \"it's\" }}",
        "{# don't {% #}",
        "{{ '{#' }}",
        "{{ {'a': {'b': 1}}.a }}",
        "{% raw %}{{ no_such }}{% endraw %}",
    ],
)
def test_a_variable_is_found_after_any_string_or_comment(before: str) -> None:
    template = TEMPLATES["hermes"] + before + "{{ 'a } b' ~ ('on' if enable_thinking else '') }} no_such"
    answer_format = answer_format_of(template, Vocabulary())

    on = replace(HELLO, template_options={"enable_thinking": True})
    assert rendered(answer_format, template, on).endswith("a } bon no_such")
    with pytest.raises(InvalidRequest, match="no variable 'no_such'"):
        answer_format.template_arguments(replace(HELLO, template_options={"no_such": True}))


def test_a_variable_is_found_after_a_nested_dictionary() -> None:
    template = TEMPLATES["hermes"] + "{% set two = [{'a': {'b': 1}}, enable_thinking] %}{{ two[1] }}"
    answer_format = answer_format_of(template, Vocabulary())

    on = replace(HELLO, template_options={"enable_thinking": 7})
    assert rendered(answer_format, template, on).endswith("7")


def test_a_template_with_a_syntax_error_has_the_names_before_it() -> None:
    template = ChatTemplate("{{ tools }}{% if messages[0] . content %}{% ) thinking %}")
    assert template.reads("tools")
    assert not template.reads("content")
    assert not template.reads("thinking")


def test_reasoning_is_sent_back_where_the_template_reads_it() -> None:
    template = TEMPLATES["hermes"].replace("{{ m.content", "{{ m.reasoning_content }}{{ m.content")
    turn = ChatMessage("assistant", "Yes.", reasoning="Hm. ")

    assert written_answer(answer_format_of(template, Vocabulary()), template, turn) == "Hm. Yes."
    assert written_answer(format_of("hermes"), TEMPLATES["hermes"], turn) == "Yes."


def test_a_tool_without_a_description_has_none() -> None:
    tools = format_of("hermes").template_arguments(replace(HELLO, tools=(Tool("a"),)))["tools"]

    assert tools == [
        {"type": "function", "function": {"name": "a", "parameters": {"type": "object", "properties": {}}}}
    ]


@pytest.mark.parametrize("family", ["mistral", "generic"])
def test_a_template_that_reads_reasoning_in_a_part_of_the_content_gets_it_there(family: str) -> None:
    """The template of Magistral does this."""
    content = (
        "{% if m.role == 'assistant' and m.content is not string %}{% for part in m.content %}"
        "{% if part['type'] == 'thinking' %}[THINK]{{ part['thinking'] }}[/THINK]"
        "{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}"
        "{% else %}{{ m.content }}{% endif %}"
    )
    template = TEMPLATES[family].replace(" or ''", "").replace("{{ m.content }}", content)
    answer_format = answer_format_of(template, Vocabulary())

    def prompt_with(turn: ChatMessage) -> str:
        return rendered(answer_format, template, replace(HELLO, messages=(*HELLO.messages, turn)))

    answer = ChatMessage("assistant", "Hi.", reasoning="They greet.")
    assert "assistant\n[THINK]They greet.[/THINK]Hi." in prompt_with(answer)
    assert "assistant\n[THINK]They greet.[/THINK]" in prompt_with(
        replace(called(("f", "{}")), reasoning="They greet.")
    )
    assert "assistant\nHi." in prompt_with(replace(answer, reasoning=None))
