"""Tools of the Responses API, and the choice among them: converts their fields to Baton's types."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from baton.errors import InvalidRequest
from gateway.conversation import NO_ARGUMENTS, Tool, ToolChoice, ToolUse
from gateway.conversation.checks import check_among, check_tools
from gateway.http.body import Body, NotSupported
from gateway.http.openai.tools import MAX_NAME_CHARACTERS, ToolName

MAX_TOOLS = 1024
MAX_DESCRIPTION_CHARACTERS = 100_000


class ResponseFunctionTool(Body):
    """A function that the client runs. Custom tools are not supported."""

    # When the `openai` package dumps an object, it writes the field `async` as `async_`.
    model_config = ConfigDict(populate_by_name=True)

    type: Literal["function"]
    name: ToolName
    description: str | None = Field(None, max_length=MAX_DESCRIPTION_CHARACTERS)
    parameters: dict[str, Any] | None = Field(None, description="A JSON schema of an object.")
    strict: bool | None = Field(
        None, description="Default true, as in OpenAI's API: arguments always match the schema."
    )
    allowed_callers: Annotated[list[Literal["direct"]], Field(max_length=1)] | None = None
    async_: NotSupported = Field(None, alias="async")
    defer_loading: bool | None = Field(
        None, description="Accepted and ignored: the model knows all functions from the beginning."
    )
    output_schema: NotSupported = None

    def as_tool(self) -> Tool:
        schema = NO_ARGUMENTS if self.parameters is None else self.parameters
        return Tool(self.name, self.description, schema, self.strict is not False)

    def as_shown(self) -> dict[str, Any]:
        """The tool as a response repeats it."""
        return {
            "type": "function",
            "name": self.name,
            "description": self.description,
            "parameters": self.parameters,
            "strict": self.strict is not False,
        }


class NamespaceTool(Body):
    """Functions under a common name. Codex sends the functions of its sub-agents and of MCP servers in this way."""

    type: Literal["namespace"]
    name: ToolName
    description: str | None = Field(
        None,
        max_length=MAX_DESCRIPTION_CHARACTERS,
        description="The model reads it before the description of the first function.",
    )
    tools: Annotated[list[ResponseFunctionTool], Field(max_length=MAX_TOOLS, fail_fast=True)]

    def as_tools(self) -> list[Tool]:
        """The functions, with the names under which the model knows them."""
        tools = [tool.as_tool() for tool in self.tools]
        if tools and self.description:
            first = f"{self.description}\n\n{tools[0].description or ''}".strip()
            tools[0] = replace(tools[0], description=first)
        return [replace(tool, name=joined_name(self.name, tool.name)) for tool in tools]

    def as_shown(self) -> dict[str, Any]:
        """The namespace as a response repeats it."""
        return {
            "type": "namespace",
            "name": self.name,
            "description": self.description or "",
            "tools": [tool.as_shown() for tool in self.tools],
        }


HostedKind = Literal[
    "code_interpreter",
    "file_search",
    "image_generation",
    "mcp",
    "programmatic_tool_calling",
    "tool_search",
    "web_search",
    "web_search_2025_08_26",
    "web_search_preview",
    "web_search_preview_2025_03_11",
]


class HostedTool(Body):
    """A tool that OpenAI's servers run. It is left out, because agents send such tools to every server, and can do
    without them. Therefore its other fields are not checked."""

    model_config = ConfigDict(extra="ignore")

    type: HostedKind


ResponseTool = Annotated[ResponseFunctionTool | NamespaceTool | HostedTool, Field(discriminator="type")]


def _no_hosted(choice: object) -> object:
    kind = choice.get("type") if isinstance(choice, dict) else None
    if isinstance(kind, str) and kind in get_args(HostedKind):
        raise PydanticCustomError(
            "hosted_tool",
            "{kind} is a hosted tool, and the gateway has none; choose functions",
            {"kind": kind},
        )
    return choice


class NamedFunction(Body):
    """One of the tools. If it is the tool choice, it is called exactly once. A function of a namespace is named
    `namespace.name`."""

    type: Literal["function"]
    name: ToolName


class ResponseAllowedTools(Body):
    """The tools that the model may call. The prompt contains the other tools, too."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[
        list[Annotated[NamedFunction, BeforeValidator(_no_hosted)]],
        Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True),
    ]


ToolChoiceField = Annotated[
    Literal["none", "auto", "required"]
    | Annotated[NamedFunction | ResponseAllowedTools, Field(discriminator="type")],
    BeforeValidator(_no_hosted),
]


def joined_name(namespace: str | None, name: str) -> str:
    """The name under which the model knows a function."""
    return name if namespace is None else f"{namespace}.{name}"


def namespaces_of(tools: Sequence[ResponseTool] | None) -> dict[str, tuple[str, str]]:
    """For each function in a namespace, by the name that the model knows: the namespace, and the function's name
    there."""
    return {
        joined_name(space.name, tool.name): (space.name, tool.name)
        for space in tools or ()
        if isinstance(space, NamespaceTool)
        for tool in space.tools
    }


def tools_of(tools: Sequence[ResponseTool] | None) -> tuple[Tool, ...]:
    """Converts the tools to Baton's type. Raises InvalidRequest for an invalid tool; the error names the tool's
    field."""
    converted: dict[str, Tool] = {}
    for index, tool in enumerate(tools or ()):
        path = f"tools.{index}"
        if isinstance(tool, NamespaceTool):
            functions = {f"{path}.tools.{n}": function for n, function in enumerate(tool.as_tools())}
            _check_names(functions)
            converted |= functions
        elif isinstance(tool, ResponseFunctionTool):
            converted[path] = tool.as_tool()
    if len(converted) > MAX_TOOLS:
        raise InvalidRequest("tools", f"must have at most {MAX_TOOLS} functions, got {len(converted)}")
    check_tools(converted, "name", "parameters")
    return tuple(converted.values())


def shown_tools(tools: Sequence[ResponseTool] | None) -> list[dict[str, Any]]:
    """The tools as a response repeats them: those that the model was told of."""
    return [tool.as_shown() for tool in tools or () if not isinstance(tool, HostedTool)]


def _check_names(functions: Mapping[str, Tool]) -> None:
    for path, function in functions.items():
        if len(function.name) > MAX_NAME_CHARACTERS:
            raise InvalidRequest(
                f"{path}.name",
                f"must have at most {MAX_NAME_CHARACTERS} characters together with its namespace and a dot, got "
                f"{len(function.name)}",
            )


def tool_choice_of(choice: ToolChoiceField | None, tools: Sequence[Tool]) -> ToolChoice:
    """Converts the choice to Baton's type. Raises InvalidRequest if it needs a tool that the request does not have."""
    match choice:
        case None:
            return ToolChoice()
        case NamedFunction(name=name):
            check_among(tools, name, "tool_choice.name")
            return ToolChoice(ToolUse.REQUIRED, (name,))
        case ResponseAllowedTools(mode=mode):
            for index, tool in enumerate(choice.tools):
                check_among(tools, tool.name, f"tool_choice.tools.{index}.name")
            return ToolChoice(ToolUse(mode), tuple(dict.fromkeys(tool.name for tool in choice.tools)))
        case "required" if not tools:
            raise InvalidRequest("tool_choice", "'required' needs a function in tools")
        case str():
            return ToolChoice(ToolUse(choice))
