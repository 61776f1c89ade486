"""What a sweep needs of a kernel: candidates that launch it on one of several copies of the same inputs."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch

CHOSEN = "as chosen"

Launch = Callable[[], torch.Tensor]
"""Only queues work, always the same on the same memory, and gives the output."""
Candidate = Callable[[int], Launch]
"""The launch on one copy of the inputs; its output is poisoned beforehand."""

Tuning = TypeVar("Tuning", bound=Any)


@dataclass(frozen=True, slots=True)
class SweepCase:
    """One kernel at one shape."""

    name: str
    num_copies: int
    """So many together are more than a cache holds."""
    num_bytes: int
    """That must be moved at least."""
    max_error: float
    make: Callable[[], dict[str, Candidate]]
    """By name; one is `CHOSEN`. Makes the inputs, which live as long as the candidates."""
    yardstick: str | None = None
    """The candidate that is a library's, and that may refuse."""


def neighbours(chosen: Tuning, alternatives: dict[str, tuple[int, ...]]) -> Iterator[tuple[str, Tuning]]:
    """The choice, then dataclasses that differ from it in one field, each with its name."""
    yield CHOSEN, chosen
    names = {field.name for field in fields(chosen)}
    for name, values in alternatives.items():
        for value in values if name in names else ():
            if value != getattr(chosen, name):
                yield f"{name} {value}", replace(chosen, **{name: value})


def copies_beyond_cache(num_bytes: int) -> int:
    """How many copies of inputs of so many bytes are well beyond an L2 of 60 MiB; two at least, sixteen at most."""
    return max(2, min(16, -(-200 * 2**20 // num_bytes)))
