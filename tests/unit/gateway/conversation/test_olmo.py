"""OLMo 3's calls: in Python's notation with JSON values, one a line."""

from dataclasses import replace

import pytest

from gateway.conversation import ToolChoice, ToolUse
from gateway.conversation.events import CallBegins
from gateway.conversation.formats import olmo
from gateway.conversation.python_call import MAX_CALL_CHARACTERS
from tests.factories.conversations import (
    ASKED,
    TEMPLATES,
    called,
    calls_in,
    format_of,
    parts_of,
    written_answer,
)
from tests.factories.guided import Guide
from tests.unit.gateway.conversation.test_turn_grammar import grammar_of

REQUIRED = replace(ASKED, tool_choice=ToolChoice(ToolUse.REQUIRED))
CALL = '<function_calls>search(query="x")</function_calls>'
SEARCH = '{"query": "x"}'


@pytest.mark.parametrize(
    ("answer", "calls", "text"),
    [
        (CALL, [SEARCH], ""),
        (f"I look.\n{CALL}", [SEARCH], "I look."),
        (CALL.replace("</", '\nsearch()\nsearch(query="x")</'), [SEARCH, "{}", SEARCH], ""),
        (CALL.replace('search(query="x")', '\n  search(query="x")\n'), [SEARCH], ""),
        (CALL.replace('"x"', "'x'"), [SEARCH], ""),
        (CALL.replace('"x"', '[null, {"a": None}], days=False'), ['{"query": [null, {"a": null}], "days": false}'], ""),
        (CALL.replace('"x"', '")</function_calls>"'), ['{"query": ")</function_calls>"}'], ""),
        (CALL.removesuffix("</function_calls>"), [SEARCH], ""),
    ],
)  # fmt: skip
def test_calls_are_read(answer: str, calls: list[str], text: str) -> None:
    for pieces in ([answer], [*answer]):
        parts = parts_of(format_of("olmo"), pieces)
        assert calls_in(parts) == [("search", arguments, True) for arguments in calls]
        assert parts.text == text


@pytest.mark.parametrize(
    "text",
    [
        "Calls are between <function_calls> and its end.",
        "<function_calls></function_calls>",
        "<function_calls>search</function_calls>",
        "<function_calls>a b()</function_calls>",
        "<function_calls>search(x)</function_calls>",
        "<function_calls>search(query=1e999)</function_calls>",
        'search(query="x")',
    ],
)
def test_other_text_is_no_call(text: str) -> None:
    parts = parts_of(format_of("olmo"), [*text])
    assert not calls_in(parts)
    assert parts.text == text


def test_an_unknown_name_is_a_call_too() -> None:
    """The marker says so. The client answers it with an error, as a call of any other format."""
    assert calls_in(parts_of(format_of("olmo"), [CALL.replace("search", "seek")])) == [("seek", SEARCH, True)]


def test_many_long_texts_behind_markers_are_not_held_back() -> None:
    answer = '<function_calls>search(query="' + "x" * (2 * MAX_CALL_CHARACTERS)
    parts = parts_of(format_of("olmo"), [answer] * 40)
    assert parts.text == answer * 40


def test_what_only_begins_like_a_call_is_not_read_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each text follows a call and a marker, and ends after all the other texts."""
    monkeypatch.setattr(olmo, "MAX_CALL_CHARACTERS", 4_096)
    parser = format_of("olmo").new_parser(ASKED, "")
    assert parser is not None
    events = parser.push("<function_calls>search()\nsearch(" * 150)
    assert sum(isinstance(event, CallBegins) for event in events) > 100


@pytest.mark.parametrize("has_markers", [True, False])
def test_calls_are_guided_as_the_template_writes_them(has_markers: bool) -> None:
    guide = Guide(has_markers=has_markers)
    answer_format = format_of("olmo", guide.vocabulary)
    one = written_answer(answer_format, TEMPLATES["olmo"], called(("search", SEARCH)))
    assert one == CALL
    two = CALL.replace("</", '\nsearch(query="x")</')
    for is_parallel in (True, False):
        grammar = grammar_of(guide, "olmo", replace(REQUIRED, parallel_tool_calls=is_parallel))
        assert guide.accepts(grammar, one)
        assert guide.accepts(grammar, two) is is_parallel
        assert not guide.accepts(grammar, one.replace("query", "quer"))
        assert not guide.accepts(grammar, two.replace("\n", ""))


def test_mentions_of_calls_take_nothing_from_a_long_call() -> None:
    answer = "<function_calls>act(x) " * 20 + CALL.replace('"x"', f'"{"x" * 5_000}"')
    assert calls_in(parts_of(format_of("olmo"), [answer])) == [
        ("search", f'{{"query": "{"x" * 5_000}"}}', True)
    ]
