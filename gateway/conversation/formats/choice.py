"""Which format a model has: by its chat template's own words, or by name."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from baton.errors import ModelError
from gateway.conversation.answer_format import AnswerFormat, PlainFormat
from gateway.conversation.call_syntax import CallSyntax
from gateway.conversation.formats.hermes import HermesCalls
from gateway.conversation.lark import Vocabulary
from gateway.conversation.model_format import ModelFormat
from gateway.conversation.parser import ReasoningTags
from gateway.conversation.template import ChatTemplate, TemplateStyle

THINK = ReasoningTags("<think>", "</think>")


@dataclass(frozen=True, slots=True)
class Family:
    """How one family of models writes calls."""

    new_syntax: Callable[[], CallSyntax]
    style: TemplateStyle | None
    """What its templates expect; None: they know no tools."""
    signs: tuple[str, ...]
    """A template that contains all of these belongs to it."""


FAMILIES: Mapping[str, Family] = {
    "hermes": Family(HermesCalls, TemplateStyle(), ("tools", "<tool_call>")),
    "generic": Family(HermesCalls, None, ()),
}
"""By name; the first one whose signs a template shows is the model's."""


def answer_format_of(
    chat_template: str | None, vocabulary: Vocabulary, family: str | None = None
) -> AnswerFormat:
    """The format that a model's chat template asks for, or the one of the `family`."""
    if chat_template is None:
        return PlainFormat()
    name = family or next(
        name for name, row in FAMILIES.items() if all(sign in chat_template for sign in row.signs)
    )
    if name not in FAMILIES:
        raise ModelError(f"there is no answer format {name!r}; there are {', '.join(FAMILIES)}")
    row = FAMILIES[name]
    tags = THINK if THINK.begin in chat_template or THINK.end in chat_template else None
    return ModelFormat(ChatTemplate(chat_template), vocabulary, row.new_syntax(), tags, row.style)
