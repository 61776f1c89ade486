"""The drafts and forced tokens of a fake runner: pure functions of request and position."""

from collections.abc import Callable
from zlib import crc32

from tests.factories.scheduling import Guess, token_at


def guesses(num_drafts: int, next_token: Callable[[str, int], int] = token_at) -> Guess:
    """A function that guesses up to `num_drafts` drafts; three of four are right."""

    def guess(request_id: str, position: int) -> tuple[int, ...] | None:
        draws = [crc32(f"draft {request_id}@{position}+{ahead}".encode()) for ahead in range(num_drafts)]
        drafts = [next_token(request_id, position + i) + (draw % 4 == 0) for i, draw in enumerate(draws)]
        draw = crc32(f"drafts {request_id}@{position}".encode())
        return tuple(drafts[: draw % (num_drafts + 1)]) or (None if draw % 3 else ())

    return guess


def forces(next_token: Callable[[str, int], int] = token_at) -> Guess:
    """A function that forces up to seven tokens at every second position, for requests with a grammar."""

    def force(request_id: str, position: int) -> tuple[int, ...]:
        draw = crc32(f"forced {request_id}@{position}".encode())
        return tuple(next_token(request_id, position + i) for i in range(draw % 16 - 8))

    return force
