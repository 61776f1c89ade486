"""Drafts: guessed next tokens, which the model verifies together in one step; knows no model and no grammar.

Verifying costs time, whether the drafts are right or not. So a request gets only as many drafts as are likely
right.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from engine.batch import RequestBatch, RunnerRequest
from engine.request_table import IntArray

MAX_SEARCHED = 32_768
"""How many of a request's latest tokens are searched."""
MAX_CANDIDATES = 512
"""At most this many of the latest earlier occurrences of the last token are compared with the request's end, each with
the tokens before it. The limit matters for long runs of equal tokens, in which every token is an occurrence."""


@dataclass(frozen=True, slots=True)
class DraftTarget:
    """A request for which drafts are guessed."""

    request: RunnerRequest
    token_ids: IntArray
    """The request's known tokens."""
    block_ids: IntArray
    """The blocks that the request holds."""
    num_tokens: int
    """How many drafts the request may get at most; at least one."""


class Proposer(Protocol):
    """Guesses the next tokens of requests."""

    @property
    def cost(self) -> float:
        """The time to guess a draft, divided by the time of a token without drafts."""
        ...

    def propose_all(self, targets: Sequence[DraftTarget]) -> list[list[int]]:
        """The drafts of each request: at most `num_tokens` of them, perhaps none."""
        ...


class NGramProposer:
    """Prompt lookup: guesses the tokens that followed the latest earlier occurrence of the last tokens."""

    cost = 0.0
    """A search takes about 20 us."""

    def __init__(self, min_tokens: int, max_tokens: int) -> None:
        """The proposer searches for the longest earlier occurrence of the last `min_tokens` to `max_tokens` tokens."""
        self._min_tokens, self._max_tokens = min_tokens, max_tokens

    def propose_all(self, targets: Sequence[DraftTarget]) -> list[list[int]]:
        """Guesses the drafts of each request from the request's own tokens."""
        return [self.propose(each.token_ids, each.num_tokens) for each in targets]

    def propose(self, token_ids: IntArray, num_tokens: int) -> list[int]:
        """Guesses the next `num_tokens` tokens; returns none if the last tokens did not occur before."""
        recent = token_ids[-MAX_SEARCHED:]
        ends = np.flatnonzero(recent[:-1] == recent[-1])[-MAX_CANDIDATES:] + 1
        length = min(1, len(ends))
        while ends.size and length < self._max_tokens:
            longer = ends[ends > length]
            longer = longer[recent[longer - length - 1] == recent[-length - 1]]
            if not longer.size:
                break
            ends, length = longer, length + 1
        if length < self._min_tokens:
            return []
        # If fewer tokens than `num_tokens` follow the occurrence, the guess repeats them: the text repeats
        # itself.
        followed: list[int] = np.resize(recent[ends[-1] :], num_tokens).tolist()
        return followed


class Drafter:
    """Chooses how many drafts a request gets."""

    def __init__(
        self, proposer: Proposer, num_drafts: int, max_num_batched_tokens: int, num_equal_rows: float
    ) -> None:
        """`num_drafts`: the most drafts of a request in a step.

        `num_equal_rows`: with this many rows, a step's arithmetic takes as long as reading the model's
        weights.
        """
        self._proposer = proposer
        self._num_drafts = num_drafts
        self._max_num_rows = max_num_batched_tokens // 2
        """Drafts use at most half of a step, so that the other half is left for prompts."""
        self._num_equal_rows = num_equal_rows

    def draft(
        self, requests: Sequence[RunnerRequest], batch: RequestBatch, *, any_first_token: bool
    ) -> Iterator[tuple[RunnerRequest, list[int]]]:
        """The drafts of the requests for which the last step sampled tokens; no drafts for a request if they do not
        pay.

        These requests will share the next step. `any_first_token`: whether the last step sampled the first
        token of a request. Such a token must not wait until drafts are guessed.
        """
        if self._proposer.cost and any_first_token:
            yield from ((request, []) for request in requests)
            return
        num_requests = max(1, len(requests))
        cost = num_requests / (num_requests + self._num_equal_rows) + self._proposer.cost
        most = min(self._num_drafts, self._max_num_rows // num_requests - 1)
        targets = []
        for request in requests:
            num_drafts = min(most, request.acceptance.num_useful(cost), request.num_tokens_left - 1)
            if num_drafts > 0:
                targets.append(
                    DraftTarget(request, batch.known_token_ids(request), batch.block_ids(request), num_drafts)
                )
        for each, drafts in zip(targets, self._proposer.propose_all(targets), strict=True):
            yield each.request, drafts
