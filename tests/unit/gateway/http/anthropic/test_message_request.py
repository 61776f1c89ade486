"""Every field that the `anthropic` package can send is honoured, or refused by name; a page says which."""

import inspect
import re
import typing
from pathlib import Path
from typing import Any

import pytest
from anthropic.types import (
    MessageCountTokensParams,
    ToolParam,
    message_create_params,
)
from anthropic.types.beta import message_create_params as beta_params
from pydantic import ValidationError

from baton.errors import InvalidRequest
from baton.sampling import MAX_SEED, GrammarKind
from gateway.http.anthropic.message_request import CountTokensRequest, MessagesRequest
from gateway.http.anthropic.tools import ToolDefinition
from gateway.http.body import Body

PAGE = (Path(__file__).parents[5] / "docs" / "messages.md").read_text()

GOOD: dict[str, Any] = {"model": "tiny", "max_tokens": 9, "messages": [{"role": "user", "content": "Hello"}]}
SCHEMA = {"type": "json_schema", "schema": {"type": "object"}}

IN_HEADERS = {"betas", "user_profile_id", "workspace_id"}
"""Parameters of the package that it sends as headers."""


def names_in(params: Any) -> set[str]:
    return set(typing.get_type_hints(params))


def test_the_page_tells_of_every_field_of_the_package() -> None:
    fields = names_in(message_create_params.MessageCreateParamsStreaming)
    fields |= names_in(beta_params.MessageCreateParamsStreaming)
    fields |= names_in(MessageCountTokensParams) | names_in(ToolParam)
    assert {"messages", "thinking", "mcp_servers", "input_schema"} <= fields
    assert [name for name in sorted(fields) if f"`{name}`" not in PAGE] == []


@pytest.mark.parametrize("body", [MessagesRequest, ToolDefinition])
def test_the_page_tells_of_every_field_of_ours(body: type[Body]) -> None:
    assert [name for name in body.model_fields if f"`{name}`" not in PAGE] == []


def test_no_parameter_of_the_package_is_an_unknown_field() -> None:
    fields = names_in(message_create_params.MessageCreateParamsStreaming) - IN_HEADERS
    assert fields <= set(MessagesRequest.model_fields)
    assert names_in(MessageCountTokensParams) - IN_HEADERS <= set(CountTokensRequest.model_fields)
    assert names_in(ToolParam) <= set(ToolDefinition.model_fields)
    beta = names_in(beta_params.MessageCreateParamsStreaming) - IN_HEADERS - set(MessagesRequest.model_fields)
    refused = next(line for line in PAGE.splitlines() if "betas of Anthropic's API" in line)
    assert beta == set(re.findall(r"`(\w+)`", refused))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("container", "c"),
        ("diagnostics", {}),
        ("inference_geo", "eu"),
        ("thread", {"type": "create"}),
        ("speed", "fast"),
        ("mcp_servers", [{"type": "url"}]),
        ("context_management", {"edits": [{"type": "clear_tool_uses_20250919"}]}),
        ("stop", ["x"]),
        ("max_tokens", 0),
        ("tools", [{"name": "a", "input_schema": {}, "defer_loading": 0}]),
        ("foo", 1),
    ],
)
def test_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ValidationError) as caught:
        MessagesRequest.model_validate(GOOD | {field: value})
    assert {finding["loc"][0] for finding in caught.value.errors()} == {field}


def test_what_a_coding_agent_sends_is_taken() -> None:
    body = MessagesRequest.model_validate(
        GOOD
        | {
            "metadata": {"user_id": "x"},
            "service_tier": "auto",
            "cache_control": {"type": "ephemeral"},
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "mcp_servers": [],
            "tools": [
                {
                    "name": "edit",
                    "description": "Edits a file",
                    "input_schema": {"type": "object", "properties": {}},
                    "strict": True,
                    "eager_input_streaming": True,
                    "defer_loading": True,
                    "cache_control": {"type": "ephemeral"},
                }
            ],
        }
    )
    (tool,) = body.conversation.tools
    assert (tool.name, tool.description, tool.strict) == ("edit", "Edits a file", True)


def test_sampling() -> None:
    params = MessagesRequest.model_validate(
        GOOD
        | {
            "temperature": 0.5,
            "top_k": 3,
            "top_p": 0.9,
            "stop_sequences": ["a", "b"],
            "seed": -1,
            "min_p": 0.1,
        }
        | {"output_config": {"format": SCHEMA}}
    ).sampling()
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.5, 3, 0.9, 0.1)
    assert (params.stop, params.seed, params.max_tokens) == (("a", "b"), MAX_SEED, 9)
    assert params.structured_output is not None
    assert params.structured_output.kind is GrammarKind.JSON_SCHEMA
    earlier = MessagesRequest.model_validate(GOOD | {"output_format": SCHEMA}).sampling()
    assert earlier.structured_output == params.structured_output
    both = GOOD | {"output_format": SCHEMA, "output_config": {"format": SCHEMA}}
    with pytest.raises(InvalidRequest, match="set only one"):
        MessagesRequest.model_validate(both).sampling()


def test_the_package_is_the_one_that_is_compared() -> None:
    """The types of the package have the parameters of the method that programs call."""
    from anthropic.resources import Messages

    parameters = set(inspect.signature(Messages.create).parameters)
    parameters -= {"self", "extra_headers", "extra_query", "extra_body", "timeout"}
    assert parameters == names_in(message_create_params.MessageCreateParamsStreaming)
