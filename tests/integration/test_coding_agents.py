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


async def test_a_request_as_codex_sends_it(folder: Path) -> None:
    async with (
        gateway_with(folder, {}, {"d0": answering(ANSWER)}, max_model_len=1024) as under_test,
        under_test.http() as client,
    ):
        answer = await client.post("/v1/responses", json=AS_CODEX)
        assert answer.status_code == 200, answer.text
        assert "response.incomplete" in answer.text
