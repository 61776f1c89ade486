"""Chooses a model's format by signs in its chat template, or by name."""

from collections.abc import Mapping
from dataclasses import dataclass

from baton.errors import ConfigError
from gateway.conversation.answer_format import AnswerFormat
from gateway.conversation.call_syntax import CallSyntax
from gateway.conversation.formats.deepseek import BEGIN as DEEPSEEK_BEGIN
from gateway.conversation.formats.deepseek import DeepSeekCalls
from gateway.conversation.formats.harmony import HarmonyFormat
from gateway.conversation.formats.harmony_parser import CHANNEL, MESSAGE
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
class FormatFamily:
    """How one family of models writes calls."""

    syntax: CallSyntax | None
    """None: answers are messages on channels, not text that contains calls."""
    style: TemplateStyle | None
    """The style of the family's chat templates; None: they know no tools."""
    signs: tuple[str, ...]
    """A template that contains all these texts belongs to the family."""


_NATIVE = TemplateStyle()
_MISTRAL = TemplateStyle(ids_are_short=True)
_DEEPSEEK = TemplateStyle(arguments_are_text=True, has_null_content=True)

FAMILIES: Mapping[str, FormatFamily] = {
    "harmony": FormatFamily(None, _NATIVE, (CHANNEL, MESSAGE)),
    "deepseek_v3": FormatFamily(DeepSeekCalls(is_fenced=True), _DEEPSEEK, (DEEPSEEK_BEGIN, "```json")),
    "deepseek_v31": FormatFamily(DeepSeekCalls(is_fenced=False), _DEEPSEEK, (DEEPSEEK_BEGIN,)),
    "mistral_named": FormatFamily(MistralNamedCalls(), _MISTRAL, ("[TOOL_CALLS]", "[ARGS]")),
    "mistral": FormatFamily(MistralCalls(), _MISTRAL, ("[TOOL_CALLS]",)),
    "qwen_coder": FormatFamily(QwenCoderCalls(), _NATIVE, ("<tool_call>", "<function=", "<parameter=")),
    "hermes": FormatFamily(HermesCalls(), _NATIVE, ("<tool_call>",)),
    "pythonic": FormatFamily(PythonicCalls(), _NATIVE, ("[func_name",)),
    "llama": FormatFamily(LlamaCalls(), _NATIVE, ("ipython", '"parameters"')),
    "generic": FormatFamily(HermesCalls(), None, ()),
}
"""Families by name. A model has the first family whose signs its template contains. If the template reads no
tools, the model has the last family."""

FORMAT_NAMES = tuple(FAMILIES)


def answer_format_of(chat_template: str, vocabulary: Vocabulary, name: str | None = None) -> AnswerFormat:
    """The format for a model's chat template, or the format called `name`. Raises ConfigError if the template
    cannot be used with the format called `name`."""
    template = ChatTemplate(chat_template)
    family = _chosen(template) if name is None else _named(template, name)
    if family.syntax is None:
        return HarmonyFormat(template, vocabulary)
    tags = next((tags for tags in TAGS if tags.begin in chat_template or tags.end in chat_template), None)
    return ModelFormat(template, vocabulary, family.syntax, tags, family.style)


def _chosen(template: ChatTemplate) -> FormatFamily:
    return next(
        family
        for family in FAMILIES.values()
        if (family.style is None or template.reads("tools"))
        and all(sign in template.source for sign in family.signs)
    )


def _named(template: ChatTemplate, name: str) -> FormatFamily:
    family = FAMILIES[name]
    if family.style is not None and not template.reads("tools"):
        raise ConfigError(
            f"gateway.answer_format: {name!r} needs a chat template that reads `tools`, and this model's does not; use "
            "'generic' or 'auto'"
        )
    return family
