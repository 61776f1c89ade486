"""The content blocks of a request's messages, and the turns that contain them."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from gateway.http.body import Body, NotSupported

MAX_BLOCKS = 4096
"""One turn has at most this many blocks. In an agent's conversation, a user's turn has one block for each result."""
MAX_ID_CHARACTERS = 256
MAX_NAME_CHARACTERS = 128


class CacheControl(Body):
    """Accepted and ignored: all prefixes are cached while there is room."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = Field(None, description="Accepted and ignored.")
    scope: str | None = Field(
        None, max_length=64, description="Accepted and ignored: Claude Code sends `global`."
    )


class ToolCaller(Body):
    """Who made a call: always the model itself."""

    type: Literal["direct"]


class _Block(Body):
    cache_control: CacheControl | None = None


class TextBlock(_Block):
    """A piece of text."""

    type: Literal["text"]
    text: str
    citations: Annotated[list[Any], Field(max_length=0)] | None = Field(
        None, description="Must be empty; answers have this field."
    )


class ToolUseBlock(_Block):
    """A call of an earlier turn, as the answer contained it."""

    type: Literal["tool_use"]
    id: str = Field(min_length=1, max_length=MAX_ID_CHARACTERS)
    name: str = Field(min_length=1, max_length=MAX_NAME_CHARACTERS)
    input: dict[str, Any]
    caller: ToolCaller | None = None
    toolset_name: NotSupported = None


class ThinkingBlock(Body):
    """What the model thought in an earlier turn. The model's chat template decides whether the model sees it again."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = Field(None, description="Accepted and ignored: nothing is signed here.")


class RedactedThinkingBlock(Body):
    """Thinking that only Anthropic can read. It is accepted, but the model does not get it."""

    type: Literal["redacted_thinking"]
    data: str


class ToolReferenceBlock(_Block):
    """A tool that a search among deferred tools found. The model knows the tool already, so it only gets the name."""

    type: Literal["tool_reference"]
    tool_name: str = Field(min_length=1, max_length=MAX_NAME_CHARACTERS)

    @property
    def text(self) -> str:
        return f"Found the tool {self.tool_name}.\n"


ResultContent = Annotated[
    list[Annotated[TextBlock | ToolReferenceBlock, Field(discriminator="type")]],
    Field(max_length=MAX_BLOCKS, fail_fast=True),
]


class ToolResultBlock(_Block):
    """The result of a call in the turn before."""

    type: Literal["tool_result"]
    tool_use_id: str = Field(min_length=1, max_length=MAX_ID_CHARACTERS)
    content: str | ResultContent | None = None
    is_error: bool | None = Field(None, description="The model reads `Error: ` before the content.")
    toolset_name: NotSupported = None


UserBlock = Annotated[TextBlock | ToolResultBlock, Field(discriminator="type")]
AssistantBlock = Annotated[
    TextBlock | ToolUseBlock | ThinkingBlock | RedactedThinkingBlock, Field(discriminator="type")
]
TextBlocks = Annotated[list[TextBlock], Field(max_length=MAX_BLOCKS, fail_fast=True)]


class UserTurn(Body):
    """Text; or, after a turn with calls, the results of all these calls, and then text."""

    role: Literal["user"]
    content: str | Annotated[list[UserBlock], Field(min_length=1, max_length=MAX_BLOCKS, fail_fast=True)]


class AssistantTurn(Body):
    """An earlier answer. A client may send it back unchanged."""

    role: Literal["assistant"]
    content: str | Annotated[list[AssistantBlock], Field(max_length=MAX_BLOCKS, fail_fast=True)]


class SystemTurn(Body):
    """Instructions in mid-conversation. They move to the beginning if the model's chat template refuses them here."""

    role: Literal["system"]
    content: str | TextBlocks


Turn = Annotated[UserTurn | AssistantTurn | SystemTurn, Field(discriminator="role")]


def text_of(content: str | Sequence[TextBlock | ToolReferenceBlock] | None) -> str:
    """The texts of the blocks, joined without separators, as the parts of a chat's message are."""
    if content is None:
        return ""
    return content if isinstance(content, str) else "".join(block.text for block in content)
