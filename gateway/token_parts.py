"""TokenParts: which part of an answer each of its tokens belongs to; ReasoningCount: how many of them are reasoning.

Events tell this for text. But text arrives later than its tokens, and is divided at other places. So each token's own
text goes through a parser of its own here.
"""

from collections.abc import Sequence
from itertools import zip_longest

from baton.request import TokenLogprobs
from gateway.conversation import AnswerEvent, AnswerPart, Reasoning, Text
from gateway.requests.request import GatewayRequest


class TokenParts:
    """For one answer's tokens, in order. A tag counts as what it encloses, and so do spaces beside it; a token across
    two parts counts for the first, unless that is text. Answers that are text alone cost nothing."""

    def __init__(self, request: GatewayRequest) -> None:
        self._parser = request.new_parser()
        self._detokenizer = None if self._parser is None else request.text.new_detokenizer()
        self._waiting: list[TokenLogprobs | None] = []
        """Tokens that may be a tag or text."""
        self._has_waiting_text = False
        """They are not all empty."""
        self._has_call = False
        """A call began since the last text."""
        self.num_reasoning_tokens = 0
        """So far."""

    def take(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs] = ()) -> list[TokenLogprobs]:
        """The log-probabilities of those tokens that turned out to be text. `logprobs`: none, or one for each."""
        if self._parser is None or self._detokenizer is None:
            return list(logprobs)
        texts: list[TokenLogprobs] = []
        for token_id, logprob in zip_longest(token_ids, logprobs):
            before = self._parser.part
            text = self._detokenizer.push(token_id)
            events = self._parser.push(text)
            self._waiting.append(logprob)
            self._has_waiting_text |= bool(text)
            part = self._certain_part(before, events, self._parser.part)
            if part is not None:
                texts += self._resolved(part)
        return texts

    @property
    def may_reason(self) -> bool:
        """More reasoning may come."""
        return self._parser is not None and self._parser.may_reason

    def flush(self) -> list[TokenLogprobs]:
        """The rest, when no more tokens come."""
        if self._parser is None or self._detokenizer is None:
            return []
        events = [*self._parser.push(self._detokenizer.flush()), *self._parser.flush()]
        is_dropped = (
            self._has_call or self._has_waiting_text
        )  # an end of sequence belongs to the text, and is none
        is_text = any(isinstance(event, Text) for event in events) or not is_dropped
        return self._resolved(AnswerPart.TEXT if is_text else AnswerPart.CALL)

    def _certain_part(
        self, before: AnswerPart, events: Sequence[AnswerEvent], after: AnswerPart
    ) -> AnswerPart | None:
        """Of the tokens that wait, the last one included; None: not certain yet."""
        if before is AnswerPart.REASONING:
            return before
        if any(isinstance(event, Text) for event in events):
            self._has_call = False
            return AnswerPart.TEXT
        if any(not isinstance(event, Reasoning) for event in events):
            self._has_call = True
            return AnswerPart.CALL
        if after is AnswerPart.REASONING:
            return after
        return before if before is AnswerPart.CALL and self._has_call else None

    def _resolved(self, part: AnswerPart) -> list[TokenLogprobs]:
        if part is AnswerPart.REASONING:
            self.num_reasoning_tokens += len(self._waiting)
        texts = [each for each in self._waiting if each is not None] if part is AnswerPart.TEXT else []
        self._waiting.clear()
        self._has_waiting_text = False
        return texts


class ReasoningCount:
    """For one answer's tokens, in order. They are parsed a second time only while reasoning may come, so plain answers
    cost nothing."""

    def __init__(self, request: GatewayRequest) -> None:
        self._parts = TokenParts(request)

    def take(self, token_ids: Sequence[int]) -> None:
        if self._parts.may_reason:
            self._parts.take(token_ids)

    @property
    def num_tokens(self) -> int:
        """So far."""
        return self._parts.num_reasoning_tokens
