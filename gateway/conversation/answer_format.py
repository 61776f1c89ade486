"""AnswerFormat: how one model writes reasoning and calls, and how its chat template is told of tools."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from baton.errors import InvalidRequest
from baton.sampling import StructuredOutput
from gateway.conversation.events import AnswerEvent, AnswerPart, Text
from gateway.conversation.messages import Conversation

NUM_PROMPT_END_TOKENS = 32
"""So many of a prompt's last tokens show a format whether the template has begun to reason already."""


class AnswerParser(Protocol):
    """Turns one answer's text into events as it comes. Never raises, whatever the model wrote."""

    @property
    def part(self) -> AnswerPart:
        """What the next character belongs to, as far as the text so far tells. It does not wait: it changes with the
        character that completes a tag."""

    @property
    def may_reason(self) -> bool:
        """Reasoning is under way, or may still come."""

    def push(self, text: str) -> Sequence[AnswerEvent]:
        """The events that are certain by now; what could still become something else waits."""

    def flush(self) -> Sequence[AnswerEvent]:
        """The rest, when no more text comes."""


class AnswerFormat(Protocol):
    """One model's way of writing. Stateless; one instance serves all requests."""

    @property
    def kept_special_tokens(self) -> frozenset[str]:
        """Special tokens that the parser must see in the text, though special tokens are left out of it."""

    def template_arguments(self, conversation: Conversation) -> dict[str, Any]:
        """`conversation`, `tools` and further variables of the model's chat template. Raises InvalidRequest by the
        field for what this model cannot do."""

    def grammar(
        self, conversation: Conversation, prompt_end: str, answer: StructuredOutput | None
    ) -> StructuredOutput | None:
        """What the model may write, so that calls parse and fit their schemas; None: anything.

        `prompt_end`: the end of the rendered prompt, special tokens included. `answer`: what the text must match if it
        calls nothing. InvalidRequest names the field where both cannot be had together.
        """

    def new_parser(self, conversation: Conversation, prompt_end: str) -> AnswerParser | None:
        """A parser of the turn that continues this conversation; None: all of the answer is text."""


class PlainFormat:
    """A model without a chat template: it has no conversations."""

    kept_special_tokens: frozenset[str] = frozenset()

    def template_arguments(self, conversation: Conversation) -> dict[str, Any]:
        turns = [{"role": turn.role, "content": turn.content} for turn in conversation.messages]
        return {"conversation": turns, **conversation.template_options}

    def grammar(
        self,
        conversation: Conversation,
        prompt_end: str,  # noqa: ARG002 - AnswerFormat's signature
        answer: StructuredOutput | None,
    ) -> StructuredOutput | None:
        if conversation.tools:
            raise InvalidRequest("tools", "this model is served without tools")
        return answer

    def new_parser(self, conversation: Conversation, prompt_end: str) -> AnswerParser | None:  # noqa: ARG002
        return None


def parsed(parser: AnswerParser | None, text: str, is_last: bool) -> list[AnswerEvent]:
    """The events of a piece of an answer; `is_last`: no more text comes."""
    if parser is None:
        return [Text(text)] if text else []
    events = [*parser.push(text)]
    if is_last:
        events += parser.flush()
    return events


def kept_token_ids(answer_format: AnswerFormat, vocabulary: Mapping[str, int]) -> dict[int, str]:
    """The ids of the special tokens that a parser must see, and their texts."""
    return {vocabulary[token]: token for token in answer_format.kept_special_tokens if token in vocabulary}
