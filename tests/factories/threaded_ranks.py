"""Tensor-parallel ranks as threads of one process, with collectives by shared memory and a barrier."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import TypeVar

import torch

from engine.collectives import Collectives

T = TypeVar("T")
TIMEOUT_S = 60.0


class ThreadedRank:
    """One rank as a thread. Satisfies Collectives."""

    def __init__(
        self, rank: int, size: int, shared: list[torch.Tensor | None], barrier: threading.Barrier
    ) -> None:
        self.rank = rank
        self.size = size
        self._shared = shared
        self._barrier = barrier

    def all_reduce_(self, x: torch.Tensor) -> None:
        x.copy_(torch.stack(self._exchange(x)).sum(0))

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._exchange(x), -1)

    def broadcast_(self, x: torch.Tensor) -> None:
        x.copy_(self._exchange(x)[0])

    def silent(self) -> AbstractContextManager[None]:
        raise NotImplementedError("only a GPU rehearses")

    def _exchange(self, x: torch.Tensor) -> list[torch.Tensor]:
        self._shared[self.rank] = x.clone()
        self._barrier.wait(TIMEOUT_S)
        everyones = [part for part in self._shared if part is not None]
        self._barrier.wait(TIMEOUT_S)  # no rank writes the next values before all have read these
        return everyones


def on_ranks(size: int, run: Callable[[Collectives], T]) -> list[T]:
    """The results of every rank's `run`. If one rank raises, this raises its exception."""
    barrier = threading.Barrier(size)
    shared: list[torch.Tensor | None] = [None] * size

    def guarded(rank: int) -> T:
        try:
            return run(ThreadedRank(rank, size, shared, barrier))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(guarded, range(size)))
