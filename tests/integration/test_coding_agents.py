"""Requests as coding agents send them (Claude Code, Codex) to a model of another kind than the agents expect."""

from pathlib import Path
from typing import Any

import pytest

from baton.request import EngineRequest
from tests.factories.gateway import answering, gateway_with
from tests.factories.models import make_tokenizer

TOKENIZER = make_tokenizer()
ANSWER = TOKENIZER.encode("The cache is the baton").ids
HELLO = [{"role": "user", "content": "Hello"}]
PATHS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO, "max_tokens": 5},
    "/v1/messages": {"messages": HELLO, "max_tokens": 5},
    "/v1/responses": {"input": HELLO, "max_output_tokens": 5},
}
"""A request for each API, without the model."""

AS_CLAUDE_CODE: dict[str, Any] = {
    "model": "tiny",
    "max_tokens": 32_000,
    "messages": [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}],
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=eb6c6;"},
        {
            "type": "text",
            "text": "You are Claude Code",
            "cache_control": {"type": "ephemeral", "ttl": "1h", "scope": "global"},
        },
    ],
    "tools": [],
    "metadata": {"user_id": "someone"},
    "thinking": {"type": "adaptive"},
    "output_config": {"effort": "high"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "stream": True,
}
"""A request as Claude Code sends it."""

AS_CODEX: dict[str, Any] = {
    "model": "tiny",
    "instructions": "You are Codex",
    "input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hello"}]}],
    "tools": [],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "a conversation's id",
    "client_metadata": {"x-codex-installation-id": "1", "x-codex-turn-metadata": "{}"},
}
"""A request as Codex sends it."""


def prompt_of(request: EngineRequest) -> str:
    return str(TOKENIZER.decode(list(request.prompt_token_ids), skip_special_tokens=False))


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {"reasoning_effort": "high"}),
        ("/v1/messages", {"output_config": {"effort": "max"}, "thinking": {"type": "adaptive"}}),
        ("/v1/responses", {"reasoning": {"effort": "medium", "summary": "auto"}}),
    ],
)
async def test_a_level_of_effort_changes_nothing_in_a_model_without_levels(
    folder: Path, path: str, fields: dict[str, Any]
) -> None:
    async with (
        gateway_with(folder, {}, {"d0": answering(ANSWER)}) as under_test,
        under_test.http() as client,
    ):
        for more in ({}, fields):
            answer = await client.post(path, json={"model": "tiny"} | PATHS[path] | more)
            assert answer.status_code == 200, answer.text
        requests = [await under_test.workers["d0"].next_request() for _ in range(2)]
    assert prompt_of(requests[0]) == prompt_of(requests[1])


@pytest.mark.parametrize(
    ("path", "body", "instructions", "last"),
    [
        ("/v1/messages?beta=true", AS_CLAUDE_CODE, "You are Claude Code", "message_stop"),
        ("/v1/responses", AS_CODEX, "You are Codex", "response.incomplete"),
    ],
)
async def test_a_request_as_an_agent_sends_it(
    folder: Path, path: str, body: dict[str, Any], instructions: str, last: str
) -> None:
    async with (
        gateway_with(folder, {}, {"d0": answering(ANSWER)}, max_model_len=1024) as under_test,
        under_test.http() as client,
    ):
        answer = await client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        assert f"event: {last}\n" in answer.text
        request = await under_test.workers["d0"].next_request()
    assert prompt_of(request) == (
        f"<|im_start|>system\n{instructions}<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    )
