"""Places: a limit for calls or jobs of one kind at once; further ones are refused with a hint when to retry."""

from collections.abc import Iterator
from contextlib import contextmanager

from baton.errors import Overloaded


class Places:
    """Belongs to one event loop."""

    def __init__(self, number: int, taken: str, retry_after_s: float) -> None:
        """`taken` follows the number in a refusal: `calls are watching already`."""
        self._number = number
        self._taken = taken
        self._retry_after_s = retry_after_s
        self.num_taken = 0

    @contextmanager
    def take(self) -> Iterator[None]:
        """Holds a place while the block runs; Overloaded if none is free."""
        if self.num_taken >= self._number:
            raise Overloaded(f"{self._number} {self._taken}, which is the limit", self._retry_after_s)
        self.num_taken += 1
        try:
            yield
        finally:
            self.num_taken -= 1
