"""Fields for the form of the answer: how much the model thinks, and what the answer must match."""

from typing import Annotated, Any, Literal

from pydantic import Field

from gateway.conversation import ReasoningOptions
from gateway.http.body import Body, Whole

Display = Literal["summarized", "omitted", "updates"]
"""How much of the thinking the client gets. Claude Code sends `updates`, a value of the beta API."""


class EnabledThinking(Body):
    """The model thinks before it answers."""

    type: Literal["enabled"]
    budget_tokens: Whole[int] = Field(
        ge=1, description="At most this many tokens of thinking; less than max_tokens."
    )
    display: Display | None = Field(
        None, description="The whole thinking, or none of it; Baton makes no summaries."
    )


class AdaptiveThinking(Body):
    """The model thinks if its chat template enables thinking by default."""

    type: Literal["adaptive"]
    display: Display | None = Field(
        None, description="The whole thinking, or none of it; Baton makes no summaries."
    )


class DisabledThinking(Body):
    """The model answers at once."""

    type: Literal["disabled"]


Thinking = Annotated[EnabledThinking | AdaptiveThinking | DisabledThinking, Field(discriminator="type")]


class JsonFormat(Body):
    """The text must be a JSON value that the schema admits."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    """The form of the answer."""

    format: JsonFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = Field(
        None, description="A level of thinking; no effect if the model's chat template has no levels."
    )


class KeepAllThinking(Body):
    """Has no effect: all thinking of a request always stays."""

    type: Literal["clear_thinking_20251015"]
    keep: Literal["all"]


class ContextManagement(Body):
    """Accepts only edits without effect, because a gateway never edits a conversation."""

    edits: Annotated[list[KeepAllThinking], Field(max_length=1)] | None = None


def reasoning_of(thinking: Thinking | None, effort: str | None) -> ReasoningOptions:
    match thinking:
        case EnabledThinking(budget_tokens=budget):
            return ReasoningOptions(is_enabled=True, max_tokens=budget, effort=effort)
        case DisabledThinking():
            return ReasoningOptions(is_enabled=False, effort=effort)
        case _:
            return ReasoningOptions(effort=effort)


def shows_thinking(thinking: Thinking | None) -> bool:
    return getattr(thinking, "display", None) != "omitted"
