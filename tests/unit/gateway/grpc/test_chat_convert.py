"""Chats in protobuf: every field arrives, and every bad one is named by its path."""

from typing import Any

import pytest

from baton.errors import InvalidRequest
from baton.v1 import generation_service_pb2 as pb
from gateway.call_ids import CallIds
from gateway.conversation import (
    AnswerEvent,
    ArgumentsDelta,
    CallBegins,
    CallEnds,
    ChatMessage,
    Conversation,
    Reasoning,
    ReasoningOptions,
    Text,
    Tool,
    ToolCall,
    ToolChoice,
    ToolUse,
)
from gateway.grpc.chat_convert import (
    conversation_from,
    conversation_to_message,
    event_from,
    event_to_message,
    wants_events,
)

USER = pb.Chat.Message(role="user", content="hi")
ASKS = pb.Chat.Message(role="assistant", tool_calls=[pb.ToolCall(id="a", name="f", arguments="{}")])
TOOL = pb.Tool(name="f")

WHOLE = Conversation(
    messages=(
        ChatMessage("system", "Be brief"),
        ChatMessage("user", "hi"),
        ChatMessage("assistant", "", "hm", (ToolCall("a", "f", '{"x": 1}'), ToolCall("b", "g", "{}"))),
        ChatMessage("tool", "7", tool_call_id="b", name="g"),
        ChatMessage("tool", "8", tool_call_id="a", name="f"),
    ),
    tools=(
        Tool("f", "It is f", {"type": "object", "properties": {"x": {"type": "integer"}}}, True),
        Tool("g"),
    ),
    tool_choice=ToolChoice(ToolUse.REQUIRED, ("g",)),
    parallel_tool_calls=False,
    reasoning=ReasoningOptions(False, 7, "low"),
    template_options={"enable_thinking": False, "depth": 3, "style": "x", "nothing": None},
)


def test_a_conversation_arrives_as_it_was_sent() -> None:
    assert conversation_from(conversation_to_message(WHOLE)) == WHOLE


def test_a_developers_message_is_a_system_message_as_over_http() -> None:
    chat = pb.Chat(messages=[pb.Chat.Message(role="developer", content="Be brief"), USER])
    assert conversation_from(chat).messages == (ChatMessage("system", "Be brief"), ChatMessage("user", "hi"))


def test_unset_fields_take_their_defaults() -> None:
    assert conversation_from(pb.Chat(messages=[USER])) == Conversation((ChatMessage("user", "hi"),))
    (tool,) = conversation_from(pb.Chat(messages=[USER], tools=[TOOL])).tools
    assert tool == Tool("f")


@pytest.mark.parametrize(
    "event",
    [Text("a"), Reasoning("b"), CallBegins(1, "f"), ArgumentsDelta(1, '{"a'), CallEnds(1)],
)
def test_events_arrive_as_they_were_sent(event: AnswerEvent) -> None:
    call_ids = CallIds()
    message = event_to_message(call_ids, event)
    assert event_from(message) == event
    if isinstance(event, CallBegins):
        assert message.call_begins.id == call_ids.of(1)


def test_an_event_of_a_later_release_is_none() -> None:
    assert event_from(pb.AnswerEvent()) is None


def test_who_gets_events() -> None:
    asked = {"events": True}, {"tools": [TOOL]}
    for fields in asked:
        assert wants_events(pb.GenerateRequest(chat=pb.Chat(messages=[USER], **fields)))
    assert not wants_events(pb.GenerateRequest(chat=pb.Chat(messages=[USER])))
    assert not wants_events(pb.GenerateRequest(text="hi"))


@pytest.mark.parametrize(
    ("field", "fields", "problem"),
    [
        ("chat", {"messages": []}, "1 to 4096 messages, got 0"),
        ("chat.tools", {"tools": [TOOL] * 129}, "at most 128 entries, got 129"),
        ("chat.tools.0.name", {"tools": [pb.Tool(name="a b")]}, "got 'a b'"),
        ("chat.tools.0.name", {"tools": [pb.Tool(name="x" * 10**6)]}, "must be 1 to 128 letters"),
        ("chat.tools.1.name", {"tools": [TOOL, TOOL]}, "chat.tools.0 is called 'f' too"),
        ("chat.tools.0.parameters", {"tools": [pb.Tool(name="f", parameters="[1]")]}, "JSON object"),
        ("chat.tools.0.parameters", {"tools": [pb.Tool(name="f", parameters="{")]}, "invalid JSON"),
        (
            "chat.tools.0.parameters",
            {"tools": [pb.Tool(name="f", parameters='{"a":' * 5000 + "1" + "}" * 5000)]},
            "invalid JSON",
        ),
        (
            "chat.tools.0.parameters",
            {"tools": [pb.Tool(name="f", parameters='{"maximum": 1e999}')]},
            "inf does not fit into 64 bits",
        ),
        (
            "chat.tools.0.parameters",
            {"tools": [pb.Tool(name="f", parameters='{"a": 1, "a": 2}')]},
            "'a' appears twice",
        ),
        (
            "chat.tools.0.parameters.type",
            {"tools": [pb.Tool(name="f", parameters='{"type": "string"}')]},
            "must be 'object', got 'string'",
        ),
        (
            "chat.tools.1.parameters",
            {"tools": [pb.Tool(name=name, parameters='{"a":"' + "x" * 600_000 + '"}') for name in "fg"]},
            "more than 1048576 characters",
        ),
        ("chat.tool_choice.use", {"tool_choice": pb.ToolChoice(use=pb.TOOL_USE_REQUIRED)}, "needs tools"),
        ("chat.tool_choice.use", {"tool_choice": pb.ToolChoice(use=9)}, "unknown value 9"),  # type: ignore[arg-type]
        (
            "chat.tool_choice.names.0",
            {"tools": [TOOL], "tool_choice": pb.ToolChoice(names=["g"])},
            "'g' is not one of the tools; the tools are: 'f'",
        ),
        (
            "chat.messages.0.tool_call_id",
            {"messages": [pb.Chat.Message(role="tool", tool_call_id="a")]},
            "has a call 'a'",
        ),
        ("chat.messages.0.tool_call_id", {"messages": [pb.Chat.Message(role="tool")]}, "required"),
        (
            "chat.messages.1.tool_call_id",
            {"messages": [ASKS, pb.Chat.Message(role="user", tool_call_id="a")]},
            "only messages of role 'tool'",
        ),
        (
            "chat.messages.0.reasoning",
            {"messages": [pb.Chat.Message(role="user", reasoning="hm")]},
            "only messages of role 'assistant'",
        ),
        (
            "chat.messages.0.tool_calls.1.id",
            {"messages": [pb.Chat.Message(role="assistant", tool_calls=[*ASKS.tool_calls] * 2)]},
            "another call",
        ),
        (
            "chat.messages.0.tool_calls.0.name",
            {"messages": [pb.Chat.Message(role="assistant", tool_calls=[pb.ToolCall(id="a")])]},
            "must not be empty",
        ),
        (
            "chat.messages.0.tool_calls.0.arguments",
            {
                "messages": [
                    pb.Chat.Message(
                        role="assistant", tool_calls=[pb.ToolCall(id="a", name="f", arguments='{"a')]
                    )
                ]
            },
            "must be a JSON object",
        ),
        (
            "chat.messages.0.tool_calls",
            {"messages": [pb.Chat.Message(role="assistant", tool_calls=[pb.ToolCall()] * 129)]},
            "at most 128",
        ),
        ("chat.template_options.a", {"template_options": {"a": "x"}}, "invalid JSON"),
        ("chat.template_options.a", {"template_options": {"a": "1e999"}}, "does not fit into 64 bits"),
        ("chat.template_options.a", {"template_options": {"a": "[1]"}}, "must be a string"),
        ("chat.template_options.tools", {"template_options": {"tools": "1"}}, "set by the gateway"),
        ("chat.template_options.eos_token", {"template_options": {"eos_token": '""'}}, "set by the gateway"),
        (
            "chat.template_options",
            {"template_options": {f"a{n}": "1" for n in range(33)}},
            "at most 32 entries, got 33",
        ),
    ],
)
def test_a_bad_field_is_named_by_its_path(field: str, fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        conversation_from(pb.Chat(**{"messages": [USER]} | fields))
    assert (caught.value.field, problem in caught.value.problem) == (field, True), caught.value
    assert len(str(caught.value)) < 400
