"""A sweep's case: candidates that launch a kernel on one of several copies of the same inputs."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch

CHOSEN = "as chosen"

Launch = Callable[[], torch.Tensor]
"""Queues the same work on the same memory each time, and returns the output."""
Candidate = Callable[[int], Launch]
"""Launches on one copy of the inputs; the output is filled with NaN before."""

Tuning = TypeVar("Tuning", bound=Any)


@dataclass(frozen=True, slots=True)
class SweepCase:
    """One kernel at one shape."""

    name: str
    num_copies: int
    """Enough that a cache does not hold them all."""
    num_bytes: int
    """The least bytes to move."""
    max_error: float
    make: Callable[[], dict[str, Candidate]]
    """Candidates by name; one is `CHOSEN`. Makes the inputs, which live as long as the candidates."""
    yardstick: str | None = None
    """The library's candidate, which may refuse."""


def neighbours(chosen: Tuning, alternatives: dict[str, tuple[int, ...]]) -> Iterator[tuple[str, Tuning]]:
    """The choice, then dataclasses that differ from it in one field, each with its name."""
    yield CHOSEN, chosen
    names = {field.name for field in fields(chosen)}
    for name, values in alternatives.items():
        for value in values if name in names else ():
            if value != getattr(chosen, name):
                yield f"{name} {value}", replace(chosen, **{name: value})


def copies_beyond_cache(num_bytes: int) -> int:
    """How many copies of inputs of this size exceed an L2 of 60 MiB by far; at least two, at most sixteen."""
    return max(2, min(16, -(-200 * 2**20 // num_bytes)))
