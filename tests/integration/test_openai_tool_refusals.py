"""Chats with tools that are refused: the field by its path, the reason, and no time lost on large ones."""

import time
from pathlib import Path
from typing import Any

import httpx2
import pytest

from baton.errors import InvalidRequest
from tests.factories.answer_format import MarkedFormat
from tests.factories.gateway import answering, gateway_with
from tests.factories.models import make_tokenizer

ANSWER = make_tokenizer().encode("baton").ids
USER = {"role": "user", "content": "Hello"}
MAX_BODY_S = 5.0
"""Generous, as the machine may be busy."""


def tool(name: str = "f", **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name} | fields}


def call(id_: str = "a", name: str = "f", **fields: Any) -> dict[str, Any]:
    return {"id": id_, "type": "function", "function": {"name": name, "arguments": "{}"}} | fields


def asks(*calls: Any, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": list(calls)} | fields


def result(id_: str = "a", **fields: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id_, "content": "7"} | fields


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"properties": {"a": schema}}
    return schema


NAMED = {"type": "function", "function": {"name": "f"}}

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (
        "messages.1.tool_calls.1.function.arguments",
        {"messages": [USER, asks(call("a"), call("b", function={"name": "f", "arguments": '{"a'}))]},
        "must be a JSON object as text; leave out a call that was cut off",
    ),
    (
        "tools.0.type",
        {"tools": [{"type": "custom", "custom": {"name": "f"}}]},
        "must be 'function', got 'custom'",
    ),
    ("tools.0.function", {"tools": [{"type": "function"}]}, "missing"),
    ("tools.0.function.name", {"tools": [tool("")]}, "pattern"),
    ("tools.0.function.name", {"tools": [tool("get weather")]}, "pattern"),
    ("tools.0.function.name", {"tools": [tool("x" * 10**6)]}, "pattern"),
    ("tools.1.function.name", {"tools": [tool(), tool()]}, "tools.0 is called 'f' too"),
    ("tools.0.function.foo", {"tools": [tool(foo=1)]}, "unknown field"),
    ("tools.0.function.parameters", {"tools": [tool(parameters=[])]}, "must be a valid dictionary"),
    (
        "tools.0.function.parameters.type",
        {"tools": [tool(parameters={"type": "string"})]},
        "must be 'object'",
    ),
    ("tools.0.function.strict", {"tools": [tool(strict="yes")]}, "must be a valid boolean"),
    ("tools", {"tools": [tool(f"f{number}") for number in range(1000)]}, "at most 128 items"),
    ("body", {"tools": [tool(parameters=nested(40))]}, "nested more than 64 levels deep"),
    (
        "tools.1.function.parameters",
        {"tools": [tool(name, parameters={"description": "x" * 600_000}) for name in "fg"]},
        "more than 1048576 bytes",
    ),
    ("tool_choice", {"tool_choice": "required"}, "needs tools"),
    ("tool_choice.function.name", {"tool_choice": NAMED}, "'f' is not one of the tools; the tools are: none"),
    (
        "tool_choice.function.name",
        {"tools": [tool("g"), tool("h")], "tool_choice": NAMED},
        "'f' is not one of the tools; the tools are: 'g', 'h'",
    ),
    (
        "tool_choice.allowed_tools.tools.0.function.name",
        {
            "tools": [tool("g")],
            "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}},
        },
        "'f' is not one of the tools",
    ),
    ("tool_choice.type", {"tool_choice": {"type": "custom", "custom": {"name": "f"}}}, "got 'custom'"),
    ("tool_choice", {"tool_choice": "any"}, "must be 'none', 'auto' or 'required'"),
    ("functions", {"functions": [{"name": "f"}]}, "not supported"),
    ("function_call", {"function_call": "auto"}, "not supported"),
    (
        "messages.1.tool_call_id",
        {"messages": [USER, result()]},
        "no earlier message of the assistant has a call 'a'",
    ),
    ("messages.0.tool_call_id", {"messages": [result(), asks(call())]}, "no earlier"),
    ("messages.1.tool_call_id", {"messages": [asks(call()), {"role": "tool", "content": ""}]}, "missing"),
    ("messages.1.name", {"messages": [asks(call()), result(name="g")]}, "the call was to 'f', got 'g'"),
    ("messages.0.tool_calls.1.id", {"messages": [asks(call(), call())]}, "another call of this message"),
    ("messages.0.tool_calls.0.type", {"messages": [asks(call(type="custom"))]}, "got 'custom'"),
    ("messages.0.tool_calls.0.function", {"messages": [asks({"id": "a", "type": "function"})]}, "missing"),
    ("messages.0.tool_calls", {"messages": [asks(*[call()] * 129)]}, "at most 128"),
    (
        "messages.0.content.0.type",
        {"messages": [asks(content=[{"type": "refusal", "refusal": "no"}])]},
        "refusal",
    ),
    ("messages.0.tool_calls", {"messages": [USER | {"tool_calls": [call()]}]}, "unknown field"),
    ("messages.0.reasoning_content", {"messages": [USER | {"reasoning_content": "hm"}]}, "unknown field"),
    (
        "messages.0.reasoning",
        {"messages": [asks(call(), reasoning="a", reasoning_content="b")]},
        "differs from reasoning_content",
    ),
    ("reasoning_effort", {"reasoning_effort": "most"}, "got 'most'"),
    ("thinking_token_budget", {"thinking_token_budget": -1}, "greater than or equal to 0"),
    ("chat_template_kwargs.messages", {"chat_template_kwargs": {"messages": "x"}}, "set by the gateway"),
    (
        "chat_template_kwargs.chat_template",
        {"chat_template_kwargs": {"chat_template": "x"}},
        "set by the gateway",
    ),
    ("chat_template_kwargs.a", {"chat_template_kwargs": {"a": [1]}}, "must be a valid"),
    (
        "chat_template_kwargs.a",
        {"chat_template_kwargs": {"a": "x" * 2000}},
        "at most 1024 characters, got 2000",
    ),
    (
        "chat_template_kwargs",
        {"chat_template_kwargs": {"a b": 1}},
        "not a valid name of a template's variable",
    ),
    ("chat_template_kwargs", {"chat_template_kwargs": {f"a{n}": 1 for n in range(33)}}, "at most 32"),
]


async def test_each_is_refused_by_its_path_and_a_good_one_is_answered_after_them(folder: Path) -> None:
    async with (
        gateway_with(
            folder, {}, {"d0": answering(ANSWER)}, answer_format=MarkedFormat(), max_model_len=2000
        ) as under_test,
        under_test.http() as client,
    ):

        async def asked(fields: dict[str, Any]) -> httpx2.Response:
            body = {"model": "tiny", "messages": [USER]} | fields
            return await client.post("/v1/chat/completions", json=body)

        for param, fields, complaint in REFUSED:
            began = time.process_time()
            answer = await asked(fields)
            assert time.process_time() - began < MAX_BODY_S
            assert answer.status_code == 400, (param, answer.text[:500])
            error = answer.json()["error"]
            assert (error["param"], complaint in error["message"]) == (param, True), error
            assert len(error["message"]) < 600
        good = {"messages": [USER, asks(call()), result()]}
        for fields in (
            good,
            good | {"tools": [tool(parameters={}, strict=True)], "tool_choice": "auto"},
            {"tools": [tool(f"f{number}") for number in range(16)], "parallel_tool_calls": True},
            {"tools": [], "tool_choice": "none", "parallel_tool_calls": False},
            {"chat_template_kwargs": {"enable_thinking": False, "depth": 1, "style": None}},
            {"logprobs": False, "top_logprobs": 0},
            {"messages": [USER, asks(content="Hi", reasoning="hm", reasoning_content="hm"), USER]},
        ):
            answer = await asked(fields)
            assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("stream", [True, False])
async def test_a_model_without_tools_refuses_them_by_name(folder: Path, stream: bool) -> None:
    """The model's format also refuses all other fields that it does not support, by the client's names."""

    class Refusing(MarkedFormat):
        def template_arguments(self, conversation: Any) -> dict[str, Any]:
            field = "template_options" if conversation.template_options else "reasoning"
            raise InvalidRequest(field, "this model has none")

    async with (
        gateway_with(folder, {}, {"d0": answering(ANSWER)}, answer_format=Refusing()) as under_test,
        under_test.http() as client,
    ):
        for fields, param in (
            ({"reasoning_effort": "low"}, "reasoning_effort"),
            ({"thinking_token_budget": 9}, "thinking_token_budget"),
            ({"thinking_token_budget": 9, "reasoning_effort": "low"}, "thinking_token_budget"),
            ({"thinking_token_budget": 9, "reasoning_effort": "none"}, "reasoning_effort"),
            ({"chat_template_kwargs": {"a": 1}}, "chat_template_kwargs"),
        ):
            body = {"model": "tiny", "messages": [USER], "stream": stream} | fields
            answer = await client.post("/v1/chat/completions", json=body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
