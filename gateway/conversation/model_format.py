"""ModelFormat: the AnswerFormat of a model, built from its chat template, reasoning tags and call syntax."""

from dataclasses import replace
from typing import Any

from baton.errors import InvalidRequest
from baton.sampling import StructuredOutput
from gateway.conversation.call_syntax import CallSyntax
from gateway.conversation.described_tools import described_turns
from gateway.conversation.lark import Vocabulary
from gateway.conversation.messages import Conversation, ToolUse
from gateway.conversation.parser import ReasoningTags, TurnParser
from gateway.conversation.template import ChatTemplate, TemplateStyle, described
from gateway.conversation.turn_grammar import turn_grammar


class ModelFormat:
    """An AnswerFormat. Stateless; one instance serves all requests."""

    def __init__(
        self,
        template: ChatTemplate,
        vocabulary: Vocabulary,
        syntax: CallSyntax,
        tags: ReasoningTags | None,
        style: TemplateStyle | None,
    ) -> None:
        """`tags`: None if the model does not reason. `style`: None if the chat template knows no tools; then
        the system turn describes them."""
        self._template = template
        self._vocabulary = vocabulary
        self.syntax = syntax
        """How the model writes calls."""
        self._tags = tags
        self._style = style

    @property
    def kept_special_tokens(self) -> dict[str, str]:
        tags = () if self._tags is None else (self._tags.begin, self._tags.end)
        return {token: token for token in (*self.syntax.markers, *self.syntax.tokens, *tags)}

    def template_arguments(self, conversation: Conversation) -> dict[str, Any]:
        variables = self._template.variables(self._checked_reasoning(conversation))
        if self._style is None:
            return {"conversation": described_turns(conversation, self._template), **variables}
        turns = self._template.turns(conversation, self._style)
        tools = [described(tool) for tool in conversation.tools]
        return {"conversation": turns, **({"tools": tools} if tools else {}), **variables}

    def grammar(
        self, conversation: Conversation, prompt_end: str, response_format: StructuredOutput | None
    ) -> StructuredOutput | None:
        tags, has_begun = self._reasoning(prompt_end)
        return turn_grammar(self._vocabulary, self.syntax, conversation, tags, has_begun, response_format)

    def new_parser(
        self, conversation: Conversation, prompt_end: str, response_format: StructuredOutput | None = None
    ) -> TurnParser | None:
        tags, has_begun = self._reasoning(prompt_end)
        syntax = (
            None if conversation.tool_choice.use is ToolUse.NONE or not conversation.tools else self.syntax
        )
        is_after_reasoning = self._tags is not None and prompt_end.endswith(self._tags.end)
        if tags is None and syntax is None and not is_after_reasoning:
            return None
        return TurnParser(
            syntax,
            conversation.tools,
            tags,
            has_begun,
            is_after_reasoning=is_after_reasoning,
            is_formatted=response_format is not None,
            must_call=conversation.tool_choice.use is ToolUse.REQUIRED,
        )

    def _reasoning(self, prompt_end: str) -> tuple[ReasoningTags | None, bool]:
        """The tags that may follow this prompt, and whether the prompt has already opened them. None: no
        reasoning may follow."""
        if self._tags is None or (end := prompt_end.rstrip()).endswith(self._tags.end):
            return None, False
        return self._tags, end.endswith(self._tags.begin)

    def _checked_reasoning(self, conversation: Conversation) -> Conversation:
        """The conversation with its reasoning options checked. For a model without reasoning, the option to
        disable reasoning is removed."""
        reasoning = conversation.reasoning
        if self._tags is not None:
            return conversation
        if reasoning.is_enabled or reasoning.max_tokens is not None:
            raise InvalidRequest("reasoning", "this model's chat template has no reasoning")
        return replace(conversation, reasoning=replace(reasoning, is_enabled=None))
