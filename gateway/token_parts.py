"""TokenParts: the part of an answer to which each token belongs; ReasoningCount: counts reasoning tokens.

Events show the part of each text, but not of each token: text arrives later than its tokens, and has other
boundaries. So this module passes the text of each token through a second parser.
"""

from collections.abc import Sequence
from itertools import zip_longest

from baton.request import TokenLogprobs
from gateway.conversation import AnswerEvent, AnswerPart, Reasoning, Text
from gateway.requests.request import GatewayRequest

TextLogprobs = tuple[int, TokenLogprobs]
"""The log-probabilities of a token of text, after the number of its text. The texts before and after a call, or before
and after reasoning, are different texts, which are numbered from 0."""


class TokenParts:
    """Takes one answer's tokens, in order. A tag, with the spaces beside it, belongs to the part that it
    encloses. A token across two parts belongs to the first part, unless this part is text. Answers that
    can only be text cost nothing.
    """

    def __init__(self, request: GatewayRequest) -> None:
        self._parser = request.new_parser()
        self._detokenizer = None if self._parser is None else request.text.new_detokenizer()
        self._waiting: list[TokenLogprobs | None] = []
        """Tokens that may belong to a tag or to text."""
        self._has_waiting_text = False
        """Whether some of the waiting tokens have text."""
        self._has_call = False
        """Whether a call began after the latest text."""
        self._text_number = -1
        """The number of the latest text."""
        self._is_in_text = False
        """Whether the latest event was text."""
        self.num_reasoning_tokens = 0
        """How many tokens so far are reasoning."""

    def on_tokens(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs] = ()
    ) -> list[TextLogprobs]:
        """The log-probabilities of tokens that are now known to be text. `logprobs`: empty, or one for each
        token."""
        if self._parser is None or self._detokenizer is None:
            return [(0, each) for each in logprobs]
        texts: list[TextLogprobs] = []
        for token_id, logprob in zip_longest(token_ids, logprobs):
            before = self._parser.part
            text = self._detokenizer.push(token_id)
            events = self._parser.push(text)
            self._note_texts(events)
            self._waiting.append(logprob)
            self._has_waiting_text |= bool(text)
            part = self._certain_part(before, events, self._parser.part)
            if part is not None:
                texts += self._resolved(part)
        return texts

    @property
    def may_reason(self) -> bool:
        """Whether more reasoning may follow."""
        return self._parser is not None and self._parser.may_reason

    def flush(self) -> list[TextLogprobs]:
        """The log-probabilities of the waiting tokens, if these are text. Call this when no more tokens follow."""
        if self._parser is None or self._detokenizer is None:
            return []
        events = [*self._parser.push(self._detokenizer.flush()), *self._parser.flush()]
        self._note_texts(events)
        # Waiting tokens without text, such as an end of sequence, belong to the text, but not after a call.
        is_dropped = self._has_call or self._has_waiting_text
        is_text = any(isinstance(event, Text) for event in events) or not is_dropped
        return self._resolved(AnswerPart.TEXT if is_text else AnswerPart.CALL)

    def _certain_part(
        self, before: AnswerPart, events: Sequence[AnswerEvent], after: AnswerPart
    ) -> AnswerPart | None:
        """The part to which the waiting tokens belong, including the last one; None if this is not certain
        yet."""
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

    def _note_texts(self, events: Sequence[AnswerEvent]) -> None:
        """Counts the texts that begin with these events."""
        for event in events:
            was_in_text, self._is_in_text = self._is_in_text, isinstance(event, Text)
            if self._is_in_text and not was_in_text:
                self._text_number += 1

    def _resolved(self, part: AnswerPart) -> list[TextLogprobs]:
        texts: list[TextLogprobs] = []
        if part is AnswerPart.REASONING:
            self.num_reasoning_tokens += len(self._waiting)
        elif part is AnswerPart.TEXT:
            texts = [(self._text_number, each) for each in self._waiting if each is not None]
        self._waiting.clear()
        self._has_waiting_text = False
        return texts


class ReasoningCount:
    """Takes one answer's tokens, in order. It parses tokens a second time only while reasoning may follow, so
    plain answers cost nothing."""

    def __init__(self, request: GatewayRequest) -> None:
        self._parts = TokenParts(request)

    def on_tokens(self, token_ids: Sequence[int]) -> None:
        if self._parts.may_reason:
            self._parts.on_tokens(token_ids)

    @property
    def num_tokens(self) -> int:
        """How many tokens so far are reasoning."""
        return self._parts.num_reasoning_tokens
