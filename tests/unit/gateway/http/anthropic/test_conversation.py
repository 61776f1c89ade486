"""Turns and blocks become messages; what fits nowhere is refused by its place."""

from typing import Any

import pytest
from pydantic import ValidationError

from baton.errors import InvalidRequest
from gateway.conversation import ChatMessage, ReasoningOptions, ToolCall, ToolChoice, ToolUse
from gateway.http.anthropic.message_request import MessagesRequest

USER = {"role": "user", "content": "Hello"}
TOOLS = [{"name": "weather", "input_schema": {"type": "object"}}, {"name": "time", "input_schema": {}}]


def call(call_id: str, name: str = "weather") -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": name, "input": {"town": "Zürich"}}


def result(call_id: str, content: object = "Sunny", **fields: object) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call_id, "content": content} | fields


def text(content: str) -> dict[str, Any]:
    return {"type": "text", "text": content, "cache_control": {"type": "ephemeral", "ttl": "1h"}}


def turn(role: str, *blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": role, "content": list(blocks)}


def body(*messages: dict[str, Any], **fields: Any) -> MessagesRequest:
    return MessagesRequest.model_validate(
        {"model": "tiny", "max_tokens": 9, "messages": list(messages or [USER])} | fields
    )


def messages(*turns: dict[str, Any], **fields: Any) -> tuple[ChatMessage, ...]:
    return body(*turns, **fields).conversation.messages


def test_texts_come_as_they_are() -> None:
    assert messages(USER, system="Be brief") == (
        ChatMessage("system", "Be brief"),
        ChatMessage("user", "Hello"),
    )
    assert messages(turn("user", text("Hel"), text("lo")), system=[text("Be "), text("brief")]) == (
        ChatMessage("system", "Be brief"),
        ChatMessage("user", "Hello"),
    )
    assert messages(USER, {"role": "system", "content": "Now in French"}, USER)[1] == ChatMessage(
        "system", "Now in French"
    )


def test_what_claude_code_writes_for_billing_is_no_part_of_the_prompt() -> None:
    """Claude Code writes something else in each request, so no prompt would find its prefix in a cache."""
    first, second = (f"x-anthropic-billing-header: cc_version=2.1; cch={cch};" for cch in ("eb6c6", "71fea"))
    system = [text(first), text("You are Claude Code. "), text("The header is x-anthropic-billing-header: 1")]
    expected = "You are Claude Code. The header is x-anthropic-billing-header: 1"

    assert messages(USER, system=system)[0] == ChatMessage("system", expected)
    assert messages(USER, system=[text(f"{second}\n{expected}")])[0] == ChatMessage("system", expected)
    assert messages(USER, system=f"{second}\n{expected}")[0] == ChatMessage("system", expected)
    assert messages(USER, system=[text(first)]) == messages(USER)


def test_turns_of_one_role_become_one() -> None:
    assert messages(
        USER, turn("user", text("Are you "), text("there?")), turn("assistant", text("Yes")), USER
    ) == (
        ChatMessage("user", "Hello\n\nAre you there?"),
        ChatMessage("assistant", "Yes"),
        ChatMessage("user", "Hello"),
    )
    assistant = messages(
        USER,
        turn("assistant", text("A")),
        turn("assistant", call("b")),
        turn("assistant", text("B"), call("c")),
        turn("user", result("b"), result("c")),
    )[1]
    assert assistant.content == "A\n\nB", "a turn without text leaves no gap"
    assert [each.id for each in assistant.tool_calls] == ["b", "c"]


def test_calls_and_their_results() -> None:
    answer = turn(
        "assistant",
        {"type": "thinking", "thinking": "Two tools", "signature": ""},
        {"type": "redacted_thinking", "data": "x"},
        text("Let me see"),
        call("a"),
        call("b", "time"),
    )
    results = turn(
        "user",
        result("b", [text("No"), text("on")]),
        result("a", "No such town", is_error=True),
        text("Go on"),
    )
    assert messages(USER, answer, results)[1:] == (
        ChatMessage(
            "assistant",
            "Let me see",
            reasoning="Two tools",
            tool_calls=(
                ToolCall("a", "weather", '{"town": "Zürich"}'),
                ToolCall("b", "time", '{"town": "Zürich"}'),
            ),
        ),
        ChatMessage("tool", "Noon", tool_call_id="b", name="time"),
        ChatMessage("tool", "Error: No such town", tool_call_id="a", name="weather"),
        ChatMessage("user", "Go on"),
    )
    only_results = turn("user", result("a", None), result("b"))
    assert [each.role for each in messages(USER, answer, only_results)] == [
        "user",
        "assistant",
        "tool",
        "tool",
    ]


def test_a_search_among_deferred_tools_finds_their_names() -> None:
    found = [{"type": "tool_reference", "tool_name": name} for name in ("mcp__a__b", "mcp__a__c")]
    *_, said = messages(USER, turn("assistant", call("a")), turn("user", result("a", found)))
    assert said.content == "Found the tool mcp__a__b.\nFound the tool mcp__a__c.\n"


CALLED = turn("assistant", call("a"), call("b"))
WRONG: dict[str, tuple[list[dict[str, Any]], str]] = {
    "a result without a call": ([turn("user", result("x"))], "messages.0.content.0.tool_use_id"),
    "a result of an earlier turn's call": (
        [USER, CALLED, turn("user", result("a"), result("b")), turn("assistant"), turn("user", result("a"))],
        "messages.4.content.0.tool_use_id",
    ),
    "a result twice": (
        [USER, CALLED, turn("user", result("a"), result("b"), result("a"))],
        "messages.2.content.2.tool_use_id",
    ),
    "a result behind text": ([USER, CALLED, turn("user", text("So"), result("a"))], "messages.2.content.1"),
    "a result in a later turn of the same role": (
        [USER, CALLED, USER, turn("user", result("a"), result("b"))],
        "messages.3.content.0",
    ),
    "a call without a result": ([USER, CALLED, turn("user", result("a"))], "messages.2"),
    "a call before a last turn of the system": (
        [USER, CALLED, {"role": "system", "content": "x"}],
        "messages.2",
    ),
    "a call that another answer follows": (
        [USER, CALLED, {"role": "system", "content": "x"}, turn("assistant", text("So"))],
        "messages.3",
    ),
    "two calls with one id": ([USER, turn("assistant", call("a"), call("a"))], "messages.1.content.1.id"),
    "an answer that is to be continued": ([USER, turn("assistant", text("The answer is"))], "messages.1"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_fits_nowhere_is_refused_by_its_place(case: str) -> None:
    turns, place = WRONG[case]
    with pytest.raises(InvalidRequest) as caught:
        messages(*turns)
    assert caught.value.field == place


def test_thousands_of_calls_and_results_take_little() -> None:
    ids = [f"call-{number}" for number in range(4096)]
    made = messages(USER, turn("assistant", *map(call, ids)), turn("user", *map(result, ids)))
    assert len(made) == 2 + 4096
    with pytest.raises(ValidationError, match="at most 4096 items"):
        messages(turn("user", *[text("x")] * 5000))


def test_the_choice_among_tools() -> None:
    def choice(value: dict[str, Any] | None) -> tuple[ToolChoice, bool]:
        made = body(tools=TOOLS, tool_choice=value).conversation
        return made.tool_choice, made.parallel_tool_calls

    assert choice(None) == choice({"type": "auto"}) == (ToolChoice(), True)
    assert choice({"type": "auto", "disable_parallel_tool_use": True}) == (ToolChoice(), False)
    assert choice({"type": "any"}) == (ToolChoice(ToolUse.REQUIRED), True)
    assert choice({"type": "tool", "name": "time", "disable_parallel_tool_use": True}) == (
        ToolChoice(ToolUse.REQUIRED, ("time",)),
        False,
    )
    assert choice({"type": "none"}) == (ToolChoice(ToolUse.NONE), True)
    for wrong, field in (
        ({"type": "tool", "name": "x"}, "tool_choice.name"),
        ({"type": "any"}, "tool_choice"),
    ):
        with pytest.raises(InvalidRequest) as caught:
            _ = body(tools=TOOLS if "name" in wrong else [], tool_choice=wrong).conversation
        assert caught.value.field == field
    with pytest.raises(InvalidRequest) as caught:
        _ = body(tools=[*TOOLS, TOOLS[0]]).conversation
    assert caught.value.field == "tools.2.name"


def test_how_much_the_model_thinks() -> None:
    def reasoning(thinking: dict[str, Any] | None, **fields: Any) -> ReasoningOptions:
        return body(thinking=thinking, **fields).conversation.reasoning

    assert reasoning(None) == reasoning({"type": "adaptive", "display": "omitted"}) == ReasoningOptions()
    assert reasoning({"type": "disabled"}) == ReasoningOptions(is_enabled=False)
    assert reasoning({"type": "enabled", "budget_tokens": 8}) == ReasoningOptions(True, 8)
    assert reasoning(None, output_config={"effort": "low"}) == ReasoningOptions(effort="low")
    with pytest.raises(InvalidRequest) as caught:
        reasoning({"type": "enabled", "budget_tokens": 9})
    assert caught.value.field == "thinking.budget_tokens"
