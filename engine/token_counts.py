"""TokenCounts: which tokens occur in a growing sequence, and how often; knows no request."""

from collections.abc import Iterable
from typing import Self

import numpy as np

from engine.request_table import IntArray

FEW = 8
"""Up to this many new tokens are inserted one by one; more are counted together."""


class TokenCounts:
    """Counts incrementally: sorting a long sequence for each of its tokens would take longer than a step."""

    __slots__ = ("_num_counted", "counts", "tokens")

    def __init__(self) -> None:
        self.tokens: IntArray = np.empty(0, np.int64)
        """Each token id once, in ascending order."""
        self.counts: IntArray = np.empty(0, np.int64)
        """How often each of these tokens occurs."""
        self._num_counted = 0

    def follow(self, token_ids: IntArray) -> None:
        """Counts the tokens of a sequence that begins with the previous call's sequence."""
        assert len(token_ids) >= self._num_counted, f"{len(token_ids)} tokens after {self._num_counted}"
        new = token_ids[self._num_counted :]
        self._num_counted = len(token_ids)
        if len(new) > FEW:
            self._count(new)
        else:
            for token_id in new:
                self._add(token_id)

    def with_tokens(self, token_ids: Iterable[int]) -> Self:
        """A copy that also counts these tokens."""
        more = type(self)()
        more.tokens, more.counts = self.tokens, self.counts.copy()
        for token_id in token_ids:
            more._add(np.int64(token_id))
        return more

    def _count(self, new: IntArray) -> None:
        tokens, inverse = np.unique(np.concatenate([self.tokens, new]), return_inverse=True)
        ones = np.ones(len(new), np.int64)
        counts = np.zeros(len(tokens), np.int64)
        np.add.at(counts, inverse, np.concatenate([self.counts, ones]))
        self.tokens, self.counts = tokens, counts

    def _add(self, token_id: np.int64) -> None:
        place = int(np.searchsorted(self.tokens, token_id))
        if place < len(self.tokens) and self.tokens[place] == token_id:
            self.counts[place] += 1
        else:
            self.tokens = np.insert(self.tokens, place, token_id)
            self.counts = np.insert(self.counts, place, 1)
