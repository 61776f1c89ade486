"""Hunt: how long the simulation takes to find a bug that is put into the code."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass
from functools import wraps
from itertools import count
from typing import Any
from unittest.mock import patch

from tests.simulation.run import Result, results
from tests.simulation.windows import has_windows

TIME_LIMIT_S = 60.0

Plant = Callable[[], AbstractContextManager[Any]]
"""Puts a bug in for as long as its context lasts."""


def bug(owner: Any, name: str) -> Callable[[Callable[..., Any]], Plant]:
    """The decorated function replaces `owner.name`; its first argument is the original."""

    def make_plant(broken: Callable[..., Any]) -> Plant:
        original = getattr(owner, name)

        @wraps(broken)
        def plant() -> AbstractContextManager[Any]:
            return patch.object(owner, name, lambda *args, **options: broken(original, *args, **options))

        return plant

    return make_plant


@dataclass(frozen=True, slots=True)
class Hunt:
    """How long it took to find a bug; `found` is None if it survived."""

    num_seeds: int
    elapsed_s: float
    found: Result | None


def hunt(
    plant: Plant,
    num_jobs: int,
    time_limit_s: float = TIME_LIMIT_S,
    *,
    first: int = 0,
    needs_windows: bool = False,
) -> Hunt:
    """Plays seeds from `first` on with the bug in place. `needs_windows`: only those that have sliding windows."""
    begun, num_seeds = time.monotonic(), 0
    seeds = filter(has_windows, count(first)) if needs_windows else count(first)
    with plant(), closing(results(seeds, num_jobs)) as played:
        for result in played:
            num_seeds += 1
            elapsed_s = time.monotonic() - begun
            if result.violation is not None or elapsed_s > time_limit_s:
                return Hunt(num_seeds, elapsed_s, result if result.violation is not None else None)
    raise AssertionError("there is always another seed")
