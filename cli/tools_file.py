"""Tools for `baton generate`: converts a file of OpenAI's tools to our own values.

The gateway checks their schemas.
"""

from pathlib import Path
from typing import Any

from baton.errors import ConfigError
from gateway.conversation import Tool, ToolChoice, ToolUse
from gateway.strict_json import NotStrict, parse

FIELDS = {"name": str, "description": str, "parameters": dict, "strict": bool}
MAX_FILE_BYTES = 4 * 2**20


def tools_from(path: Path) -> tuple[Tool, ...]:
    """Reads the tools of a JSON file that contains a list of tools, or one tool.

    ConfigError says what is wrong.
    """
    try:
        with path.open("rb") as file:  # perhaps a pipe, whose size is not known before
            text = file.read(MAX_FILE_BYTES + 1)
        if len(text) > MAX_FILE_BYTES:
            raise ConfigError(f"--tools {path}: has more than {MAX_FILE_BYTES} bytes")
        content = parse(text)
    except (OSError, NotStrict) as error:
        raise ConfigError(f"--tools {path}: {error}") from error
    tools = content if isinstance(content, list) else [content]
    return tuple(_tool_from(tool, f"--tools {path}: tool {number}") for number, tool in enumerate(tools, 1))


def tool_choice_from(word: str | None) -> ToolChoice:
    """Parses `none`, `auto`, `required`, or the name of the one tool that must be called.

    None means `auto`.
    """
    if word is None:
        return ToolChoice()
    if word in {use.value for use in ToolUse}:
        return ToolChoice(ToolUse(word))
    return ToolChoice(ToolUse.REQUIRED, (word,))


def _tool_from(tool: Any, place: str) -> Tool:
    if not (
        isinstance(tool, dict) and tool.get("type") == "function" and tool.keys() == {"type", "function"}
    ):
        raise ConfigError(f'{place} must be an object like {{"type": "function", "function": {{...}}}}')
    function = tool["function"]
    if not isinstance(function, dict) or "name" not in function:
        raise ConfigError(f"{place}: its function needs a name")
    for key, value in function.items():
        kind = FIELDS.get(key)
        if kind is None:
            raise ConfigError(f"{place}: unknown field {key!r}; use {', '.join(FIELDS)}")
        if not isinstance(value, kind):
            raise ConfigError(f"{place}: {key} must be of type {kind.__name__}, got {type(value).__name__}")
    return Tool(**function)
