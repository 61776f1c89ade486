"""Drafts: tokens that are guessed ahead, for the model to verify together; knows no model, request or grammar.

Verifying costs time, whether the drafts are right or not. So a request gets as many as are likely to be right.
"""

import math

import numpy as np

from engine.request_table import IntArray

MAX_SEARCHED = 32_768
"""Latest tokens of a request that are searched."""
MAX_CANDIDATES = 512
"""Latest occurrences of the last token that are compared: in a run of equal tokens there are as many as tokens."""
WEIGHT = 0.2
"""Of the latest draft in the moving average of a request's acceptance."""
FIRST_LIKELIHOOD, MAX_LIKELIHOOD = 0.8, 0.98
LEAST_LIKELIHOOD = 0.3
"""A draft that is less likely to be right does not pay, however cheap it is to verify."""
PROBE_COST = 0.01
"""Share of a token's time that goes into drafts for a request that is rarely guessed, in case its text changes."""


class NGramProposer:
    """Prompt lookup: what followed the latest earlier occurrence of a request's last tokens."""

    def __init__(self, min_tokens: int, max_tokens: int) -> None:
        """Between `min_tokens` and `max_tokens` of the last tokens must have occurred before; most are best."""
        self._min_tokens, self._max_tokens = min_tokens, max_tokens

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
        # Where the occurrence overlaps the last tokens, they repeat, and so does what follows.
        followed: list[int] = np.resize(recent[ends[-1] :], num_tokens).tolist()
        return followed


class Acceptance:
    """How likely a request's next draft is to be right, from those that were verified."""

    __slots__ = ("_likelihood", "_num_skipped", "is_probing")

    def __init__(self) -> None:
        self._likelihood = FIRST_LIKELIHOOD
        self._num_skipped = 0
        """Steps since a draft was verified."""
        self.is_probing = False
        """The next draft is a probe: it is not likely to be right."""

    def verified(self, num_drafts: int, num_accepted: int) -> None:
        """Counts the accepted drafts and the first wrong one; those behind it say nothing."""
        if self.is_probing and num_accepted == num_drafts:
            self._likelihood = max(self._likelihood, FIRST_LIKELIHOOD)  # the text has changed
        likelihood = 1.0 - (1.0 - self._likelihood) * (1.0 - WEIGHT) ** num_accepted
        if num_accepted < num_drafts:
            likelihood *= 1.0 - WEIGHT
        self._likelihood, self._num_skipped = min(likelihood, MAX_LIKELIHOOD), 0

    def num_useful(self, cost: float) -> int:
        """How many drafts in a row are likely enough to be right; call it once in a step.

        `cost`: what verifying a draft takes, as a share of what a token takes without drafts.
        """
        least = LEAST_LIKELIHOOD + (1.0 - LEAST_LIKELIHOOD) * cost
        self._num_skipped += 1
        self.is_probing = self._likelihood < least
        if self.is_probing:
            return int(self._num_skipped * PROBE_COST > cost)
        return int(math.log(least) / math.log(self._likelihood))


class Drafter:
    """Chooses how many drafts a request gets."""

    def __init__(
        self, proposer: NGramProposer, num_drafts: int, max_num_batched_tokens: int, num_equal_rows: float
    ) -> None:
        """At most `num_drafts` for a request in a step. `num_equal_rows`: rows of a step whose computation takes as
        long as reading the model's weights.
        """
        self._proposer = proposer
        self._num_drafts = num_drafts
        self._max_num_rows = max_num_batched_tokens // 2
        """Half of a step is left to prompts."""
        self._num_equal_rows = num_equal_rows

    def draft(self, token_ids: IntArray, acceptance: Acceptance, num_requests: int) -> list[int] | None:
        """Drafts of one of `num_requests` requests that share the next step; None if they would not pay."""
        num_useful = acceptance.num_useful(num_requests / (num_requests + self._num_equal_rows))
        num_drafts = min(num_useful, self._num_drafts, self._max_num_rows // num_requests - 1)
        return self._proposer.propose(token_ids, num_drafts) if num_drafts > 0 else None
