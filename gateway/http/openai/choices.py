"""Collects all answers to one client request: their texts and their usage."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Self

from gateway.conversation import AnswerEvent, AnswerParts
from gateway.http.openai.answers import (
    CompletionTokensDetails,
    PromptTokensDetails,
    Usage,
)
from gateway.http.openai.logprobs import LogprobColumns, PromptLogprobs
from gateway.http.whole_json import string_pieces
from gateway.requests.request import Delta, Finish, GatewayRequest
from gateway.token_parts import ReasoningCount


@dataclass(slots=True)
class UsageCount:
    """Adds up the usage of all answers. A prompt counts once, with the cached tokens of its first answer."""

    num_prompt_tokens: int
    num_samples: int
    """Number of answers to each prompt."""
    reasoning: Sequence[ReasoningCount] | None = None
    """Counts the reasoning tokens of each answer to a chat. None: reasoning is not counted."""
    num_completion_tokens: int = 0
    num_cached_tokens: int = 0

    @classmethod
    def of(cls, requests: Sequence[GatewayRequest], num_samples: int, *, counts_reasoning: bool) -> Self:
        """The count for the answers to `requests`, which contains `num_samples` requests for each prompt."""
        num_prompt_tokens = sum(len(request.prompt_token_ids) for request in requests[::num_samples])
        reasoning = [ReasoningCount(request) for request in requests] if counts_reasoning else None
        return cls(num_prompt_tokens, num_samples, reasoning)

    def on_delta(self, index: int, delta: Delta) -> None:
        self.num_completion_tokens += len(delta.token_ids)
        if self.reasoning is not None:
            self.reasoning[index].on_tokens(delta.token_ids)
        if delta.finish is not None and index % self.num_samples == 0:
            self.num_cached_tokens += delta.finish.num_cached_tokens

    @property
    def usage(self) -> Usage:
        """The usage so far."""
        return Usage(
            prompt_tokens=self.num_prompt_tokens,
            completion_tokens=self.num_completion_tokens,
            total_tokens=self.num_prompt_tokens + self.num_completion_tokens,
            prompt_tokens_details=PromptTokensDetails(self.num_cached_tokens),
            completion_tokens_details=None
            if self.reasoning is None
            else CompletionTokensDetails(self.num_reasoning_tokens),
        )

    @property
    def num_reasoning_tokens(self) -> int:
        return sum(count.num_tokens for count in self.reasoning or ())


@dataclass(slots=True)
class Collected:
    """Collects one whole answer from its deltas, in as little memory as possible."""

    logprobs: LogprobColumns = field(default_factory=LogprobColumns)
    prompt_logprobs: PromptLogprobs = field(default_factory=PromptLogprobs)
    """The prompt's log-probabilities, in answers that have the field `prompt_logprobs`."""
    finish: Finish | None = None
    parts: AnswerParts = field(default_factory=AnswerParts)

    def on_delta(self, delta: Delta, events: Iterable[AnswerEvent] | None) -> None:
        """Adds a delta. `events`: the delta's events; None if the answer is only text."""
        if events is None:
            self.parts.add_text(delta.text)
        else:
            self.parts.add_events(events)
        self.logprobs.extend(delta.logprobs)
        self.finish = delta.finish

    def text(self) -> Iterator[str]:
        """The answer's text as a JSON string without quotes, in pieces."""
        return string_pieces(self.parts.text)
