"""Converts conversations and events for GatewayClient; the gateway uses `grpc/chat_convert.py`."""

import json

from baton.v1 import generation_service_pb2 as pb
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
    ToolChoice,
    ToolUse,
)

TOOL_USES = {
    ToolUse.NONE: pb.TOOL_USE_NONE,
    ToolUse.AUTO: pb.TOOL_USE_AUTO,
    ToolUse.REQUIRED: pb.TOOL_USE_REQUIRED,
}


def chat_of(conversation: Conversation) -> pb.Chat:
    """Sets `events`, so that the answer also contains events."""
    return pb.Chat(
        messages=map(_message_of, conversation.messages),
        tools=map(_tool_of, conversation.tools),
        tool_choice=_tool_choice_of(conversation.tool_choice),
        parallel_tool_calls=conversation.parallel_tool_calls,
        reasoning=_reasoning_of(conversation.reasoning),
        template_options={key: json.dumps(value) for key, value in conversation.template_options.items()},
        events=True,
    )


def answer_event_of(message: pb.AnswerEvent) -> AnswerEvent | None:
    """None for a kind of event that this release does not know."""
    match message.WhichOneof("event"):
        case "text":
            return Text(message.text)
        case "reasoning":
            return Reasoning(message.reasoning)
        case "call_begins":
            return CallBegins(message.call_begins.index, message.call_begins.name)
        case "arguments_delta":
            return ArgumentsDelta(message.arguments_delta.index, message.arguments_delta.json)
        case "call_ends":
            return CallEnds(message.call_ends.index)
        case _:
            return None


def _message_of(turn: ChatMessage) -> pb.Chat.Message:
    return pb.Chat.Message(
        role=turn.role,
        content=turn.content,
        reasoning=turn.reasoning or "",
        tool_calls=[
            pb.ToolCall(id=call.id, name=call.name, arguments=call.arguments) for call in turn.tool_calls
        ],
        tool_call_id=turn.tool_call_id or "",
    )


def _tool_of(tool: Tool) -> pb.Tool:
    return pb.Tool(
        name=tool.name,
        description=tool.description or "",
        parameters=json.dumps(tool.parameters),
        strict=tool.strict,
    )


def _tool_choice_of(choice: ToolChoice) -> pb.ToolChoice:
    return pb.ToolChoice(use=TOOL_USES[choice.use], names=choice.names or ())


def _reasoning_of(options: ReasoningOptions) -> pb.ReasoningOptions:
    return pb.ReasoningOptions(
        enabled=options.is_enabled, max_tokens=options.max_tokens, effort=options.effort or ""
    )
