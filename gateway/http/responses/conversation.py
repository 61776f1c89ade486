"""Converts items to the turns of a conversation, and leaves out old turns if a prompt is too long."""

from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from baton.errors import TOO_LONG, InvalidRequest, PromptTooLong
from gateway.conversation import ChatMessage, Conversation, ToolCall
from gateway.conversation.checks import check_arguments
from gateway.http.responses.create_request import PromptFields
from gateway.http.responses.items import (
    FunctionCallItem,
    FunctionCallOutputItem,
    InputItem,
    KeptItem,
    MessageItem,
    ReasoningItem,
)
from gateway.http.responses.tools import NamedFunction, joined_name, tool_choice_of, tools_of


def conversation_of(body: PromptFields, items: Iterable[KeptItem]) -> Conversation:
    """The conversation: the body's instructions, then the items. InvalidRequest for an item names the field
    `input`."""
    messages = () if body.instructions is None else (ChatMessage("system", body.instructions),)
    tools = tools_of(body.tools)
    return Conversation(
        messages + messages_of(items),
        tools,
        tool_choice_of(body.tool_choice, tools),
        parallel_tool_calls=body.parallel_tool_calls is not False
        and not isinstance(body.tool_choice, NamedFunction),
        reasoning=body.reasoning_options,
    )


def check_calls(items: Iterable[InputItem]) -> None:
    """Raises InvalidRequest if the arguments of a complete call are not a JSON object; the error names the field."""
    check_arguments(
        (f"input.{index}.arguments", item.arguments)
        for index, item in enumerate(items)
        if isinstance(item, FunctionCallItem) and item.status != "incomplete"
    )


def messages_of(items: Iterable[KeptItem]) -> tuple[ChatMessage, ...]:
    """The items as messages. Reasoning, text and calls that follow each other become one turn of the
    assistant."""
    messages: list[ChatMessage] = []
    names: dict[str, tuple[str | None, str]] = {}
    turn_of: dict[str, int] = {}  # by call: the number of its turn among the messages
    thoughts: defaultdict[int, list[str]] = defaultdict(list)  # by the number of their turn
    calls: defaultdict[int, list[ToolCall]] = defaultdict(list)  # by the number of their turn
    for item in _without_cut_calls(items):
        turn = messages[-1] if messages and messages[-1].role == "assistant" else None
        match item:
            case FunctionCallItem(call_id=call_id):
                if turn is None:
                    _new_turn(messages)
                if turn_of.get(call_id) == len(messages):
                    raise InvalidRequest(
                        "input",
                        f"two function_calls of one turn have the call_id '{call_id[:60]}'; give each its own",
                    )
                names[call_id] = (item.namespace, item.name)
                turn_of[call_id] = len(messages)
                calls[len(messages)].append(ToolCall(call_id, joined_name(*names[call_id]), item.arguments))
            case ReasoningItem(text=""):
                pass  # for example, only another provider can read it
            case ReasoningItem():
                if turn is None or turn.content or len(messages) in calls:
                    _new_turn(messages)
                thoughts[len(messages)].append(item.text)
            case MessageItem(role="assistant"):
                # A text after a call stays in the turn of the call, before the result.
                if turn is None or turn.content:
                    turn = _new_turn(messages)
                messages[-1] = replace(turn, content=item.text)
            case MessageItem() | FunctionCallOutputItem():
                messages.append(_from_other_item(item, names))
    for number in thoughts.keys() | calls.keys():
        reasoning = "".join(thoughts[number]) if number in thoughts else None
        messages[number - 1] = replace(
            messages[number - 1], reasoning=reasoning, tool_calls=tuple(calls[number])
        )
    return tuple(messages)


def _without_cut_calls(items: Iterable[KeptItem]) -> Iterator[KeptItem]:
    """Leaves out incomplete calls, whose arguments are not valid JSON. Also leaves out the results of these calls: an
    agent answers such a call, too, with an error."""
    cut: set[str] = set()
    for item in items:
        match item:
            case FunctionCallItem(call_id=call_id, status="incomplete"):
                cut.add(call_id)
            case FunctionCallOutputItem(call_id=call_id) if call_id in cut:
                pass
            case _:
                if isinstance(item, FunctionCallItem):
                    cut.discard(item.call_id)
                yield item


def _new_turn(messages: list[ChatMessage]) -> ChatMessage:
    """Adds a turn of the assistant, which is still empty."""
    messages.append(ChatMessage("assistant", ""))
    return messages[-1]


def _from_other_item(
    item: MessageItem | FunctionCallOutputItem, names: Mapping[str, tuple[str | None, str]]
) -> ChatMessage:
    """The message for an item that is not the assistant's. `names`: the namespace and the name of each earlier call, by
    the call's id."""
    if isinstance(item, MessageItem):
        return ChatMessage("system" if item.role == "developer" else item.role, item.text)
    if item.call_id not in names:
        raise InvalidRequest(
            "input",
            f"no function_call with the call_id '{item.call_id[:60]}' precedes its function_call_output",
        )
    namespace, name = names[item.call_id]
    if item.name not in (None, name) or item.namespace not in (None, namespace):
        called, got = joined_name(namespace, name), joined_name(item.namespace, item.name or name)
        raise InvalidRequest(
            "input",
            f"the call '{item.call_id[:60]}' was to {called[:60]!r}, but its output is of {got[:60]!r}",
        )
    return ChatMessage("tool", item.text, tool_call_id=item.call_id, name=joined_name(namespace, name))


async def shortened(
    conversation: Conversation, fits: Callable[[Conversation], Awaitable[bool]]
) -> Conversation:
    """The conversation without its oldest exchanges. Leaves out as few as possible, so that `fits` returns true.

    An exchange begins with a user's message and ends before the next one. A user's message between a call and its
    result begins no exchange, so calls stay with their results. System messages stay. A binary search finds the first
    exchange to keep, since a conversation fits if a longer one fits. Raises PromptTooLong if not even the last
    exchange fits.
    """
    messages = conversation.messages
    begins = _begins(messages)
    if len(begins) < 2:
        raise PromptTooLong("input", f"{TOO_LONG}, and has no earlier exchange to leave out")
    low, high = 0, len(begins)
    while low < high:
        middle = (low + high) // 2
        if await fits(replace(conversation, messages=_from(messages, begins[middle]))):
            high = middle
        else:
            low = middle + 1
    if low == len(begins):
        raise PromptTooLong(
            "input", f"{TOO_LONG}: the system messages and the last exchange alone do not fit"
        )
    return replace(conversation, messages=_from(messages, begins[low]))


def _begins(messages: Sequence[ChatMessage]) -> list[int]:
    """The indices of the messages with which exchanges begin."""
    made_at: dict[str | None, int] = {}
    call_of: list[int] = []  # for each message, the index of its call; its own index, if it is no result
    for index, message in enumerate(messages):
        made_at |= {call.id: index for call in message.tool_calls}
        call_of.append(made_at.get(message.tool_call_id, index))
    begins, first_call = [], len(messages)
    for index in reversed(range(len(messages))):
        first_call = min(first_call, call_of[index])
        if messages[index].role == "user" and first_call == index:
            begins.append(index)
    return begins[::-1]


def _from(messages: Sequence[ChatMessage], begin: int) -> tuple[ChatMessage, ...]:
    systems = tuple(message for message in messages[:begin] if message.role == "system")
    return (*systems, *messages[begin:])
