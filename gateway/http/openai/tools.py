"""Tools of a chat, and which of them the model may call: OpenAI's fields as our own values."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic_core import to_json

from baton.errors import InvalidRequest
from gateway.conversation import Tool, ToolChoice, ToolUse
from gateway.http.openai.fields import Body

MAX_TOOLS = 128
"""OpenAI's bound."""
MAX_DESCRIPTION_CHARACTERS = 2**16
MAX_SCHEMA_BYTES = 2**20
"""Of all tools together: each schema is part of the prompt."""

ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


class FunctionDefinition(Body):
    """A function that the client can run for the model."""

    name: ToolName
    description: str | None = Field(None, max_length=MAX_DESCRIPTION_CHARACTERS)
    parameters: dict[str, Any] | None = Field(
        None, description="A JSON schema of the arguments, which are an object. Default: no arguments."
    )
    strict: bool | None = Field(None, description="Arguments always match the schema.")


class FunctionTool(Body):
    """A tool that the client runs itself. The model is told of it, and may ask for it."""

    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(Body):
    """A function by its name."""

    name: ToolName


class NamedTool(Body):
    """One of the tools."""

    type: Literal["function"]
    function: FunctionName


class AllowedToolsParts(Body):
    """The tools that this turn may call, and whether it must call one."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)]


class AllowedTools(Body):
    """Some of the tools. The model is told of all of them."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedToolsParts


Tools = Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS, fail_fast=True)]
ToolChoiceField = (
    Literal["none", "auto", "required"] | Annotated[NamedTool | AllowedTools, Field(discriminator="type")]
)


def tools_of(tools: Sequence[FunctionTool] | None) -> tuple[Tool, ...]:
    """InvalidRequest names the tool's field."""
    converted: list[Tool] = []
    index_of: dict[str, int] = {}
    num_bytes = 0
    for index, tool in enumerate(tools or ()):
        function = tool.function
        place = f"tools.{index}.function"
        first = index_of.setdefault(function.name, index)
        if first != index:
            raise InvalidRequest(
                f"{place}.name", f"tools.{first} is called {function.name!r} too; rename one"
            )
        converted.append(_tool_of(function, place))
        num_bytes += len(to_json(function.parameters))
        if num_bytes > MAX_SCHEMA_BYTES:
            raise InvalidRequest(
                f"{place}.parameters", f"the schemas up to this one have more than {MAX_SCHEMA_BYTES} bytes"
            )
    return tuple(converted)


def _tool_of(function: FunctionDefinition, place: str) -> Tool:
    if function.parameters is None:
        return Tool(function.name, function.description, strict=bool(function.strict))
    kind = function.parameters.get("type", "object")
    if kind != "object":
        raise InvalidRequest(f"{place}.parameters.type", f"must be 'object', got {str(kind)[:60]!r}")
    return Tool(function.name, function.description, function.parameters, bool(function.strict))


def tool_choice_of(choice: ToolChoiceField | None, tools: Sequence[Tool]) -> ToolChoice:
    """InvalidRequest if it asks for a tool that is not there."""
    match choice:
        case None | "auto":
            return ToolChoice()
        case "none":
            return ToolChoice(ToolUse.NONE)
        case "required":
            if not tools:
                raise InvalidRequest("tool_choice", "'required' needs tools")
            return ToolChoice(ToolUse.REQUIRED)
        case NamedTool():
            _check_name("tool_choice.function.name", choice.function.name, tools)
            return ToolChoice(ToolUse.REQUIRED, (choice.function.name,))
        case AllowedTools(allowed_tools=allowed):
            names = [tool.function.name for tool in allowed.tools]
            for index, name in enumerate(names):
                _check_name(f"tool_choice.allowed_tools.tools.{index}.function.name", name, tools)
            return ToolChoice(ToolUse(allowed.mode), tuple(dict.fromkeys(names)))


def _check_name(place: str, name: str, tools: Sequence[Tool]) -> None:
    names = [tool.name for tool in tools]
    if name not in names:
        known = ", ".join(map(repr, names[:8])) + (", ..." if len(names) > 8 else "")
        raise InvalidRequest(place, f"{name!r} is none of the tools, which are: {known or 'none'}")
