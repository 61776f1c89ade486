"""GLM's calls in both notations, and its turns, which begin with a newline in one of them."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from gateway.conversation import (
    AnswerFormat,
    ChatMessage,
    Conversation,
    ReasoningOptions,
    Tool,
    ToolChoice,
    ToolUse,
    Vocabulary,
    answer_format_of,
)
from tests.factories.conversations import (
    ASKED,
    GENERATION,
    TEMPLATES,
    called,
    calls_in,
    format_of,
    merged_events,
    parts_of,
    rendered,
    written_answer,
)
from tests.factories.guided import Guide, both

NOTATIONS = ("glm", "glm 4.7")
REQUIRED = replace(ASKED, tool_choice=ToolChoice(ToolUse.REQUIRED))
OFF = replace(ASKED, reasoning=ReasoningOptions(is_enabled=False))
LINES = "<tool_call>search\n<arg_key>query</arg_key>\n<arg_value>x</arg_value>\n</tool_call>"
CALL = LINES.replace("\n", "")
THINKING = {
    "glm": TEMPLATES["glm"].replace(
        GENERATION,
        "{% if add_generation_prompt %}<|assistant|>{{ '\\n<think></think>' if enable_thinking is defined and "
        "not enable_thinking else '' }}{% endif %}",
    ),
    "glm 4.7": TEMPLATES["glm 4.7"].replace(
        GENERATION,
        "{% if add_generation_prompt %}<|assistant|>{{ '</think>' if enable_thinking is defined and "
        "not enable_thinking else '<think>' }}{% endif %}",
    ),
}
"""Templates that begin or end the reasoning as GLM's do."""


def thinker_and_prompt(
    family: str, conversation: Conversation, vocabulary: Vocabulary
) -> tuple[AnswerFormat, str]:
    """A format of a model that reasons, and the end of its prompt."""
    answer_format = answer_format_of(THINKING[family], vocabulary)
    return answer_format, rendered(answer_format, THINKING[family], conversation)[-40:]


@pytest.mark.parametrize("family", NOTATIONS)
@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        (LINES, '{"query": "x"}'),
        (CALL, '{"query": "x"}'),
        (CALL.replace("search", "\n search \n").replace("</arg_key>", "</arg_key>\n\n "), '{"query": "x"}'),
        (LINES.replace("x", " x\n"), '{"query": " x\\n"}'),
        (CALL.replace("x", ""), '{"query": ""}'),
        (CALL.replace("x", "\n" * 200), '{"query": "' + "\\n" * 200 + '"}'),
        (
            CALL.replace("x", "</arg_valu <arg_value><arg_key>"),
            '{"query": "</arg_valu <arg_value><arg_key>"}',
        ),
        (CALL.replace("query", "days").replace("x", " 5\n"), '{"days": 5}'),
        (CALL.replace("query", "other").replace("x", " y "), '{"other": " y "}'),
        ("<tool_call>search</tool_call>", "{}"),
        ("<tool_call>search\n</tool_call>", "{}"),
    ],
)
def test_every_notation_is_read_and_all_spaces_of_a_string_count(
    family: str, call: str, arguments: str
) -> None:
    for pieces in ([call], [*call]):
        parts = parts_of(format_of(family), pieces)
        assert calls_in(parts) == [("search", arguments, True)]
        assert parts.text == ""


@pytest.mark.parametrize(
    "text",
    [
        "A call begins with <tool_call> and a name.",
        "<tool_call>search",
        "<tool_call>search\n<arg_key>query</arg_key>",
        "<tool_call>search\n<arg_value>x</arg_value></tool_call>",
        "<tool_call>search and find</tool_call>",
        "<tool_call>sea<rch</tool_call>",
        "<tool_call>" + "x" * 129 + "</tool_call>",
        "<tool_call></tool_call>",
        '<tool_call>{"name": "search", "arguments": {}}</tool_call>',
        "<tool_call>search<arg_key>" + "x" * 501 + "</arg_key><arg_value>x</arg_value></tool_call>",
    ],
)
def test_what_is_no_call_is_text(text: str) -> None:
    for pieces in ([text], [*text]):
        parts = parts_of(format_of("glm"), pieces)
        assert (parts.text, parts.calls) == (text, [])


@pytest.mark.parametrize(
    ("answer", "is_whole", "text"),
    [
        (CALL.removesuffix("</tool_call>"), False, ""),
        (CALL.replace("</tool_call>", "no"), False, "no"),
        (CALL.replace("</tool_call>", "<arg_key>days</arg_key>no"), False, "<arg_key>days</arg_key>no"),
        (CALL.removesuffix("</arg_value></tool_call>"), False, ""),
        (CALL + "\nDone.", True, "Done."),
    ],
)
def test_a_call_that_is_cut_or_wrong_is_not_whole(answer: str, is_whole: bool, text: str) -> None:
    whole = merged_events(format_of("glm"), [answer])
    assert merged_events(format_of("glm"), [*answer]) == whole
    parts = parts_of(format_of("glm"), [answer])
    assert [call.is_whole for call in parts.calls] == [is_whole]
    assert parts.text == text


@both
def test_the_grammar_has_the_notation_of_the_template(guide: Guide) -> None:
    for family, own, other in (("glm", LINES, CALL), ("glm 4.7", CALL, LINES)):
        grammar = format_of(family, guide.vocabulary).grammar(REQUIRED, "", None)
        assert grammar is not None
        assert guide.accepts(grammar, own)
        assert not guide.accepts(grammar, other)
        assert guide.accepts(grammar, own.replace("x", " <b>\n x\n"))
        assert not guide.accepts(grammar, own.replace("query", "days"))


@both
@pytest.mark.parametrize("family", NOTATIONS)
def test_arguments_of_any_name_may_be_written_where_no_schema_holds(family: str, guide: Guide) -> None:
    grammar = format_of(family, guide.vocabulary).grammar(ASKED, "", None)
    assert grammar is not None
    call = written_answer(
        format_of(family), TEMPLATES[family], called(("search", '{"a": 1, "b c": "x\\n", "d": null}'))
    )
    assert guide.accepts(grammar, call)
    assert guide.accepts(
        grammar, written_answer(format_of(family), TEMPLATES[family], called(("search", "{}")))
    )
    assert not guide.accepts(grammar, call.replace("b c", "b < c"))


@both
def test_a_turn_may_begin_with_a_newline_as_that_of_glm_4_5_does(guide: Guide) -> None:
    for conversation, also in ((ASKED, ("\nHello.", "Hello.")), (REQUIRED, ())):
        answer_format, prompt_end = thinker_and_prompt("glm", conversation, guide.vocabulary)
        assert prompt_end.endswith("<|assistant|>")
        grammar = answer_format.grammar(conversation, prompt_end, None)
        assert grammar is not None
        for rest in (f"\n{LINES}", f"\n{LINES}\n{LINES}", LINES, *also):
            for thought in ("\n<think></think>", "\n<think>Hm,\nx.</think>", "<think>Hm.</think>", ""):
                assert guide.accepts(grammar, thought + rest)
                parts = parts_of(answer_format, [*thought, *rest], conversation, prompt_end)
                assert parts.reasoning == thought.strip().removeprefix("<think>").removesuffix("</think>")
                assert parts.text.strip() == ("" if parts.calls else "Hello.")
                assert len(parts.calls) == rest.count("<tool_call>")


@both
@pytest.mark.parametrize("family", NOTATIONS)
def test_prompts_begin_or_end_the_reasoning(family: str, guide: Guide) -> None:
    call = LINES if family == "glm" else CALL
    required_off = replace(REQUIRED, reasoning=OFF.reasoning)
    answer_format, prompt_end = thinker_and_prompt(family, required_off, guide.vocabulary)
    grammar = answer_format.grammar(required_off, prompt_end, None)
    assert grammar is not None
    assert prompt_end.endswith("</think>")
    assert guide.accepts(grammar, call)
    assert guide.accepts(grammar, f"\n{call}") is (family == "glm")
    assert not guide.accepts(grammar, f"<think>Hm.</think>{call}")

    answer_format, prompt_end = thinker_and_prompt(family, ASKED, guide.vocabulary)
    begin = "" if prompt_end.endswith("<think>") else "\n<think>"
    assert bool(begin) is (family == "glm")
    parts = parts_of(answer_format, [f"{begin}Hm.</think>Look:{call}"], ASKED, prompt_end)
    assert (parts.reasoning, parts.text, len(parts.calls)) == ("Hm.", "Look:", 1)


@pytest.mark.parametrize("family", NOTATIONS)
def test_spaces_behind_a_prompt_that_ends_the_reasoning_are_dropped(family: str) -> None:
    """GLM-4.5 writes a newline there."""
    for conversation in (OFF, replace(OFF, tools=())):
        answer_format, prompt_end = thinker_and_prompt(family, conversation, Vocabulary())
        parts = parts_of(answer_format, [*"\nHello.\n"], conversation, prompt_end)
        assert (parts.reasoning, parts.text) == ("", "Hello.\n")


def test_reasoning_and_results_are_given_to_the_template() -> None:
    turns = (
        replace(called(("search", '{"query": "x", "days": [1, "ü"]}')), content="Look:", reasoning="Hm."),
        ChatMessage("tool", "None.", tool_call_id="call_0"),
    )
    template = THINKING["glm"].replace("{{ m.content", "{{ m.reasoning_content }}{{ m.content")
    prompt = rendered(answer_format_of(template, Vocabulary()), template, replace(ASKED, messages=turns))
    assert (
        "Hm.Look:\n<tool_call>search\n<arg_key>query</arg_key>\n<arg_value>x</arg_value>\n"
        '<arg_key>days</arg_key>\n<arg_value>[1, "ü"]</arg_value>\n</tool_call>'
    ) in prompt


@both
@pytest.mark.parametrize("family", NOTATIONS)
@pytest.mark.parametrize(
    "days",
    [
        {"type": "number", "multipleOf": 1, "minimum": 0, "maximum": 10},
        {"type": ["number", "null", "integer"], "multipleOf": 1, "minimum": 0, "maximum": 10},
        {"multipleOf": 1, "maximum": 10},
        {"allOf": [{"type": "number", "maximum": 10}, {"multipleOf": 1}]},
    ],
    ids=["a number", "one of several types", "any type", "in allOf"],
)
def test_a_number_without_a_fraction_ends_before_the_tag(
    family: str, guide: Guide, days: dict[str, Any]
) -> None:
    tool = Tool("search", None, {"type": "object", "properties": {"query": days}, "required": ["query"]})
    grammar = format_of(family, guide.vocabulary).grammar(replace(REQUIRED, tools=(tool,)), "", None)
    assert grammar is not None
    call = LINES if family == "glm" else CALL
    matcher = guide.matcher(grammar)
    for token_id in guide.tokenizer.encode(call.replace("x", "7"), add_special_tokens=False).ids:
        mask = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        assert mask[token_id], matcher.get_error()
        assert matcher.consume_token(token_id)
    assert not guide.accepts(grammar, call.replace("x", "7.5"))
