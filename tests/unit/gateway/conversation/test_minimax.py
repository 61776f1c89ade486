"""MiniMax-M2's calls: several in one block, behind reasoning that the prompt has begun."""

from dataclasses import replace

import pytest

from gateway.conversation import ToolChoice, ToolUse, answer_format_of
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

REQUIRED = replace(ASKED, tool_choice=ToolChoice(ToolUse.REQUIRED))
CALL = """<minimax:tool_call>
<invoke name="search">
<parameter name="query">V</parameter>
</invoke>
</minimax:tool_call>"""
THINKING = TEMPLATES["minimax"].replace(
    GENERATION, "{% if add_generation_prompt %}]~b]ai\n<think>\n{% endif %}"
)
"""A template that begins the reasoning as MiniMax's does."""


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        (CALL, '{"query": "V"}'),
        (CALL.replace("\n", ""), '{"query": "V"}'),
        (CALL.replace("\n", "\n  "), '{"query": "V"}'),
        (CALL.replace("V", " x\n"), '{"query": " x\\n"}'),
        (CALL.replace("V", "</paramete <parameter"), '{"query": "</paramete <parameter"}'),
        (CALL.replace("query", "days").replace("V", " 5\n"), '{"days": 5}'),
        (CALL.replace('<parameter name="query">V</parameter>\n', ""), "{}"),
    ],
)
def test_a_call_is_read_and_all_spaces_of_a_string_count(call: str, arguments: str) -> None:
    for pieces in ([call], [*call]):
        parts = parts_of(format_of("minimax"), pieces)
        assert calls_in(parts) == [("search", arguments, True)]
        assert parts.text == ""


@pytest.mark.parametrize(
    "text",
    [
        "A block begins with <minimax:tool_call> and a call.",
        "<minimax:tool_call>\n</minimax:tool_call>",
        '<minimax:tool_call>\n<invoke name="a b">\n</invoke>\n</minimax:tool_call>',
        '<minimax:tool_call>\n<invoke name="search" x="y">\n</invoke>\n</minimax:tool_call>',
        '<invoke name="search">\n</invoke>',
        '<minimax:tool_call>{"name": "search", "parameters": {}}</minimax:tool_call>',
    ],
)
def test_what_is_no_call_is_text(text: str) -> None:
    for pieces in ([text], [*text]):
        parts = parts_of(format_of("minimax"), pieces)
        assert (parts.text, parts.calls) == (text, [])


@pytest.mark.parametrize(
    ("answer", "are_whole", "text"),
    [
        (CALL.removesuffix("</invoke>\n</minimax:tool_call>"), [False], ""),
        (CALL.removesuffix("\n</minimax:tool_call>"), [True], ""),
        (CALL.replace("</minimax:tool_call>", '<invoke name="f">\n'), [True, False], ""),
        (CALL.replace("</minimax:tool_call>", '<invoke name="f'), [True], ""),
        (CALL.replace("</minimax:tool_call>", '<invoke name="f f">x'), [True], '<invoke name="f f">x'),
        (CALL.replace("</invoke>", "no"), [False], "no\n</minimax:tool_call>"),
        (f"{CALL}\nDone.", [True], "Done."),
        (f"{CALL}\n{CALL}", [True, True], ""),
    ],
)
def test_a_block_that_is_cut_or_wrong_has_the_calls_before(
    answer: str, are_whole: list[bool], text: str
) -> None:
    whole = merged_events(format_of("minimax"), [answer])
    assert merged_events(format_of("minimax"), [*answer]) == whole
    parts = parts_of(format_of("minimax"), [answer])
    assert [call.is_whole for call in parts.calls] == are_whole
    assert parts.text.strip() == text


@both
def test_behind_reasoning_a_block_may_begin_as_the_template_writes_it(guide: Guide) -> None:
    answer_format = answer_format_of(THINKING, guide.vocabulary)
    for conversation in (ASKED, REQUIRED):
        prompt_end = rendered(answer_format, THINKING, conversation)[-20:]
        grammar = answer_format.grammar(conversation, prompt_end, None)
        assert grammar is not None
        for gap in ("", "\n", "\n\n", "\n\n\n"):
            answer = f"Hm.\n</think>{gap}{CALL}"
            assert guide.accepts(grammar, answer)
            parts = parts_of(answer_format, [*answer], conversation, prompt_end)
            assert (parts.reasoning, parts.text, len(parts.calls)) == ("Hm.", "", 1)
        assert guide.accepts(grammar, "Hm.\n</think>\n\nHello.") is (conversation is ASKED)


@both
def test_arguments_of_any_name_may_be_written_where_no_schema_holds(guide: Guide) -> None:
    answer_format = format_of("minimax", guide.vocabulary)
    grammar = answer_format.grammar(ASKED, "", None)
    assert grammar is not None
    calls = called(("search", '{"a": 1, "b c": "x\\n", "d": null}'), ("search", "{}"))
    answer = written_answer(answer_format, TEMPLATES["minimax"], calls)
    assert guide.accepts(grammar, answer)
    assert not guide.accepts(grammar, answer.replace("b c", 'b"c'))
