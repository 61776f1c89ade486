"""Items become the turns that a model's template gets; the oldest exchanges go first where a prompt is too long."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from baton.errors import InvalidRequest, PromptTooLong
from gateway.conversation import ChatMessage, Conversation, ReasoningOptions, ToolCall, ToolChoice, ToolUse
from gateway.http.responses.conversation import check_calls, conversation_of, messages_of, shortened
from gateway.http.responses.create_request import ResponseRequest
from gateway.http.responses.items import KeptItem, as_kept
from tests.factories.costs import expect_cost_in_proportion


def items_of(*items: dict[str, Any]) -> list[KeptItem]:
    return ResponseRequest.model_validate({"model": "tiny", "input": list(items)}).items  # type: ignore[return-value]


def call(number: int, **fields: Any) -> dict[str, Any]:
    head = {"type": "function_call", "call_id": f"call_{number}", "name": f"f{number}", "arguments": "{}"}
    return head | fields


def result(number: int, output: Any = "4") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": f"call_{number}", "output": output}


USER = {
    "role": "user",
    "content": [{"type": "input_text", "text": "Hel"}, {"type": "input_text", "text": "lo"}],
}
THOUGHT = {
    "type": "reasoning",
    "id": "rs_1",
    "summary": [],
    "content": [{"type": "reasoning_text", "text": "Hm"}],
}


def test_c58_reasoning_of_many_items_costs_in_proportion() -> None:
    thought = THOUGHT | {"content": [{"type": "reasoning_text", "text": "x" * 2_000}]}

    def prepare(number: int) -> Callable[[], object]:
        return partial(messages_of, items_of(*([thought] * number)))

    expect_cost_in_proportion(prepare, 4_000)


def test_what_the_assistant_did_at_once_is_one_turn() -> None:
    said = {"type": "message", "role": "assistant", "content": "Look:"}
    messages = messages_of(items_of(USER, THOUGHT, said, call(0), call(1), result(0), result(1)))
    calls = (ToolCall("call_0", "f0", "{}"), ToolCall("call_1", "f1", "{}"))
    assert messages == (
        ChatMessage("user", "Hello"),
        ChatMessage("assistant", "Look:", reasoning="Hm", tool_calls=calls),
        ChatMessage("tool", "4", tool_call_id="call_0", name="f0"),
        ChatMessage("tool", "4", tool_call_id="call_1", name="f1"),
    )


def test_another_text_or_thought_begins_another_turn() -> None:
    said = {"role": "assistant", "content": [{"type": "output_text", "text": "A", "annotations": []}]}
    messages = messages_of(items_of(said, said, call(0), THOUGHT, call(1)))
    assert [(turn.content, turn.reasoning, len(turn.tool_calls)) for turn in messages] == [
        ("A", None, 0),
        ("A", None, 1),
        ("", "Hm", 1),
    ]


def test_what_another_provider_encrypted_is_ignored() -> None:
    foreign = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAAA"}
    said = {"role": "assistant", "content": "A"}
    summary = [{"type": "summary_text", "text": "Hm"}]
    messages = messages_of(items_of(foreign, said, USER, foreign | {"summary": summary}, call(0), foreign))
    assert [(turn.content, turn.reasoning, len(turn.tool_calls)) for turn in messages] == [
        ("A", None, 0),
        ("Hello", None, 0),
        ("", "Hm", 1),
    ]
    assert "gAAAA" not in str([as_kept(item, "x") for item in items_of(foreign)])


def test_a_text_behind_a_call_does_not_part_it_from_its_result() -> None:
    said = {"role": "assistant", "content": "Let me see"}
    called, answered = messages_of(items_of(call(0), said, result(0)))
    assert (called.content, [each.id for each in called.tool_calls]) == ("Let me see", ["call_0"])
    assert answered.role == "tool"


def test_a_call_that_was_cut_off_is_not_shown_to_the_model() -> None:
    assert messages_of(items_of(USER, call(0, status="incomplete", arguments='{"a'))) == (
        ChatMessage("user", "Hello"),
    )


def test_the_result_of_a_call_that_was_cut_off_is_not_shown_either() -> None:
    """Some agents answer such a call, with an error about its arguments."""
    cut = call(1, status="incomplete", arguments='{"a')
    items = items_of(USER, call(0), cut, result(0), result(1), call(1), result(1, "5"))
    assert [
        (turn.role, turn.content, [each.id for each in turn.tool_calls]) for turn in messages_of(items)
    ] == [
        ("user", "Hello", []),
        ("assistant", "", ["call_0"]),
        ("tool", "4", []),
        ("assistant", "", ["call_1"]),
        ("tool", "5", []),
    ]


def test_a_result_without_its_call_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="input: no function_call with the call_id 'call_7' precedes"):
        messages_of(items_of(USER, result(7)))


def test_two_calls_of_a_turn_with_one_id_are_refused() -> None:
    with pytest.raises(
        InvalidRequest, match="input: two function_calls of one turn have the call_id 'call_0'"
    ):
        messages_of(items_of(USER, call(0), call(0), result(0)))
    assert len(messages_of(items_of(USER, call(0), result(0), call(0), result(0)))) == 5, "of two turns"


@pytest.mark.parametrize("arguments", ['{"a', "[]", "1", '{"a": {"b": 1}'])
def test_a_whole_call_without_valid_arguments_is_named(arguments: str) -> None:
    with pytest.raises(InvalidRequest, match=r"input\.1\.arguments: must be a JSON object"):
        check_calls(items_of(USER, call(0, arguments=arguments)))
    check_calls(items_of(USER, call(0, arguments=arguments, status="incomplete"), call(1, arguments="")))


def test_summaries_stand_for_reasoning_that_is_not_there() -> None:
    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "In short"}]}
    assert messages_of(items_of(thought))[0].reasoning == "In short"


def test_a_result_in_parts_is_one_text() -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    assert messages_of(items_of(call(0), result(0, parts)))[1].content == "ab"


def test_a_conversation_has_the_bodys_tools_and_choices() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    body = ResponseRequest.model_validate(
        {
            "model": "tiny",
            "input": "Hello",
            "instructions": "Be brief",
            "tools": [
                {"type": "function", "name": "f", "parameters": schema},
                {"type": "function", "name": "g", "parameters": None, "strict": False},
            ],
            "tool_choice": {
                "type": "allowed_tools",
                "mode": "required",
                "tools": [{"type": "function", "name": "f"}],
            },
            "parallel_tool_calls": False,
            "reasoning": {"effort": "low"},
        }
    )
    conversation = conversation_of(body, items_of(USER))
    assert conversation.messages == (ChatMessage("system", "Be brief"), ChatMessage("user", "Hello"))
    f, g = conversation.tools
    assert (f.name, f.parameters, f.strict) == ("f", schema, True)
    assert (g.parameters, g.strict) == ({"type": "object", "properties": {}}, False)
    assert conversation.tool_choice == ToolChoice(ToolUse.REQUIRED, ("f",))
    assert not conversation.parallel_tool_calls
    assert conversation.reasoning == ReasoningOptions(effort="low")


def test_a_named_function_is_called_once() -> None:
    f = {"type": "function", "name": "f"}
    body = {"model": "tiny", "input": "Hello", "tools": [f], "tool_choice": f, "parallel_tool_calls": True}
    assert not conversation_of(ResponseRequest.model_validate(body), items_of(USER)).parallel_tool_calls
    several = ResponseRequest.model_validate(body | {"tool_choice": "required"})
    assert conversation_of(several, items_of(USER)).parallel_tool_calls


@pytest.mark.parametrize("room", range(3, 12))
async def test_the_oldest_exchanges_go_first_and_no_more_than_must(room: int) -> None:
    turns = [ChatMessage("system", "s")]
    for number in range(5):
        turns += [ChatMessage("user", f"u{number}"), ChatMessage("assistant", f"a{number}")]
    asked: list[int] = []

    async def fits(conversation: Conversation) -> bool:
        asked.append(len(conversation.messages))
        return len(conversation.messages) <= room

    found = (await shortened(Conversation(tuple(turns)), fits)).messages
    num_left = max(1, min(5, (room - 1) // 2))
    assert found == (turns[0], *turns[-2 * num_left :])
    assert len(asked) <= 3


async def test_calls_stay_beside_their_results() -> None:
    turns = messages_of(items_of(USER, call(0), result(0), USER, call(1), result(1), USER))

    async def fits(conversation: Conversation) -> bool:
        return len(conversation.messages) <= 5

    found = (await shortened(Conversation(turns), fits)).messages
    assert [turn.role for turn in found] == ["user", "assistant", "tool", "user"]


async def test_a_last_exchange_that_is_too_long_is_an_error() -> None:
    async def fits(conversation: Conversation) -> bool:
        return False

    with pytest.raises(
        PromptTooLong, match="prompt is too long: the system messages and the last exchange alone"
    ):
        await shortened(Conversation(messages_of(items_of(USER, USER, USER))), fits)


@pytest.mark.parametrize(
    ("items", "room", "num_left"),
    [
        ((USER, call(0), USER, result(0), USER), 3, 1),
        ((USER, USER, call(0), USER, USER, result(0), USER), 4, 1),
        ((USER, USER, call(0), USER, USER, result(0), USER), 6, 6),
        ((USER, call(0), call(1), result(0), USER, result(1), USER, USER), 4, 2),
        ((USER, call(0), result(0), USER, call(0), USER, result(0), USER), 3, 1),
        ((USER, call(0), result(0), USER, call(0), USER, result(0), USER), 5, 5),
        ((USER, call(0), USER, USER), 2, 2),
    ],
)
async def test_a_message_between_a_call_and_its_result_stays_with_both(
    items: tuple[dict[str, Any], ...], room: int, num_left: int
) -> None:
    messages = messages_of(items_of(*items))

    async def fits(conversation: Conversation) -> bool:
        return len(conversation.messages) <= room

    assert (await shortened(Conversation(messages), fits)).messages == messages[-num_left:]


async def test_a_single_exchange_cannot_be_shortened() -> None:
    async def fits(conversation: Conversation) -> bool:
        raise AssertionError("nothing to ask")

    with pytest.raises(PromptTooLong, match="prompt is too long, and has no earlier exchange"):
        await shortened(Conversation(messages_of(items_of(USER, call(0), result(0)))), fits)
