"""AnswerFormat: how one model writes reasoning and calls, and how its chat template gets the tools."""

from collections.abc import Mapping
from typing import Any, Protocol

from baton.sampling import StructuredOutput
from gateway.conversation.answer_parser import AnswerParser
from gateway.conversation.messages import Conversation

NUM_PROMPT_END_TOKENS = 32
"""A format gets this many of a prompt's last tokens. They show whether the template has already begun the reasoning."""

SPECIAL = "\udc00"
"""A mark before the text of a special token, if ordinary text may contain the same characters. The mark is a lone
surrogate, which no token contains. Parsers drop it."""


class AnswerFormat(Protocol):
    """How one model writes its answers. Stateless; one instance serves all requests."""

    @property
    def kept_special_tokens(self) -> Mapping[str, str]:
        """Special tokens that must stay in the text for the parser, and their texts there. Other special tokens
        are left out of the text."""

    def template_arguments(self, conversation: Conversation) -> dict[str, Any]:
        """`conversation`, `tools` and further variables of the model's chat template. Raises InvalidRequest
        with the field's name if this model does not support a field."""

    def grammar(
        self, conversation: Conversation, prompt_end: str, response_format: StructuredOutput | None
    ) -> StructuredOutput | None:
        """A grammar under which calls can be parsed and match their schemas; None: the model may write
        anything.

        `prompt_end`: the end of the rendered prompt, with its special tokens. `response_format`: what the text must
        match if the model makes no call. Raises InvalidRequest with the field's name if `response_format` cannot be
        combined with the conversation's tools or reasoning.
        """

    def new_parser(
        self, conversation: Conversation, prompt_end: str, response_format: StructuredOutput | None = None
    ) -> AnswerParser | None:
        """A parser of the turn that continues this conversation; None: the answer is only text.

        `response_format`: as for `grammar`. A text that must match it contains no calls, even if it contains the text
        of a marker.
        """
