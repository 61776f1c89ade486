"""Drafts: tokens that are guessed ahead, for the model to verify together; knows no model and no grammar.

Verifying costs time, whether the drafts are right or not. So a request gets as many as are likely to be right.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from engine.batch import RequestBatch, RunnerRequest
from engine.request_table import IntArray

MAX_SEARCHED = 32_768
"""Latest tokens of a request that are searched."""
MAX_CANDIDATES = 512
"""Latest occurrences of the last token that are compared: in a run of equal tokens there are as many as tokens."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Drafts that a request wants."""

    request: RunnerRequest
    token_ids: IntArray
    """Its known tokens."""
    block_ids: IntArray
    """The blocks that the request holds."""
    num_tokens: int
    """The most drafts; at least one."""


class Proposer(Protocol):
    """Guesses the next tokens of requests."""

    @property
    def cost(self) -> float:
        """What a draft takes to guess, as a share of what a token takes without drafts."""
        ...

    def propose_all(self, wanted: Sequence[Wanted]) -> list[list[int]]:
        """The drafts of each request: at most those wanted, or none."""
        ...


class NGramProposer:
    """Prompt lookup: what followed the latest earlier occurrence of a request's last tokens."""

    cost = 0.0
    """A search takes some 20 us."""

    def __init__(self, min_tokens: int, max_tokens: int) -> None:
        """Between `min_tokens` and `max_tokens` of the last tokens must have occurred before; most are best."""
        self._min_tokens, self._max_tokens = min_tokens, max_tokens

    def propose_all(self, wanted: Sequence[Wanted]) -> list[list[int]]:
        """Each from its own tokens."""
        return [self.propose(each.token_ids, each.num_tokens) for each in wanted]

    def propose(self, token_ids: IntArray, num_tokens: int) -> list[int]:
        """Guesses the next `num_tokens` tokens; none if the last ones did not occur before."""
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
        # If the occurrence overlaps the last tokens, the text repeats itself, so the guess repeats it, too.
        followed: list[int] = np.resize(recent[ends[-1] :], num_tokens).tolist()
        return followed


class Drafter:
    """Chooses how many drafts a request gets."""

    def __init__(
        self, proposer: Proposer, num_drafts: int, max_num_batched_tokens: int, num_equal_rows: float
    ) -> None:
        """At most `num_drafts` for a request in a step. `num_equal_rows`: rows of a step whose computation takes as
        long as reading the model's weights.
        """
        self._proposer = proposer
        self._num_drafts = num_drafts
        self._max_num_rows = max_num_batched_tokens // 2
        """Half of a step is left to prompts."""
        self._num_equal_rows = num_equal_rows

    def draft(
        self, requests: Sequence[RunnerRequest], batch: RequestBatch, *, has_first_token: bool
    ) -> Iterator[tuple[RunnerRequest, list[int]]]:
        """Drafts of the requests that the last step sampled for, and that share the next step; none of those for which
        drafts would not pay. `has_first_token`: of any request, which must not wait until drafts are guessed.
        """
        if self._proposer.cost and has_first_token:
            yield from ((request, []) for request in requests)
            return
        num_requests = max(1, len(requests))
        cost = num_requests / (num_requests + self._num_equal_rows) + self._proposer.cost
        most = min(self._num_drafts, self._max_num_rows // num_requests - 1)
        wanted = []
        for request in requests:
            num_drafts = min(most, request.acceptance.num_useful(cost), request.num_tokens_left - 1)
            if num_drafts > 0:
                wanted.append(
                    Wanted(request, batch.known_token_ids(request), batch.block_ids(request), num_drafts)
                )
        for each, drafts in zip(wanted, self._proposer.propose_all(wanted), strict=True):
            yield each.request, drafts
