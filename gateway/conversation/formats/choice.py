"""Which format a model has: by its chat template's own words, or by name."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from baton.errors import ModelError
from gateway.conversation.answer_format import AnswerFormat, PlainFormat
from gateway.conversation.call_syntax import CallSyntax
from gateway.conversation.formats import deepseek
from gateway.conversation.formats.hermes import HermesCalls
from gateway.conversation.formats.llama import LlamaCalls
from gateway.conversation.formats.mistral import MistralCalls, MistralNamedCalls
from gateway.conversation.formats.pythonic import PythonicCalls
from gateway.conversation.formats.qwen_coder import QwenCoderCalls
from gateway.conversation.lark import Vocabulary
from gateway.conversation.model_format import ModelFormat
from gateway.conversation.parser import ReasoningTags
from gateway.conversation.template import ChatTemplate, TemplateStyle

TAGS = (ReasoningTags("<think>", "</think>"), ReasoningTags("[THINK]", "[/THINK]"))


@dataclass(frozen=True, slots=True)
class Family:
    """How one family of models writes calls."""

    new_syntax: Callable[[], CallSyntax]
    style: TemplateStyle | None
    """What its templates expect; None: they know no tools."""
    signs: tuple[str, ...]
    """A template that contains all of these belongs to it."""


_NATIVE = TemplateStyle()
_MISTRAL = TemplateStyle(ids_are_short=True)
_DEEPSEEK = TemplateStyle(arguments_are_text=True, has_null_content=True)

FAMILIES: Mapping[str, Family] = {
    "deepseek_v3": Family(
        lambda: deepseek.DeepSeekCalls(is_fenced=True), _DEEPSEEK, (deepseek.BEGIN, "```json")
    ),
    "deepseek_v31": Family(lambda: deepseek.DeepSeekCalls(is_fenced=False), _DEEPSEEK, (deepseek.BEGIN,)),
    "mistral_named": Family(MistralNamedCalls, _MISTRAL, ("[TOOL_CALLS]", "[ARGS]")),
    "mistral": Family(MistralCalls, _MISTRAL, ("[TOOL_CALLS]",)),
    "qwen_coder": Family(QwenCoderCalls, _NATIVE, ("<tool_call>", "<function=", "<parameter=")),
    "hermes": Family(HermesCalls, _NATIVE, ("tools", "<tool_call>")),
    "pythonic": Family(PythonicCalls, _NATIVE, ("tools", "[func_name")),
    "llama": Family(LlamaCalls, _NATIVE, ("tools", "ipython", '"parameters"')),
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
    tags = next((tags for tags in TAGS if tags.begin in chat_template or tags.end in chat_template), None)
    return ModelFormat(ChatTemplate(chat_template), vocabulary, row.new_syntax(), tags, row.style)
