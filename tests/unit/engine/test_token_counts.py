"""Counts that follow a sequence are those of the sequence."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from engine.token_counts import TokenCounts


@given(st.lists(st.lists(st.integers(0, 9), max_size=20), max_size=12))
def test_counts_are_those_of_the_sequence(pieces: list[list[int]]) -> None:
    counts, sequence = TokenCounts(), np.empty(0, np.int64)
    for piece in pieces:
        sequence = np.concatenate([sequence, np.array(piece, np.int64)])
        counts.follow(sequence)
        tokens, expected = np.unique(sequence, return_counts=True)
        assert counts.tokens.tolist() == tokens.tolist()
        assert counts.counts.tolist() == expected.tolist()
