"""Harmony, the format of gpt-oss: an answer is messages on channels; a call is a message to a function.

    <|channel|>analysis<|message|>...<|end|>                                            reasoning
    <|start|>assistant<|channel|>commentary<|message|>...<|end|>                        text before calls
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{...}<|call|>
    <|start|>assistant to=functions.f<|channel|>commentary json<|message|>{...}<|call|>
    <|start|>assistant<|channel|>final<|message|>...<|return|>                          text

The prompt ends with `<|start|>assistant`. `<|call|>` and `<|return|>` end the turn.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from baton.sampling import StructuredOutput
from gateway.conversation.answer_format import SPECIAL
from gateway.conversation.formats.harmony_grammar import harmony_grammar
from gateway.conversation.formats.harmony_parser import HarmonyParser
from gateway.conversation.formats.harmony_tokens import TOKENS
from gateway.conversation.lark import Vocabulary
from gateway.conversation.messages import ChatMessage, Conversation, ToolUse
from gateway.conversation.model_format import check_tools
from gateway.conversation.template import ChatTemplate, TemplateStyle, described


class HarmonyFormat:
    """An AnswerFormat."""

    def __init__(self, template: ChatTemplate, vocabulary: Vocabulary) -> None:
        self._template = template
        self._vocabulary = vocabulary
        self._prefix = SPECIAL if all(token in vocabulary.ids for token in TOKENS) else ""
        """The text before each of the format's tokens in an answer's text. Empty: the tokens are ordinary text."""

    @property
    def kept_special_tokens(self) -> dict[str, str]:
        return {token: self._prefix + token for token in TOKENS}

    def template_arguments(self, conversation: Conversation) -> dict[str, Any]:
        check_tools(conversation)
        variables = self._template.variables(conversation)
        one_by_one = replace(conversation, messages=_one_by_one(conversation.messages))
        turns = self._template.turns(one_by_one, TemplateStyle())
        # The template always writes a tool's description, so a tool without one gets an empty text.
        tools = [described(replace(tool, description=tool.description or "")) for tool in conversation.tools]
        return {"conversation": turns, **({"tools": tools} if tools else {}), **variables}

    def grammar(
        self,
        conversation: Conversation,
        prompt_end: str,  # noqa: ARG002 - AnswerFormat's signature
        answer: StructuredOutput | None,
    ) -> StructuredOutput | None:
        return harmony_grammar(self._vocabulary, conversation, answer)

    def new_parser(
        self,
        conversation: Conversation,
        prompt_end: str,  # noqa: ARG002 - AnswerFormat's signature
        answer: StructuredOutput | None = None,  # noqa: ARG002
    ) -> HarmonyParser:
        may_call = conversation.tool_choice.use is not ToolUse.NONE
        return HarmonyParser(conversation.tools if may_call else (), self._prefix)


def _one_by_one(messages: Sequence[ChatMessage]) -> tuple[ChatMessage, ...]:
    """The messages, where each call has a separate turn. The call's result follows it; the turn's text
    precedes it.

    The template writes only the first call of a turn, and assigns each result to the call before it.
    """
    turns: list[ChatMessage] = []
    at = 0
    while at < len(messages):
        message = messages[at]
        at += 1
        if not message.tool_calls:
            turns.append(message)
            continue
        begin = at
        while at < len(messages) and messages[at].role == "tool":
            at += 1
        turns += _calls(message, messages[begin:at])
    return tuple(turns)


def _calls(message: ChatMessage, results: Sequence[ChatMessage]) -> list[ChatMessage]:
    turns = [ChatMessage(message.role, message.content)] if message.content else []
    reasoning = message.reasoning
    for call in message.tool_calls:
        turns.append(ChatMessage(message.role, "", reasoning, (call,)))
        turns += [result for result in results if result.tool_call_id == call.id]
        reasoning = None
    ids = {call.id for call in message.tool_calls}
    return turns + [result for result in results if result.tool_call_id not in ids]
