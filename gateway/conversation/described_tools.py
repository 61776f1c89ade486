"""Tools for chat templates without tools: the system message describes them, and calls are text."""

import json
from collections.abc import Sequence
from typing import Any

from gateway.conversation.messages import ChatMessage, Conversation, Tool
from gateway.conversation.template import ChatTemplate, arguments_of, described

INTRODUCTION = """\
You can call functions. Their signatures, in JSON:
<tools>
{tools}
</tools>
To call a function, write its name and its arguments as JSON within tags, and nothing behind them:
<tool_call>
{{"name": "the function's name", "arguments": {{"argument": "value"}}}}
</tool_call>
Results are sent to you within <tool_response> tags."""

_WITHOUT_SYSTEM_ROLE = ("System role not supported", "Only user and assistant roles are supported!")
"""What the templates of Gemma, and the first ones of Mistral and Mixtral, say as they refuse a system message."""


def described_turns(conversation: Conversation, template: ChatTemplate) -> list[dict[str, Any]]:
    """The same conversation in system, user and assistant turns. Adjacent results of calls become one user
    turn, and a user's message after them joins this turn.

    If the template does not know the role `system`, the system text moves to the first user turn.
    """
    turns: list[dict[str, Any]] = []
    is_after_result = False
    for message in conversation.messages:
        role, text = _as_text(message)
        if role == "user" and is_after_result:
            turns[-1]["content"] += "\n" + text
        else:
            turns.append({"role": role, "content": text, **template.past_reasoning(message, text)})
            if message.name is not None and message.role != "tool":
                turns[-1]["name"] = message.name
        is_after_result = message.role == "tool"
    if conversation.tools:
        _introduce(turns, conversation.tools)
    has_system_role = not any(words in template.source for words in _WITHOUT_SYSTEM_ROLE)
    if not has_system_role and turns and turns[0]["role"] == "system":
        _join_first(turns)
    return turns


def _introduce(turns: list[dict[str, Any]], tools: Sequence[Tool]) -> None:
    lines = "\n".join(json.dumps(described(tool), ensure_ascii=False) for tool in tools)
    text = INTRODUCTION.format(tools=lines)
    if turns and turns[0]["role"] == "system":
        turns[0]["content"] = f"{turns[0]['content']}\n\n{text}".strip()
    else:
        turns.insert(0, {"role": "system", "content": text})


def _join_first(turns: list[dict[str, Any]]) -> None:
    system = turns.pop(0)
    if turns and turns[0]["role"] == "user":
        turns[0]["content"] = f"{system['content']}\n\n{turns[0]['content']}"
    else:
        turns.insert(0, {**system, "role": "user"})


def _as_text(message: ChatMessage) -> tuple[str, str]:
    """A turn's role and text."""
    if message.role == "tool":
        return "user", f"<tool_response>\n{message.content}\n</tool_response>"
    calls = [
        f'<tool_call>\n{{"name": {json.dumps(call.name)}, "arguments": '
        f"{json.dumps(arguments_of(call), ensure_ascii=False)}}}\n</tool_call>"
        for call in message.tool_calls
    ]
    return message.role, "\n".join([*([message.content] if message.content or not calls else []), *calls])
