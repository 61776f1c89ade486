"""Messages of the assistant as clients of several providers send them back."""

from typing import Any

import pytest
from pydantic import ValidationError

from gateway.conversation import ChatMessage, ToolCall
from gateway.http.openai.chat_request import ChatCompletionRequest
from gateway.http.openai.messages import chat_messages_of
from gateway.http.openai.tools import tools_of

MARK = {"cache_control": {"type": "ephemeral"}}
CALL: dict[str, Any] = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def request_of(*messages: dict[str, Any], **fields: Any) -> ChatCompletionRequest:
    return ChatCompletionRequest.model_validate({"model": "m", "messages": [*messages], **fields})


def test_marks_for_a_prefix_cache_change_nothing() -> None:
    def asked(mark: dict[str, Any]) -> ChatCompletionRequest:
        text = {"type": "text", "text": "a", **mark}
        return request_of(
            {"role": "system", "content": [text], **mark},
            {"role": "user", "content": [text]},
            {"role": "assistant", "content": [text], "tool_calls": [CALL], **mark},
            {"role": "tool", "content": "b", "tool_call_id": "c", **mark},
            tools=[{"type": "function", "function": {"name": "f", **mark}, **mark}],
        )

    marked, plain = asked(MARK), asked({})
    assert chat_messages_of(marked.messages) == chat_messages_of(plain.messages)
    assert tools_of(marked.tools) == tools_of(plain.tools)


def test_thoughts_in_blocks_are_reasoning_unless_the_message_also_has_it_as_text() -> None:
    blocks = [
        {"type": "thinking", "thinking": "Hm", "signature": "s"},
        {"type": "thinking", "thinking": "m."},
        {"type": "redacted_thinking", "data": "x"},
    ]
    for fields, reasoning in (
        ({"thinking_blocks": blocks}, "Hmm."),
        ({"thinking_blocks": blocks, "reasoning_content": "Oh."}, "Oh."),
        ({"thinking_blocks": blocks, "reasoning": ""}, "Hmm."),
        ({"reasoning": "Oh.", "reasoning_content": ""}, "Oh."),
        ({"thinking_blocks": []}, None),
    ):
        (message,) = chat_messages_of(request_of({"role": "assistant", "content": "a", **fields}).messages)
        assert message.reasoning == reasoning


def test_a_call_may_lack_its_type_and_its_arguments() -> None:
    bare = {"id": "c", "function": {"name": "f"}}
    (message,) = chat_messages_of(request_of({"role": "assistant", "tool_calls": [bare]}).messages)
    assert message.tool_calls == (ToolCall("c", "f", "{}"),)


def test_an_empty_refusal_is_none() -> None:
    for empty in ("", None):
        part = {"type": "text", "text": "a", "refusal": empty}
        for content in ("a", [part]):
            asked = request_of({"role": "assistant", "content": content, "refusal": empty})
            assert chat_messages_of(asked.messages) == (ChatMessage("assistant", "a"),)


@pytest.mark.parametrize("refusal", ["No.", 0, []])
def test_a_refusal_is_refused(refusal: object) -> None:
    part = {"type": "text", "text": "a", "refusal": refusal}
    for fields in ({"content": None, "refusal": refusal}, {"content": [part]}):
        with pytest.raises(ValidationError, match="not supported; remove it"):
            request_of({"role": "assistant", **fields})
