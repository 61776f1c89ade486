"""Tools of a chat, and the choice among them: converts OpenAI's fields to Baton's types."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic_core import to_json

from baton.errors import InvalidRequest
from gateway.conversation import NO_ARGUMENTS, Tool, ToolChoice, ToolUse
from gateway.conversation.checks import MAX_SCHEMA_CHARACTERS, MAX_TOOLS, check_among, check_tools
from gateway.http.body import Body
from gateway.http.openai.messages import Cacheable

MAX_DESCRIPTION_CHARACTERS = 2**16

MAX_NAME_CHARACTERS = 128

ToolName = Annotated[str, Field(pattern=rf"^[a-zA-Z0-9_.:/-]{{1,{MAX_NAME_CHARACTERS}}}$")]


class FunctionDefinition(Cacheable):
    """A function that the client can run for the model."""

    name: ToolName
    description: str | None = Field(None, max_length=MAX_DESCRIPTION_CHARACTERS)
    parameters: dict[str, Any] | None = Field(
        None, description="A JSON schema of the arguments, which are an object. Default: no arguments."
    )
    strict: bool | None = Field(None, description="Arguments always match the schema.")


class FunctionTool(Cacheable):
    """A tool that the client runs itself. The model is told of the tool, and may call it."""

    type: Literal["function"]
    function: FunctionDefinition

    def as_tool(self) -> Tool:
        function = self.function
        schema = NO_ARGUMENTS if function.parameters is None else function.parameters
        return Tool(function.name, function.description, schema, bool(function.strict))


class FunctionName(Body):
    """A function by its name."""

    name: ToolName


class NamedTool(Body):
    """One of the tools. If it is the tool choice, it is called exactly once, as in OpenAI's API and vLLM's."""

    type: Literal["function"]
    function: FunctionName


class AllowedToolsParts(Body):
    """The tools that this turn may call, and whether it must call one."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)]


class AllowedTools(Body):
    """The tools that the model may call. The prompt contains the other tools, too."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedToolsParts


Tools = Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS, fail_fast=True)]
ToolChoiceField = (
    Literal["none", "auto", "required"] | Annotated[NamedTool | AllowedTools, Field(discriminator="type")]
)


def tools_of(tools: Sequence[FunctionTool] | None) -> tuple[Tool, ...]:
    """Converts the tools to Baton's type. Raises InvalidRequest for an invalid tool; the error names the tool's
    field."""
    num_bytes = 0
    for index, tool in enumerate(tools or ()):
        path = f"tools.{index}.function.parameters"
        num_bytes += len(to_json(tool.function.parameters or {}))
        if num_bytes > MAX_SCHEMA_CHARACTERS:
            raise InvalidRequest(
                path, f"the schemas up to this one have more than {MAX_SCHEMA_CHARACTERS} bytes"
            )
    converted = {f"tools.{index}": tool.as_tool() for index, tool in enumerate(tools or ())}
    check_tools(converted, "function.name", "function.parameters")
    return tuple(converted.values())


def tool_choice_of(choice: ToolChoiceField | None, tools: Sequence[Tool]) -> ToolChoice:
    """Converts the choice to Baton's type. Raises InvalidRequest if it names a tool that the request does not have."""
    match choice:
        case None:
            return ToolChoice()
        case "required" if not tools:
            raise InvalidRequest("tool_choice", "'required' needs tools")
        case str():
            return ToolChoice(ToolUse(choice))
        case NamedTool():
            check_among(tools, choice.function.name, "tool_choice.function.name")
            return ToolChoice(ToolUse.REQUIRED, (choice.function.name,))
        case AllowedTools(allowed_tools=allowed):
            names = [tool.function.name for tool in allowed.tools]
            for index, name in enumerate(names):
                check_among(tools, name, f"tool_choice.allowed_tools.tools.{index}.function.name")
            return ToolChoice(ToolUse(allowed.mode), tuple(dict.fromkeys(names)))
