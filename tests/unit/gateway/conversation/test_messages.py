"""Forms of a conversation for chat templates that refuse it as it is."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest

from gateway.conversation import ChatMessage, ToolCall, stricter_forms, with_descriptions
from gateway.conversation.messages import one_call_per_turn
from tests.factories.conversations import ASKED, SEARCH, WEATHER
from tests.factories.costs import expect_cost_in_proportion

FIRST, LATE = ChatMessage("system", "Be brief"), ChatMessage("system", "In Dutch")
(USER,) = ASKED.messages
BOB = ChatMessage("user", "Or cold?", name="bob")
ANSWER = ChatMessage("assistant", "Yes", reasoning="It is July")
CALL = ChatMessage("assistant", "", reasoning="I should look", tool_calls=(ToolCall("1", "search", "{}"),))
RESULT = ChatMessage("tool", "found", tool_call_id="1", name="search")


def forms(*messages: ChatMessage) -> list[Sequence[ChatMessage]]:
    conversation = replace(ASKED, messages=messages, tools=(WEATHER,))
    return [form.messages for form in stricter_forms(conversation)]


@pytest.mark.parametrize(
    "messages",
    [
        (),
        (USER,),
        (FIRST, USER),
        (FIRST,),
        (USER, BOB),
        (USER, CALL, RESULT, CALL, RESULT, ANSWER, USER),
        (USER, CALL, CALL, RESULT, RESULT),
    ],
)
def test_a_conversation_without_anything_to_join_has_no_other_form(messages: tuple[ChatMessage, ...]) -> None:
    assert forms(*messages) == []


@pytest.mark.parametrize("messages", [(FIRST, LATE, USER), (FIRST, USER, LATE), (USER, FIRST, LATE)])
def test_all_system_messages_become_the_first(messages: tuple[ChatMessage, ...]) -> None:
    assert forms(*messages) == [(ChatMessage("system", "Be brief\n\nIn Dutch"), USER)]
    assert forms(USER, LATE) == [(LATE, USER)]


def test_adjacent_messages_of_one_author_become_one() -> None:
    assert forms(USER, USER, BOB, USER) == [
        (ChatMessage("user", f"{USER.content}\n\n{USER.content}"), BOB, USER)
    ]
    assert forms(ANSWER, CALL, RESULT) == [
        (replace(CALL, content="Yes", reasoning="It is July\n\nI should look"), RESULT)
    ]


def test_each_form_is_stricter_than_the_one_before() -> None:
    joined = replace(USER, content=f"{USER.content}\n\n{USER.content}")
    assert forms(USER, LATE, USER, CALL, RESULT, USER, FIRST, USER) == [
        (system := ChatMessage("system", "In Dutch\n\nBe brief"), USER, USER, CALL, RESULT, USER, USER),
        (system, joined, CALL, RESULT, joined),
        (system, joined, CALL, replace(RESULT, content=f"found\n\n{joined.content}")),
    ]


def test_a_turn_with_several_calls_becomes_a_turn_for_each_call_with_its_result() -> None:
    first, second = (ToolCall(call_id, "search", "{}") for call_id in "12")
    both = replace(CALL, content="Let me see", tool_calls=(first, second))
    found, lost = RESULT, replace(RESULT, content="nothing", tool_call_id="2")
    split = (
        USER,
        ChatMessage("assistant", "Let me see"),
        replace(CALL, tool_calls=(first,)),
        found,
        replace(CALL, reasoning=None, tool_calls=(second,)),
        lost,
    )

    joined = (USER, replace(split[2], content="Let me see"), *split[3:])
    assert forms(USER, both, lost, found) == [split, joined]
    assert forms(USER, both, lost, found, LATE) == [
        (LATE, USER, both, lost, found),
        (*split, LATE),
        (LATE, *split),
        (LATE, *joined),
    ]


def test_a_result_follows_its_call_though_another_turn_with_a_call_came_in_between() -> None:
    """The template of gpt-oss takes a result as that of the call before it."""
    other = replace(CALL, tool_calls=(ToolCall("2", "search", "{}"),))
    found, lost = RESULT, replace(RESULT, content="nothing", tool_call_id="2")
    late = replace(RESULT, content="late", tool_call_id="0")

    split = one_call_per_turn((USER, CALL, other, late, found, lost, ANSWER))

    assert split == (USER, CALL, found, other, lost, late, ANSWER)


def test_each_tool_gets_a_description_if_it_has_none() -> None:
    asked = replace(ASKED, tools=(WEATHER, SEARCH))

    assert with_descriptions(asked) == replace(asked, tools=(WEATHER, replace(SEARCH, description="")))
    assert with_descriptions(replace(ASKED, tools=(WEATHER,))) == replace(ASKED, tools=(WEATHER,))


def test_thousands_of_long_messages_take_little() -> None:
    text = "x" * 256

    def join(num_messages: int) -> None:
        (joined,) = forms(*(ChatMessage("user", text) for _ in range(num_messages)))
        assert len(joined[0].content) == num_messages * (len(text) + 2) - 2

    expect_cost_in_proportion(lambda num_messages: partial(join, num_messages), 4_096)
