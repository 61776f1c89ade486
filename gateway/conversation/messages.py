"""Messages, tools, and the conversation that a model continues."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import count
from typing import Any

NO_ARGUMENTS: Mapping[str, Any] = {"type": "object", "properties": {}}
"""The schema of a tool that has none of its own."""
BETWEEN_JOINED = "\n\n"
"""Written between the texts of messages that are joined."""


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
    """In a tool's result: the name of the tool. In other messages: the author's name (gRPC has no field for it)."""


Messages = tuple[ChatMessage, ...]


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the client can run for the model."""

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] = field(default_factory=lambda: NO_ARGUMENTS)
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
    """The reasoning has at most this many tokens; then the answer begins. None: no limit."""
    effort: str | None = None
    """A level, such as `low`; no effect if the model's chat template has no levels. None: the template's default."""


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
    def grammar_cost(self) -> int:
        """The time to make the turn's grammar grows with this number: the characters of the schemas that calls must
        match. Of other tools' schemas, only the depth is checked, which takes a twentieth of the time."""
        is_required = self.tool_choice.use is ToolUse.REQUIRED
        return sum(
            len(json.dumps(tool.parameters)) // (1 if is_required or tool.strict else 20)
            for tool in self.callable_tools
        )

    @property
    def num_characters(self) -> int:
        """The number of characters of all messages and calls. The time to render the chat template grows with this
        number."""
        return sum(
            len(message.content)
            + len(message.reasoning or "")
            + len(message.name or "")
            + sum(len(call.arguments) for call in message.tool_calls)
            for message in self.messages
        )


def results_in_order(conversation: Conversation) -> Conversation:
    """The conversation, with results in the order of their calls. Clients may send them in any order, but most
    templates write no ids: then only the order says to which call a result belongs.

    Between turns with calls, messages that are no results keep their places.
    """
    ordered: list[ChatMessage] = []
    number, numbers = count(), dict[str | None, int]()
    for run in _runs(conversation.messages, lambda _, message: not message.tool_calls):
        numbers |= {call.id: next(number) for call in run[0].tool_calls}
        results = [message for message in run if message.role == "tool"]
        results.sort(key=lambda result: numbers.get(result.tool_call_id, -1))
        next_result = iter(results)
        ordered += [next(next_result) if message.role == "tool" else message for message in run]
    return replace(conversation, messages=tuple(ordered))


def one_call_per_turn(messages: Messages) -> Messages:
    """The messages, with a separate turn for each call. The call's result follows it, even if other messages came in
    between; the text of the original turn precedes it.

    For templates that write only one call of a turn, refuse a turn with several, or want each result after its call.
    """
    groups: list[list[ChatMessage]] = []
    group_of: dict[str | None, list[ChatMessage]] = {}
    for message in messages:
        if message.role == "tool" and message.tool_call_id in group_of:
            group_of[message.tool_call_id].append(message)
            continue
        if not message.tool_calls or message.content:
            groups.append(
                [replace(message, reasoning=None, tool_calls=()) if message.tool_calls else message]
            )
        reasoning = message.reasoning
        for call in message.tool_calls:
            group_of[call.id] = [replace(message, content="", reasoning=reasoning, tool_calls=(call,))]
            groups.append(group_of[call.id])
            reasoning = None
    return tuple(message for group in groups for message in group)


def stricter_forms(conversation: Conversation) -> Iterator[Conversation]:
    """Yields forms of the conversation for templates that refuse the conversation itself; each has other messages.

    Forms with one call per turn come last, because the models wrote several calls in one turn. Llama 3's template wants
    them.
    """
    yield from _joined_forms(conversation)
    split = replace(conversation, messages=one_call_per_turn(conversation.messages))
    if split.messages != conversation.messages:
        yield split
        yield from _joined_forms(split)


def with_descriptions(conversation: Conversation) -> Conversation:
    """The conversation, with an empty description for each tool that has none. Hermes's template wants one."""
    if all(tool.description is not None for tool in conversation.tools):
        return conversation
    tools = (replace(tool, description=tool.description or "") for tool in conversation.tools)
    return replace(conversation, tools=tuple(tools))


def _joined_forms(conversation: Conversation) -> Iterator[Conversation]:
    """Yields forms of the conversation, each with fewer messages than the one before.

    Qwen3.5's template wants system messages only at the beginning, Gemma's wants users and assistants to alternate, and
    those of Mistral want no user's message after a result.
    """
    changes: tuple[Callable[[Messages], Messages], ...] = (
        _system_first,
        _alternating,
        _no_user_after_result,
    )
    messages = conversation.messages
    for change in changes:
        if (changed := change(messages)) != messages:
            messages = changed
            yield replace(conversation, messages=messages)


def with_system_first(conversation: Conversation) -> Conversation:
    """The conversation, with all system messages joined to one message at the beginning."""
    return replace(conversation, messages=_system_first(conversation.messages))


def has_system_texts(conversation: Conversation, text: str) -> bool:
    """Whether the text of a prompt has the texts of all system messages. True if no system message follows another
    message: then `with_system_first` would change nothing.

    Looks for the first, the second and the last system message, since templates leave out all but the first or the last
    one. Each text must occur as often as in all messages together.
    """
    messages = conversation.messages
    if all(message.role != "system" for message in messages[1:]):
        return True
    systems = [message.content.strip() for message in messages if message.role == "system"]
    return all(
        text.count(system) >= sum(message.content.count(system) for message in messages)
        for system in (*systems[:2], systems[-1])
        if system
    )


def _system_first(messages: Messages) -> Messages:
    """The messages, with all system messages joined to one message at the beginning."""
    systems = [message for message in messages if message.role == "system"]
    others = tuple(message for message in messages if message.role != "system")
    if not systems:
        return messages
    return (replace(systems[0], content=_joined(system.content for system in systems)), *others)


def _alternating(messages: Messages) -> Messages:
    """The messages, with adjacent messages of the same author (a user or the assistant) joined to one message."""

    def is_same_turn(last: ChatMessage, message: ChatMessage) -> bool:
        is_same_author = (last.role, last.name) == (message.role, message.name)
        return is_same_author and message.role in ("user", "assistant") and not last.tool_calls

    turns: list[ChatMessage] = []
    for run in _runs(messages, is_same_turn):
        thoughts = [message.reasoning for message in run if message.reasoning is not None]
        reasoning = _joined(thoughts) if thoughts else None
        turns.append(
            replace(run[-1], content=_joined(message.content for message in run), reasoning=reasoning)
        )
    return tuple(turns)


def _no_user_after_result(messages: Messages) -> Messages:
    """The messages, with users' text that follows the result of a call joined to this result."""

    def is_after_result(last: ChatMessage, message: ChatMessage) -> bool:
        return last.role == "tool" and message.role == "user"

    runs = _runs(messages, is_after_result)
    return tuple(replace(run[0], content=_joined(message.content for message in run)) for run in runs)


def _runs(
    messages: Messages, belong_together: Callable[[ChatMessage, ChatMessage], bool]
) -> list[list[ChatMessage]]:
    """Divides the messages into lists. If a message belongs to the previous message, both are in the same list."""
    runs: list[list[ChatMessage]] = []
    for message in messages:
        if runs and belong_together(runs[-1][-1], message):
            runs[-1].append(message)
        else:
            runs.append([message])
    return runs


def _joined(texts: Iterable[str]) -> str:
    return BETWEEN_JOINED.join(text for text in texts if text)
