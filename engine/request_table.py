"""RequestTable: the state that steps need of requests, as arrays with a row per request; knows no plan.

So a step of hundreds of decodes is built by a few operations on whole columns, not by a few for each request.
Of a request's tokens, the table has only the last one.

Shape suffixes: S rows of the table, M columns for block ids.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]

NONE = -1
"""Means that there is no row of sampled tokens, or no block."""
_FIRST_ROWS, _FIRST_BLOCKS = 16, 16


class GrowingArray:
    """An int64 array with amortized O(1) append."""

    __slots__ = ("_buffer", "_length")

    def __init__(self, values: tuple[int, ...]) -> None:
        self._buffer = np.array(values, dtype=np.int64)
        self._length = len(values)

    def __len__(self) -> int:
        return self._length

    @property
    def values(self) -> IntArray:
        """A view of the present values."""
        return self._buffer[: self._length]

    def append(self, value: int) -> None:
        if self._length == len(self._buffer):
            self._buffer = np.resize(self._buffer, max(2 * self._length, 16))
        self._buffer[self._length] = value
        self._length += 1

    def truncate(self, length: int) -> None:
        assert length <= self._length, f"{length} of {self._length} values"
        self._length = length


class RequestTable:
    """Columns grow by doubling, and rows are reused.

    A view of a column is valid until rows or blocks are added.
    """

    def __init__(self) -> None:
        self.num_computed_tokens_S = np.zeros(_FIRST_ROWS, np.int64)
        self.num_tokens_S = np.zeros(_FIRST_ROWS, np.int64)
        """Number of tokens, including tokens that steps under way sample."""
        self.last_tokens_S = np.zeros(_FIRST_ROWS, np.int64)
        """Id of the last token; 0 if it is not known yet."""
        self.sampled_rows_S = np.full(_FIRST_ROWS, NONE, np.int64)
        """The last token's row among the tokens that the step under way samples; NONE: the token is known."""
        self.cleared_blocks_S = np.full(_FIRST_ROWS, NONE, np.int64)
        """The block whose slots past the request's end are known to be zero; NONE: not known for any block."""
        self.num_blocks_S = np.zeros(_FIRST_ROWS, np.int64)
        self.block_ids_SM = np.zeros((_FIRST_ROWS, _FIRST_BLOCKS), np.int64)
        """Block ids. Entries after a row's first `num_blocks` are undefined."""
        self._free = list(range(_FIRST_ROWS - 1, -1, -1))

    def add(self) -> int:
        """Returns a free row."""
        if not self._free:
            self._grow()
        row = self._free.pop()
        self.sampled_rows_S[row] = NONE
        return row

    def remove(self, row: int) -> None:
        self._free.append(row)

    def set_blocks(self, row: int, block_ids: Sequence[int]) -> None:
        """Replaces the row's blocks."""
        self.num_blocks_S[row] = 0
        self.cleared_blocks_S[row] = NONE
        self.extend_blocks(row, block_ids)

    def extend_blocks(self, row: int, block_ids: Sequence[int]) -> None:
        start = int(self.num_blocks_S[row])
        end = start + len(block_ids)
        if end > self.block_ids_SM.shape[1]:
            num_columns = max(end, 2 * self.block_ids_SM.shape[1])
            wider_SM = np.zeros((len(self.block_ids_SM), num_columns), np.int64)
            wider_SM[:, : self.block_ids_SM.shape[1]] = self.block_ids_SM
            self.block_ids_SM = wider_SM
        self.block_ids_SM[row, start:end] = block_ids
        self.num_blocks_S[row] = end

    def _grow(self) -> None:
        num_rows = len(self.num_tokens_S)
        for name in (
            "num_computed_tokens_S",
            "num_tokens_S",
            "last_tokens_S",
            "sampled_rows_S",
            "cleared_blocks_S",
            "num_blocks_S",
            "block_ids_SM",
        ):
            column = getattr(self, name)
            setattr(self, name, np.concatenate([column, np.zeros_like(column)]))
        self._free = list(range(2 * num_rows - 1, num_rows - 1, -1))
