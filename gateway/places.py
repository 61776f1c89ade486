"""Places: limits how many calls or jobs of one kind run at once. A refusal says when to try again."""

from collections.abc import Iterator
from contextlib import contextmanager

from baton.errors import Overloaded

RETRY_AFTER_S = 10.0


class Places:
    """A number of places. Use it from one event loop only."""

    def __init__(self, number: int, taken: str) -> None:
        """`taken` is the text after the number in a refusal, such as `calls are watching already`."""
        self._number = number
        self._taken = taken
        self.num_taken = 0

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Holds a place until the context ends. Raises Overloaded if no place is free."""
        if self.num_taken >= self._number:
            raise Overloaded(f"{self._number} {self._taken}, which is the limit", RETRY_AFTER_S)
        self.num_taken += 1
        try:
            yield
        finally:
            self.num_taken -= 1
