"""Tools of a response: functions, namespaces of functions, and tools that OpenAI's servers run."""

from typing import Any

import pytest
from openai.types.responses import NamespaceTool
from pydantic import ValidationError

from baton.errors import InvalidRequest
from gateway.conversation import ArgumentsDelta, CallBegins, CallEnds, ToolCall, ToolChoice, ToolUse
from gateway.http.responses.conversation import conversation_of
from gateway.http.responses.create_request import ResponseRequest
from gateway.http.responses.items import KeptItem, as_kept
from gateway.http.responses.output import CallOutput, ResponseOutput
from gateway.http.responses.tools import namespaces_of, shown_tools


def function(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "name": name, "parameters": {"type": "object"}} | fields


def space(name: str, *functions: dict[str, Any], description: str = "") -> dict[str, Any]:
    return {"type": "namespace", "name": name, "description": description, "tools": list(functions)}


FILES = space("mcp__files", function("search", description="Finds"), function("read"), description="A disk")


def body(*tools: dict[str, Any], **fields: Any) -> ResponseRequest:
    return ResponseRequest.model_validate({"model": "tiny", "input": "Hello", "tools": list(tools)} | fields)


def kept(body: ResponseRequest) -> list[KeptItem]:
    return body.items  # type: ignore[return-value]


def test_the_model_knows_functions_of_a_namespace_by_both_names() -> None:
    conversation = conversation_of(
        body(function("search"), FILES, tool_choice={"type": "function", "name": "mcp__files.read"}), []
    )
    assert [(tool.name, tool.description) for tool in conversation.tools] == [
        ("search", None),
        ("mcp__files.search", "A disk\n\nFinds"),
        ("mcp__files.read", None),
    ]
    assert conversation.tool_choice == ToolChoice(ToolUse.REQUIRED, ("mcp__files.read",))


def test_the_model_knows_deferred_functions_at_once() -> None:
    deferred = function("look", defer_loading=True)
    asked = body({"type": "tool_search"}, deferred, space("files", deferred))
    assert [tool.name for tool in conversation_of(asked, []).tools] == ["look", "files.look"]
    with pytest.raises(ValidationError, match="defer_loading"):
        body(function("look", defer_loading=0))


def test_a_call_comes_back_with_its_namespace_and_may_be_sent_back() -> None:
    asked = body(FILES, function("look"))
    output = ResponseOutput("r", None, namespaces_of(asked.tools))
    for number, name in enumerate(("mcp__files.read", "look", "mcp__files.unknown")):
        list(output.on_events([CallBegins(number, name), ArgumentsDelta(number, "{}"), CallEnds(number)]))
    calls = [item for item in output.items if isinstance(item, CallOutput)]
    assert [(call.namespace, call.name) for call in calls] == [
        ("mcp__files", "read"),
        (None, "look"),
        (None, "mcp__files.unknown"),
    ]
    call = {
        "type": "function_call",
        "call_id": "c",
        "name": "read",
        "namespace": "mcp__files",
        "arguments": "{}",
    }
    result = {"type": "function_call_output", "call_id": "c", "output": "4"}
    items = kept(body(FILES, input=[call, result]))
    said, answered = conversation_of(asked, items).messages
    assert said.tool_calls == (ToolCall("c", "mcp__files.read", "{}"),)
    assert answered.name == "mcp__files.read"
    assert as_kept(items[0], "fc")["namespace"] == "mcp__files"


def test_a_response_repeats_namespaces_as_the_package_describes_them() -> None:
    (shown,) = shown_tools(body({"type": "namespace", "name": "a", "tools": [function("b")]}).tools)
    assert NamespaceTool.model_validate(shown).description == ""
    assert [tool["name"] for tool in shown["tools"]] == ["b"]


def test_a_result_may_repeat_the_names_of_its_call_but_no_others() -> None:
    call = {"type": "function_call", "call_id": "c", "namespace": "files", "name": "read", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c", "output": "text"}

    def said(**fields: str) -> str | None:
        asked = body(input=[call, result | fields])
        return conversation_of(asked, kept(asked)).messages[-1].name

    for fields in ({}, {"name": "read"}, {"namespace": "files"}, {"name": "read", "namespace": "files"}):
        assert said(**fields) == "files.read"
    for others, got in (({"name": "write"}, "write"), ({"namespace": "disks"}, "disks.read")):
        with pytest.raises(InvalidRequest, match=f"'c' was to 'files.read', but its output is of '{got}'"):
            said(**others)


@pytest.mark.parametrize(
    ("tools", "field"),
    [
        ([function("a.b"), space("a", function("c"), function("b"))], "tools.1.tools.1.name"),
        ([space("a", function("b"), function("b"))], "tools.0.tools.1.name"),
        ([space("a" * 64, function("b" * 64))], "tools.0.tools.0.name"),
        ([space("a", function("b", parameters={"type": "array"}))], "tools.0.tools.0.parameters.type"),
        ([space(str(n), *(function(f"f{m}") for m in range(600))) for n in range(2)], "tools"),
    ],
)
def test_an_invalid_namespace_is_refused_by_its_place(tools: list[dict[str, Any]], field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        conversation_of(body(*tools), [])
    assert refused.value.field == field


def test_tools_that_openais_servers_run_are_left_out() -> None:
    """Codex sends one of them to every server."""
    hosted = (
        {"type": "web_search", "external_web_access": False},
        {"type": "mcp", "server_label": "x", "server_url": "http://x"},
        {"type": "tool_search", "execution": "client", "parameters": {"type": "object"}},
    )
    asked = body(*hosted, function("f"))
    assert [tool.name for tool in conversation_of(asked, []).tools] == ["f"]
    assert [tool["type"] for tool in shown_tools(asked.tools)] == ["function"]
    with pytest.raises(InvalidRequest, match="tool_choice: 'required' needs a function in tools"):
        conversation_of(body(*hosted, tool_choice="required"), [])


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "web_search"},
        {"type": "mcp", "server_label": "x"},
        {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "web_search"}]},
    ],
)
def test_a_choice_of_such_a_tool_is_refused(choice: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="is a hosted tool, and the gateway has none; choose functions"):
        body({"type": "web_search"}, tool_choice=choice)
