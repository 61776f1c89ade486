"""Messages, tools, and the conversation that a model continues."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

BETWEEN_SYSTEM = "\n\n"
"""Written between the texts of system messages that are joined."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the assistant made in an earlier turn."""

    id: str
    """The API that made the call chose this id. The call's result contains it."""
    name: str
    arguments: str
    """JSON, as the model wrote it."""


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a conversation."""

    role: str
    """`system`, `user`, `assistant`, `tool`, or another one that the model's template knows."""
    content: str
    """May be empty if there are `tool_calls`."""
    reasoning: str | None = None
    """The assistant's reasoning before its answer, if the client sends it back."""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    """In a tool's result: the id of its call."""
    name: str | None = None
    """In a tool's result: the name of the tool. In other messages: who wrote them; not over gRPC."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the client can run for the model."""

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] = field(default_factory=lambda: {"type": "object", "properties": {}})
    """A JSON schema of the tool's arguments."""
    strict: bool = False
    """If true, arguments match the schema even if the model may decide whether to call the tool."""


class ToolUse(Enum):
    """Whether the model may or must call a tool."""

    NONE = "none"
    AUTO = "auto"
    REQUIRED = "required"


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether the model may call tools, and which."""

    use: ToolUse = ToolUse.AUTO
    names: tuple[str, ...] | None = None
    """The names of the tools that the model may call; None: all tools."""


@dataclass(frozen=True, slots=True)
class ReasoningOptions:
    """How much the model may think before it answers."""

    is_enabled: bool | None = None
    """None: the default of the model's chat template."""
    max_tokens: int | None = None
    """Most tokens of reasoning; then the answer begins. None: no limit."""
    effort: str | None = None
    """A level, such as `low`; no effect if the model's chat template has no levels. None: its default."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation, which the model continues with an assistant's turn."""

    messages: tuple[ChatMessage, ...]
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = ToolChoice()
    parallel_tool_calls: bool = True
    """Whether one turn may have several calls."""
    reasoning: ReasoningOptions = ReasoningOptions()
    template_options: Mapping[str, Any] = field(default_factory=dict)
    """Further variables of the model's chat template, such as `enable_thinking`."""

    @property
    def callable_tools(self) -> tuple[Tool, ...]:
        """The tools that this turn may call."""
        if self.tool_choice.use is ToolUse.NONE:
            return ()
        names = self.tool_choice.names
        return tuple(tool for tool in self.tools if names is None or tool.name in names)

    @property
    def num_characters(self) -> int:
        """Characters of all messages and calls. The time to render the chat template grows with this
        number."""
        return sum(
            len(message.content)
            + len(message.reasoning or "")
            + len(message.name or "")
            + sum(len(call.arguments) for call in message.tool_calls)
            for message in self.messages
        )


def with_system_first(conversation: Conversation) -> Conversation | None:
    """The conversation with all system messages joined to its first message. None if no other message is one."""
    systems = [message for message in conversation.messages if message.role == "system"]
    others = tuple(message for message in conversation.messages if message.role != "system")
    if not systems or (*systems[:1], *others) == conversation.messages:
        return None
    text = BETWEEN_SYSTEM.join(message.content for message in systems if message.content)
    return replace(conversation, messages=(replace(systems[0], content=text), *others))
