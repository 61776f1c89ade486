"""Requests as coding agents send them (Claude Code, Codex) to a model of another kind than the agents expect."""

from pathlib import Path
from typing import Any

import pytest
from openai.types.responses import NamespaceToolParam, ResponseFunctionToolCall

from baton.request import EngineRequest, FinishReason, RequestOutput
from tests.factories.conversations import TEMPLATES
from tests.factories.gateway import answering, gateway_with, outputs_of
from tests.factories.models import make_tokenizer, make_tokenizer_dir
from tests.factories.openai import openai_with

TOKENIZER = make_tokenizer()
ANSWER = TOKENIZER.encode("The cache is the baton").ids
HELLO = [{"role": "user", "content": "Hello"}]
FILES: NamespaceToolParam = {
    "type": "namespace",
    "name": "mcp__files",
    "description": "Files of the project",
    "tools": [{"type": "function", "name": "search", "parameters": {"type": "object"}, "strict": False}],
}
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
    "thinking": {"type": "adaptive", "display": "updates"},
    "output_config": {"effort": "high"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "stream": True,
}
"""A request as Claude Code sends it."""

AS_CODEX: dict[str, Any] = {
    "model": "tiny",
    "instructions": "You are Codex",
    "input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hello"}]}],
    "tools": [{"type": "web_search", "external_web_access": False}],
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


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_loop_with_the_tools_of_an_mcp_server(tmp_path: Path, is_stream: bool) -> None:
    """Codex sends them in a namespace. It finds the server of a call by the call's namespace."""
    folder = make_tokenizer_dir(tmp_path, TEMPLATES["hermes"])
    call = '<tool_call>\n{"name": "mcp__files.search", "arguments": {"query": "baton"}}\n</tool_call>'
    answers = iter([call, "Found"])

    def script(request: EngineRequest) -> list[RequestOutput]:
        return outputs_of(request, TOKENIZER.encode(next(answers)).ids, finish=FinishReason.STOP)

    async with openai_with(folder, script, max_model_len=2048) as (under_test, client):

        async def create(**fields: Any) -> Any:
            if not is_stream:
                return await client.responses.create(model="tiny", tools=[FILES], **fields)
            async with client.responses.stream(model="tiny", tools=[FILES], **fields) as stream:
                return await stream.get_final_response()

        first = await create(input="Where is the baton?")
        (asked,) = first.output
        assert isinstance(asked, ResponseFunctionToolCall)
        assert (asked.namespace, asked.name) == ("mcp__files", "search")
        assert first.to_dict()["tools"][0]["tools"][0]["name"] == "search"
        result = {"type": "function_call_output", "call_id": asked.call_id, "output": "here"}
        stored = await client.responses.input_items.list(first.id)
        assert stored.data
        assert (await create(input=[result], previous_response_id=first.id)).output_text == "Found"
        await under_test.workers["d0"].next_request()
        prompt = prompt_of(await under_test.workers["d0"].next_request())
    assert call in prompt, "the prefix is in the worker's cache"


SYSTEM_FIRST = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}{% endfor %}"
    + TEMPLATES["hermes"]
)
"""A template like Qwen3.5's."""
LATE: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [
            {"role": "system", "content": "Be brief"},
            {"role": "developer", "content": "In French"},
            *HELLO,
            {"role": "system", "content": "No, in Dutch"},
        ]
    },
    "/v1/messages": {
        "system": "Be brief\n\nIn French",
        "messages": [*HELLO, {"role": "system", "content": "No, in Dutch"}],
        "max_tokens": 5,
    },
    "/v1/responses": {
        "instructions": "Be brief",
        "input": [
            {"role": "developer", "content": "In French"},
            *HELLO,
            {"role": "developer", "content": "No, in Dutch"},
        ],
    },
}
"""The same conversation in each API."""


@pytest.mark.parametrize("path", LATE)
async def test_late_system_messages_move_only_if_the_template_refuses_them(tmp_path: Path, path: str) -> None:
    end = "<|im_start|>assistant\n"
    for template, expected in (
        (SYSTEM_FIRST, "system\nBe brief\n\nIn French\n\nNo, in Dutch|user\nHello"),
        (TEMPLATES["hermes"], "system\nBe brief|system\nIn French|user\nHello|system\nNo, in Dutch"),
    ):
        if path == "/v1/messages":  # has one system text
            expected = expected.replace("Be brief|system\n", "Be brief\n\n")
        folder = make_tokenizer_dir(tmp_path, template)
        async with (
            gateway_with(folder, {}, {"d0": answering(ANSWER)}, max_model_len=1024) as under_test,
            under_test.http() as client,
        ):
            answer = await client.post(path, json={"model": "tiny"} | LATE[path])
            assert answer.status_code == 200, answer.text
            request = await under_test.workers["d0"].next_request()
        turns = "".join(f"<|im_start|>{turn}<|im_end|>\n" for turn in expected.split("|"))
        assert prompt_of(request) == turns + end


ALTERNATING = (
    "{% set turns = namespace(number=0) %}{% for m in messages %}"
    "{% if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}"
    "{% if (m.role == 'user') != (turns.number % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% set turns.number = turns.number + 1 %}{% endif %}{% endfor %}" + SYSTEM_FIRST
)
"""A template like those of Mistral: no user behind a result, and no two messages of a user."""


async def test_messages_are_joined_for_a_template_in_which_roles_must_alternate(tmp_path: Path) -> None:
    """Codex sends its environment and the user's text as two messages. Claude Code writes reminders behind results."""
    folder = make_tokenizer_dir(tmp_path, ALTERNATING)
    call = {"type": "tool_use", "id": "toolu_1", "name": "search", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "found"}
    reminder = {"type": "text", "text": "Remember"}
    turns = [
        *HELLO,
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result, reminder]},
    ]
    async with (
        gateway_with(folder, {}, {"d0": answering(ANSWER)}, max_model_len=1024) as under_test,
        under_test.http() as client,
    ):
        for path, fields, expected in (
            (
                "/v1/responses",
                {"input": [{"role": "user", "content": "In /tmp"}, *HELLO]},
                "user\nIn /tmp\n\nHello",
            ),
            ("/v1/messages", {"messages": turns, "max_tokens": 5}, "tool\nfound\n\nRemember"),
        ):
            answer = await client.post(path, json={"model": "tiny"} | fields)
            assert answer.status_code == 200, answer.text
            request = await under_test.workers["d0"].next_request()
            assert f"<|im_start|>{expected}<|im_end|>" in prompt_of(request)
        refused = {"model": "tiny", "messages": [{"role": "assistant", "content": "Hi"}, *HELLO]}
        answer = await client.post("/v1/chat/completions", json=refused)
        assert answer.status_code == 400
        assert "roles must alternate" in answer.text


@pytest.mark.parametrize("empty", [{}, {"content": None}, {"content": []}, {"content": ""}])
async def test_results_and_answers_without_a_text(tmp_path: Path, empty: dict[str, Any]) -> None:
    """go-openai leaves out an empty text. LangChain and Zed send an empty list if a tool returns nothing."""
    folder = make_tokenizer_dir(tmp_path, TEMPLATES["hermes"])
    call = {"id": "a", "type": "function", "function": {"name": "search", "arguments": "{}"}}
    turns = [
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a"} | empty,
        {"role": "assistant"} | empty,
    ]
    async with (
        gateway_with(folder, {}, {"d0": answering(ANSWER)}, max_model_len=1024) as under_test,
        under_test.http() as client,
    ):
        body = {"model": "tiny", "messages": [*HELLO, *turns, *HELLO]}
        answer = await client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        request = await under_test.workers["d0"].next_request()
    hello = "<|im_start|>user\nHello<|im_end|>\n"
    assert (
        f"</tool_call><|im_end|>\n<|im_start|>tool\n<|im_end|>\n<|im_start|>assistant\n<|im_end|>\n{hello}"
        in (prompt_of(request))
    )


async def test_a_result_without_parts_in_the_responses_api(tmp_path: Path) -> None:
    """Vercel's AI SDK sends such a result if an MCP server returns nothing."""
    folder = make_tokenizer_dir(tmp_path, TEMPLATES["hermes"])
    turns = [
        {"type": "function_call", "call_id": "a", "name": "search", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": []},
    ]
    async with (
        gateway_with(folder, {}, {"d0": answering(ANSWER)}, max_model_len=1024) as under_test,
        under_test.http() as client,
    ):
        answer = await client.post("/v1/responses", json={"model": "tiny", "input": [*HELLO, *turns]})
        assert answer.status_code == 200, answer.text
        request = await under_test.workers["d0"].next_request()
    assert "<|im_start|>tool\n<|im_end|>" in prompt_of(request)
