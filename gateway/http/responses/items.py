"""Items: the parts of a conversation in the Responses API, as clients send and the gateway stores them.

A client may send back every item of this API unchanged, with its empty fields.
"""

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag

from gateway.http.body import PARSED, Body, NotSupported

MAX_ITEMS = 4096
"""One conversation has at most this many items, including those of earlier responses."""
MAX_PARTS = 1024
MAX_ID_CHARACTERS = 256

Status = Literal["in_progress", "completed", "incomplete"]
ItemId = Annotated[str, Field(min_length=1, max_length=MAX_ID_CHARACTERS)]
Name = Annotated[str, Field(min_length=1, max_length=MAX_ID_CHARACTERS)]


class InputText(Body):
    """Text of the user or the system."""

    type: Literal["input_text"]
    text: str
    prompt_cache_breakpoint: NotSupported = None


class OutputText(Body):
    """Text of the assistant."""

    type: Literal["output_text"]
    text: str
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    logprobs: list[Any] | None = Field(None, description="Accepted and ignored.")
    parsed: Any = Field(None, description=PARSED)


class ReasoningText(Body):
    """A part of the assistant's reasoning."""

    type: Literal["reasoning_text"]
    text: str


class SummaryText(Body):
    """A summary of the assistant's reasoning."""

    type: Literal["summary_text"]
    text: str


TextParts = Annotated[
    list[Annotated[InputText | OutputText, Field(discriminator="type")]],
    Field(min_length=1, max_length=MAX_PARTS, fail_fast=True),
]


class MessageItem(Body):
    """One turn. Images, audio and files are not supported."""

    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: str | TextParts
    id: ItemId | None = None
    status: Status | None = None
    phase: NotSupported = None

    @property
    def text(self) -> str:
        """The message's text; parts are joined without separators."""
        parts = self.content
        return parts if isinstance(parts, str) else "".join(part.text for part in parts)


class FunctionCallItem(Body):
    """A call that the assistant made."""

    # When the `openai` package dumps an object, it writes the field `async` as `async_`.
    model_config = ConfigDict(populate_by_name=True)

    type: Literal["function_call"]
    call_id: ItemId
    name: Name
    arguments: str
    id: ItemId | None = None
    status: Status | None = None
    async_: NotSupported = Field(None, alias="async")
    caller: NotSupported = None
    namespace: Name | None = None
    parsed_arguments: Any = Field(None, description=PARSED)


class FunctionCallOutputItem(Body):
    """The result of a call. It may repeat the call's name and namespace."""

    type: Literal["function_call_output"]
    call_id: ItemId
    output: str | Annotated[list[InputText], Field(max_length=MAX_PARTS, fail_fast=True)]
    id: ItemId | None = None
    status: Status | None = None
    caller: NotSupported = None
    name: Name | None = Field(None, description="If set, the name of the call.")
    namespace: Name | None = Field(None, description="If set, the namespace of the call.")

    @property
    def text(self) -> str:
        output = self.output
        return output if isinstance(output, str) else "".join(part.text for part in output)


class ReasoningItem(Body):
    """The assistant's reasoning before its answer."""

    type: Literal["reasoning"]
    summary: Annotated[list[SummaryText], Field(max_length=MAX_PARTS, fail_fast=True)] | None = None
    content: Annotated[list[ReasoningText], Field(max_length=MAX_PARTS, fail_fast=True)] | None = None
    id: ItemId | None = None
    status: Status | None = None
    encrypted_content: str | None = Field(
        None, description="Accepted and ignored: only the provider that encrypted it can read it."
    )

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.content or self.summary or ())


class ItemReference(Body):
    """Refers to an item of a stored response."""

    type: Literal["item_reference"] | None = None
    id: ItemId


KeptItem = MessageItem | FunctionCallItem | FunctionCallOutputItem | ReasoningItem


def _kind(item: object) -> str | None:
    """The item's type. If the type is missing, an item with a role is a message; otherwise, an item with an id is a
    reference."""
    if not isinstance(item, dict):
        return getattr(item, "type", None)
    kind = item.get("type")
    if kind is None and "role" in item:
        return "message"
    if kind is None and "id" in item:
        return "item_reference"
    return kind if isinstance(kind, str) else None


InputItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionCallOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[ItemReference, Tag("item_reference")],
    Discriminator(_kind),
]

InputItems = Annotated[list[InputItem], Field(min_length=1, max_length=MAX_ITEMS, fail_fast=True)]
"""The check stops at the first problem: a body may have very many problems, and only one problem is reported."""

PREFIXES = {
    MessageItem: "msg",
    FunctionCallItem: "fc",
    FunctionCallOutputItem: "fco",
    ReasoningItem: "rs",
}


def as_kept(item: KeptItem, item_id: str) -> dict[str, Any]:
    """The item with this id, as this API lists it. The result is also a valid input item."""
    head = {"id": item_id, "type": item.type or "message", "status": item.status or "completed"}
    match item:
        case MessageItem(role=role):
            part: dict[str, Any] = {"type": "input_text", "text": item.text}
            if role == "assistant":
                part = {"type": "output_text", "text": item.text, "annotations": []}
            return head | {"role": role, "content": [part]}
        case FunctionCallItem():
            namespace = {} if item.namespace is None else {"namespace": item.namespace}
            return (
                head | {"call_id": item.call_id, "name": item.name, "arguments": item.arguments} | namespace
            )
        case FunctionCallOutputItem():
            return head | {"call_id": item.call_id, "output": item.text}
        case ReasoningItem():
            parts = [{"type": "reasoning_text", "text": part.text} for part in item.content or ()]
            summary = [{"type": "summary_text", "text": part.text} for part in item.summary or ()]
            return head | {"summary": summary, "content": parts}
