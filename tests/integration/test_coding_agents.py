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
