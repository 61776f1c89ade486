"""Messages, tools, and the conversation that a model continues."""

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
    """The conversation, with adjacent results in the order of their calls. Clients may send them in any order, but most
    templates write no ids: then only the order says to which call a result belongs."""
    ordered: list[ChatMessage] = []
    number, numbers = count(), dict[str | None, int]()
    for turn, *results in _runs(conversation.messages, lambda _, message: message.role == "tool"):
        numbers |= {call.id: next(number) for call in turn.tool_calls}
        results.sort(key=lambda result: numbers.get(result.tool_call_id, -1))
        ordered += [turn, *results]
    return replace(conversation, messages=tuple(ordered))


def one_call_per_turn(messages: Messages) -> Messages:
    """The messages, with a separate turn for each call. The call's result follows it, even if another turn with calls
    came in between; the text of the original turn precedes it.

    For templates that write only one call of a turn, or refuse a turn with several.
    """
    turns: list[ChatMessage] = []
    at = 0
    while at < len(messages):
        begin = at
        while at < len(messages) and messages[at].tool_calls:
            at += 1
        if at == begin:
            turns.append(messages[at])
            at += 1
            continue
        end = at
        while at < len(messages) and messages[at].role == "tool":
            at += 1
        turns += _calls_one_by_one(messages[begin:end], messages[end:at])
    return tuple(turns)


def _calls_one_by_one(callers: Messages, results: Messages) -> list[ChatMessage]:
    """`callers`: adjacent turns with calls; `results`: the results after them."""
    turns: list[ChatMessage] = []
    last_caller = {call.id: number for number, turn in enumerate(callers) for call in turn.tool_calls}
    results_of: dict[str | None, list[ChatMessage]] = {call_id: [] for call_id in last_caller}
    others: list[ChatMessage] = []
    for result in results:
        results_of.get(result.tool_call_id, others).append(result)
    for number, turn in enumerate(callers):
        if turn.content:
            turns.append(ChatMessage(turn.role, turn.content, name=turn.name))
        reasoning = turn.reasoning
        for call in turn.tool_calls:
            turns.append(ChatMessage(turn.role, "", reasoning, (call,), name=turn.name))
            if last_caller[call.id] == number:
                turns += results_of[call.id]
            reasoning = None
    return turns + others


def stricter_forms(conversation: Conversation) -> Iterator[Conversation]:
    """Yields forms of the conversation for templates that refuse the conversation itself. In the last ones, each tool
    has a description, which may be empty: Hermes's template wants one."""
    yield from _stricter_messages(conversation)
    if any(tool.description is None for tool in conversation.tools):
        tools = (replace(tool, description=tool.description or "") for tool in conversation.tools)
        described = replace(conversation, tools=tuple(tools))
        yield described
        yield from _stricter_messages(described)


def _stricter_messages(conversation: Conversation) -> Iterator[Conversation]:
    """Yields forms of the conversation with other messages.

    Forms with one call per turn come last, because the models wrote several calls in one turn. Llama 3's template wants
    them.
    """
    yield from _joined_forms(conversation)
    split = replace(conversation, messages=one_call_per_turn(conversation.messages))
    if split.messages != conversation.messages:
        yield split
        yield from _joined_forms(split)


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
    """Whether the text has the texts of all system messages, in order. True if no system message follows another
    message: then `with_system_first` would change nothing."""
    messages = conversation.messages
    if all(message.role != "system" for message in messages[1:]):
        return True
    at = 0  # each search begins behind the text before, so thousands of searches read a long text only once
    for message in messages:
        if message.role == "system":
            content = message.content.strip()  # some templates leave out spaces at both ends
            if (found := text.find(content, at)) < 0:
                return False
            at = found + len(content)
    return True


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
    """Divides the messages into lists. A message that belongs to the message before it is in the list of that
    message."""
    runs: list[list[ChatMessage]] = []
    for message in messages:
        if runs and belong_together(runs[-1][-1], message):
            runs[-1].append(message)
        else:
            runs.append([message])
    return runs


def _joined(texts: Iterable[str]) -> str:
    return BETWEEN_JOINED.join(text for text in texts if text)
