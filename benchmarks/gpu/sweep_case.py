"""A sweep's case: candidates that launch a kernel on one of several copies of the same inputs."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch

CHOSEN = "as chosen"

Launch = Callable[[], torch.Tensor]
"""Queues the same work on the same memory each time, and returns the output."""
Candidate = Callable[[int], Launch]
"""Returns the launch on one of the copies of the inputs, by the copy's number."""

Tuning = TypeVar("Tuning", bound=Any)


@dataclass(frozen=True, slots=True)
class SweepCase:
    """One kernel with one shape."""

    name: str
    num_copies: int
    """Enough copies that a cache cannot store all of them."""
    num_bytes: int
    """The least bytes that the kernel must move."""
    max_error: float
    make: Callable[[], dict[str, Candidate]]
    """Makes the inputs, and returns candidates by name; one is `CHOSEN`. The inputs live as long as the
    candidates."""
    yardstick: str | None = None
    """The name of the library's candidate, which may refuse these inputs."""


def neighbours(chosen: Tuning, alternatives: dict[str, tuple[int, ...]]) -> Iterator[tuple[str, Tuning]]:
    """The choice, then variants that differ from it in one field; each has a name."""
    yield CHOSEN, chosen
    names = {field.name for field in fields(chosen)}
    for name, values in alternatives.items():
        for value in values if name in names else ():
            if value != getattr(chosen, name):
                yield f"{name} {value}", replace(chosen, **{name: value})


def copies_beyond_cache(num_bytes: int) -> int:
    """How many copies of inputs of this size far exceed an L2 of 60 MiB: from two to sixteen."""
    return max(2, min(16, -(-200 * 2**20 // num_bytes)))
