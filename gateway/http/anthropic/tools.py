"""Tools of a request, and the choice among them: converts Anthropic's fields to Baton's types."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from baton.errors import InvalidRequest
from gateway.conversation import Tool, ToolChoice, ToolUse
from gateway.conversation.checks import check_among, check_tools
from gateway.http.anthropic.blocks import MAX_NAME_CHARACTERS, CacheControl
from gateway.http.body import Body, NotSupported

MAX_TOOLS = 1024

_Name = Annotated[str, Field(pattern=rf"^[a-zA-Z0-9_-]{{1,{MAX_NAME_CHARACTERS}}}$")]


def _of_the_client(value: object) -> object:
    if isinstance(value, str) and value != "custom":
        raise PydanticCustomError(
            "not_supported",
            "tools that Anthropic defines or runs are not supported; send name and input_schema",
        )
    return value


class ToolDefinition(Body):
    """A function that the client can run for the model."""

    type: Annotated[Literal["custom"] | None, BeforeValidator(_of_the_client)] = None
    name: _Name
    description: str | None = None
    input_schema: dict[str, Any] = Field(description="A JSON schema of the tool's input.")
    strict: bool | None = Field(None, description="Input always matches the schema.")
    cache_control: CacheControl | None = None
    eager_input_streaming: bool | None = Field(
        None, description="Accepted and ignored: input always streams as the model writes it."
    )
    defer_loading: bool | None = Field(
        None, description="Accepted and ignored: the model knows all tools from the beginning."
    )
    allowed_callers: Annotated[list[Literal["direct"]], Field(min_length=1, max_length=1)] | None = None
    input_examples: NotSupported = None

    @property
    def tool(self) -> Tool:
        return Tool(self.name, self.description, self.input_schema, bool(self.strict))


Tools = Annotated[list[ToolDefinition], Field(max_length=MAX_TOOLS, fail_fast=True)]


class _Choice(Body):
    disable_parallel_tool_use: bool | None = None


class AutoChoice(_Choice):
    """The model decides, which is the default."""

    type: Literal["auto"]


class AnyChoice(_Choice):
    """The model must call a tool."""

    type: Literal["any"]


class OneToolChoice(_Choice):
    """The model must call this tool."""

    type: Literal["tool"]
    name: _Name


class NoChoice(Body):
    """The model must not call a tool."""

    type: Literal["none"]


ChoiceBody = Annotated[AutoChoice | AnyChoice | OneToolChoice | NoChoice, Field(discriminator="type")]


def tools_of(definitions: list[ToolDefinition] | None) -> tuple[Tool, ...]:
    """Converts the tools to Baton's type. Raises InvalidRequest if two tools have the same name, or if the schema of a
    tool's input is not the schema of an object."""
    tools = {f"tools.{index}": definition.tool for index, definition in enumerate(definitions or ())}
    check_tools(tools, "name", "input_schema")
    return tuple(tools.values())


def tool_choice_of(choice: ChoiceBody | None, tools: tuple[Tool, ...]) -> ToolChoice:
    """Converts the choice to Baton's type. Raises InvalidRequest if it needs a tool that the request does not have."""
    match choice:
        case NoChoice():
            return ToolChoice(ToolUse.NONE)
        case AnyChoice() | OneToolChoice() if not tools:
            raise InvalidRequest("tool_choice", f"{choice.type!r} needs tools")
        case AnyChoice():
            return ToolChoice(ToolUse.REQUIRED)
        case OneToolChoice(name=name):
            check_among(tools, name, "tool_choice.name")
            return ToolChoice(ToolUse.REQUIRED, (name,))
        case _:
            return ToolChoice()
