"""Items as the turns of a conversation, and which turns are left out where a prompt is too long."""

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace

from baton.errors import InvalidRequest, PromptTooLong
from gateway.conversation import ChatMessage, Conversation, ToolCall
from gateway.http.responses.create_request import PromptFields
from gateway.http.responses.items import (
    FunctionCallItem,
    FunctionCallOutputItem,
    KeptItem,
    MessageItem,
    ReasoningItem,
)
from gateway.http.responses.tools import tool_choice_of


def conversation_of(body: PromptFields, items: Iterable[KeptItem]) -> Conversation:
    """The body's instructions, then the items; InvalidRequest names `input`."""
    messages = () if body.instructions is None else (ChatMessage("system", body.instructions),)
    tools = body.tools or ()
    return Conversation(
        messages + messages_of(items),
        tuple(tool.as_tool() for tool in tools),
        tool_choice_of(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls is not False,
        reasoning=body.reasoning_options,
    )


def messages_of(items: Iterable[KeptItem]) -> tuple[ChatMessage, ...]:
    """Reasoning, text and calls that follow each other are one turn of the assistant.

    A call that was cut off is left out: its arguments are no JSON, and nothing answers it.
    """
    messages: list[ChatMessage] = []
    names: dict[str, str] = {}
    turn: ChatMessage | None = None  # the assistant's, still open
    for item in items:
        match item:
            case FunctionCallItem(status="incomplete"):
                continue
            case FunctionCallItem():
                call = ToolCall(item.call_id, item.name, item.arguments)
                names[item.call_id] = item.name
                turn = turn or ChatMessage("assistant", "")
                turn = replace(turn, tool_calls=(*turn.tool_calls, call))
            case ReasoningItem():
                if turn is not None and (turn.content or turn.tool_calls):
                    messages.append(turn)
                    turn = None
                turn = turn or ChatMessage("assistant", "")
                turn = replace(turn, reasoning=(turn.reasoning or "") + item.text)
            case MessageItem(role="assistant"):
                if turn is not None and (turn.content or turn.tool_calls):
                    messages.append(turn)
                    turn = None
                turn = replace(turn or ChatMessage("assistant", ""), content=item.text)
            case MessageItem() | FunctionCallOutputItem():
                if turn is not None:
                    messages.append(turn)
                    turn = None
                messages.append(_of_others(item, names))
    return (*messages, *((turn,) if turn is not None else ()))


def _of_others(item: MessageItem | FunctionCallOutputItem, names: dict[str, str]) -> ChatMessage:
    if isinstance(item, MessageItem):
        return ChatMessage("system" if item.role == "developer" else item.role, item.text)
    if item.call_id not in names:
        raise InvalidRequest(
            "input",
            f"no function_call with the call_id '{item.call_id[:60]}' precedes its function_call_output",
        )
    return ChatMessage("tool", item.text, tool_call_id=item.call_id, name=names[item.call_id])


async def shortened(
    conversation: Conversation, fits: Callable[[Conversation], Awaitable[bool]]
) -> Conversation:
    """The conversation without as many of its oldest exchanges as must go until `fits`; PromptTooLong if the last one
    alone does not.

    An exchange is a user's message and what follows it up to the next one, so calls stay beside their results. System
    messages stay. Asks `fits` once for each halving, since less always fits better.
    """
    messages = conversation.messages
    begins = [index for index, message in enumerate(messages) if message.role == "user"]
    if len(begins) < 2:
        raise PromptTooLong("input", "the prompt is too long, and has no earlier exchange to leave out")
    low, high = 0, len(begins)
    while low < high:
        middle = (low + high) // 2
        if await fits(replace(conversation, messages=_from(messages, begins[middle]))):
            high = middle
        else:
            low = middle + 1
    if low == len(begins):
        raise PromptTooLong("input", "the last exchange alone is too long")
    return replace(conversation, messages=_from(messages, begins[low]))


def _from(messages: Sequence[ChatMessage], begin: int) -> tuple[ChatMessage, ...]:
    systems = tuple(message for message in messages[:begin] if message.role == "system")
    return (*systems, *messages[begin:])
