"""Converts a request's turns to the messages of a conversation.

Adjacent turns of the same role are joined. A user's turn with results becomes one message for each result,
and then a message with the turn's text.
"""

import json
from collections.abc import Iterator, Sequence
from itertools import groupby

from baton.errors import InvalidRequest
from gateway.conversation import ChatMessage, ToolCall
from gateway.http.anthropic.blocks import (
    AssistantTurn,
    SystemTurn,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    Turn,
    UserTurn,
    text_of,
)

BETWEEN_TURNS = "\n\n"
"""Written between the texts of turns that are joined."""

ERROR = "Error: "
"""Written before the result of a failed call, because chat templates cannot mark a failure in another way."""

BILLING = "x-anthropic-billing-header:"
"""The beginning of a line that Claude Code puts before its system prompt. The line is for Anthropic's accounting, and
differs in each request. With this line, no prompt could share a cached prefix with an earlier one."""

Block = TextBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock
Numbered = Sequence[tuple[int, Turn]]
"""Turns with their indexes in the body."""


def messages_of(system: str | list[TextBlock] | None, turns: Sequence[Turn]) -> tuple[ChatMessage, ...]:
    """The messages. Raises InvalidRequest for a result without a call, and for a call without a result; the
    error names the turn or the block."""
    instructions = _without_billing(system)
    messages = [ChatMessage("system", instructions)] if instructions else []
    unanswered: dict[str, str] = {}
    """The calls that have no result yet: the name of each call's tool, by the call's id."""
    for role, numbered in groupby(enumerate(turns), key=lambda item: item[1].role):
        run = list(numbered)
        match role:
            case "system":
                for _, turn in run:
                    assert isinstance(turn, SystemTurn)
                    messages.append(ChatMessage("system", text_of(turn.content)))
            case "user":
                messages += _from_user(run, unanswered)
                unanswered = {}
            case "assistant":
                _check_answered(run, unanswered)
                message = _from_assistant(run)
                messages.append(message)
                unanswered = {call.id: call.name for call in message.tool_calls}
    if turns[-1].role == "assistant":
        raise InvalidRequest(
            f"messages.{len(turns) - 1}",
            "the last turn is the assistant's, and continuing it is not supported; end with a user's turn",
        )
    _check_answered([(len(turns) - 1, turns[-1])], unanswered)
    return tuple(messages)


def _without_billing(system: str | list[TextBlock] | None) -> str:
    """The system prompt's text, without lines of billing at the beginning of blocks."""
    blocks = system if isinstance(system, list) else [TextBlock(type="text", text=system or "")]
    return "".join(
        block.text.partition("\n")[2] if block.text.startswith(BILLING) else block.text for block in blocks
    )


def _from_user(run: Numbered, unanswered: dict[str, str]) -> list[ChatMessage]:
    unanswered = dict(unanswered)
    results: list[ChatMessage] = []
    texts: list[str] = []
    for number, turn in run:
        text = ""
        for index, block in _blocks(turn):
            if isinstance(block, TextBlock):
                text += block.text
                continue
            assert isinstance(block, ToolResultBlock)
            path = _path(number, index)
            if text or any(texts):
                raise InvalidRequest(path, "results must come before the text of a user's turn")
            results.append(_result(path, block, unanswered))
        texts.append(text)
    _check_answered(run, unanswered)
    text = BETWEEN_TURNS.join(text for text in texts if text)
    return [*results, ChatMessage("user", text)] if text or not results else results


def _result(path: str, block: ToolResultBlock, unanswered: dict[str, str]) -> ChatMessage:
    """The message for a result. Removes the result's call from `unanswered`."""
    name = unanswered.pop(block.tool_use_id, None)
    if name is None:
        raise InvalidRequest(
            f"{path}.tool_use_id",
            f"{block.tool_use_id[:60]!r} is not a call of the previous assistant's turn, or the call already has a "
            "result",
        )
    content = text_of(block.content)
    return ChatMessage(
        "tool", f"{ERROR}{content}" if block.is_error else content, tool_call_id=block.tool_use_id, name=name
    )


def _check_answered(run: Numbered, unanswered: dict[str, str]) -> None:
    if unanswered:
        raise InvalidRequest(
            f"messages.{run[0][0]}",
            f"a tool_result is missing for {', '.join(repr(each[:60]) for each in list(unanswered)[:3])}: each call of "
            "an assistant's turn needs a tool_result at the beginning of the next user's turn",
        )


def _from_assistant(run: Numbered) -> ChatMessage:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: dict[str, ToolCall] = {}
    for number, turn in run:
        text = ""
        for index, block in _blocks(turn):
            match block:
                case TextBlock():
                    text += block.text
                case ThinkingBlock():
                    thoughts.append(block.thinking)
                case ToolUseBlock():
                    if block.id in calls:
                        raise InvalidRequest(
                            f"{_path(number, index)}.id",
                            f"{block.id[:60]!r} is also the id of an earlier call; give each call its own id",
                        )
                    arguments = json.dumps(block.input, ensure_ascii=False)
                    calls[block.id] = ToolCall(block.id, block.name, arguments)
        texts.append(text)
    return ChatMessage(
        "assistant",
        BETWEEN_TURNS.join(text for text in texts if text),
        reasoning="".join(thoughts) or None,
        tool_calls=tuple(calls.values()),
    )


def _blocks(turn: Turn) -> Iterator[tuple[int, Block]]:
    """A turn's blocks with their indexes, without redacted thinking."""
    assert isinstance(turn, UserTurn | AssistantTurn)
    if isinstance(turn.content, str):
        yield 0, TextBlock(type="text", text=turn.content)
        return
    for index, block in enumerate(turn.content):
        if block.type != "redacted_thinking":
            yield index, block


def _path(number: int, index: int) -> str:
    return f"messages.{number}.content.{index}"
