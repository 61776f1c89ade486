"""Chooses a model's format by signs in its chat template, or by name."""

from dataclasses import dataclass

from baton.errors import ConfigError
from gateway.conversation.answer_format import AnswerFormat
from gateway.conversation.call_syntax import CallSyntax
from gateway.conversation.formats.deepseek import BEGIN as DEEPSEEK_BEGIN
from gateway.conversation.formats.deepseek import DeepSeekCalls
from gateway.conversation.formats.glm import GlmCalls
from gateway.conversation.formats.harmony import HarmonyFormat
from gateway.conversation.formats.harmony_parser import CHANNEL, MESSAGE
from gateway.conversation.formats.hermes import HermesCalls
from gateway.conversation.formats.llama import LlamaCalls
from gateway.conversation.formats.minimax import BEGIN as MINIMAX_BEGIN
from gateway.conversation.formats.minimax import INVOKE, MiniMaxCalls
from gateway.conversation.formats.mistral import MistralCalls, MistralNamedCalls
from gateway.conversation.formats.olmo import BEGIN as OLMO_BEGIN
from gateway.conversation.formats.olmo import OlmoCalls
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

    name: str
    """The format's name. Two families have the same name if only their grammars make a model write different text."""
    syntax: CallSyntax | None
    """None: answers are messages on channels, not text that contains calls."""
    style: TemplateStyle | None
    """The style of the family's chat templates; None: they know no tools."""
    signs: tuple[str, ...]
    """A template that contains all these texts belongs to the family."""
    foreign_signs: tuple[str, ...] = ()
    """A template that contains one of these texts belongs to another family, which Baton may not know."""

    def matches(self, template: ChatTemplate) -> bool:
        """Whether the template shows this family: it contains all signs and no foreign sign, and reads `tools` if the
        family's templates do."""
        can_use = self.style is None or template.reads("tools")
        has_signs = all(sign in template.source for sign in self.signs)
        return can_use and has_signs and not any(sign in template.source for sign in self.foreign_signs)


_NATIVE = TemplateStyle()
_MISTRAL = TemplateStyle(ids_are_short=True)
_DEEPSEEK = TemplateStyle(arguments_are_text=True, has_null_content=True)


FAMILIES = (
    FormatFamily("harmony", None, _NATIVE, (CHANNEL, MESSAGE)),
    FormatFamily("deepseek_v3", DeepSeekCalls(is_fenced=True), _DEEPSEEK, (DEEPSEEK_BEGIN, "```json")),
    FormatFamily("deepseek_v31", DeepSeekCalls(is_fenced=False), _DEEPSEEK, (DEEPSEEK_BEGIN,)),
    FormatFamily("mistral_named", MistralNamedCalls(), _MISTRAL, ("[TOOL_CALLS]", "[ARGS]")),
    FormatFamily("mistral", MistralCalls(), _MISTRAL, ("[TOOL_CALLS]",)),
    FormatFamily("minimax", MiniMaxCalls(), _NATIVE, (MINIMAX_BEGIN, INVOKE.rstrip('"'))),
    FormatFamily("glm", GlmCalls("\n"), _NATIVE, ("<tool_call>", "</arg_key>\n<arg_value>")),
    FormatFamily("glm", GlmCalls(""), _NATIVE, ("<tool_call>", "<arg_key>", "<arg_value>")),
    FormatFamily("qwen_coder", QwenCoderCalls(), _NATIVE, ("<tool_call>", "<function=", "<parameter=")),
    FormatFamily("hermes", HermesCalls(), _NATIVE, ("<tool_call>",), ("<tool_calls>", "<invoke name=")),
    FormatFamily("olmo", OlmoCalls(), _NATIVE, (OLMO_BEGIN,)),
    FormatFamily("pythonic", PythonicCalls(), _NATIVE, ("[func_name",), ("<|tool_call_start|>",)),
    FormatFamily("llama", LlamaCalls(), _NATIVE, ("ipython", '"parameters"')),
    FormatFamily("generic", HermesCalls(), None, ()),
)
"""A model has the first family that its template shows. If the template reads no tools, the model has the last
family."""

FORMAT_NAMES = tuple(dict.fromkeys(family.name for family in FAMILIES))


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
    return next(family for family in FAMILIES if family.matches(template))


def _named(template: ChatTemplate, name: str) -> FormatFamily:
    """The first family of this name that the template shows; if it shows none, the last family of this name."""
    families = [family for family in FAMILIES if family.name == name]
    if families[-1].style is not None and not template.reads("tools"):
        raise ConfigError(
            f"gateway.answer_format: {name!r} needs a chat template that reads `tools`, and this model's does not; use "
            "'generic' or 'auto'"
        )
    return next((family for family in families if family.matches(template)), families[-1])
