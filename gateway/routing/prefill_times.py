"""PrefillTimes: a lower bound for the time to compute a prompt, from recent prompts; pure, in bounded memory.

Two estimates exist. Each may be too high, so the smaller estimate counts:

    half the time of shorter prompts on the same worker  too high if many requests shared the worker's steps
    tokens / the best rate that the worker reported      too high if prompts were too short to fill steps

The times of longer prompts are not used.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from baton.errors import DeadlineTooClose

MEMORY_S = 60.0
"""Older values are ignored. Without values, no prompt counts as too long, so a prompt is tried again. This shows
whether a worker became faster."""
MIN_SEEN = 4
"""Fewer prompts of about the same size are not used, since they may have been slow by chance."""
MAX_SEEN = 16
SHARE = 0.5


class _Prompt(NamedTuple):
    at: float
    num_tokens: int
    seconds: float


@dataclass(slots=True)
class _Worker:
    """One worker's recent prompts and rates, with their times on the caller's clock."""

    prompts: dict[int, deque[_Prompt]] = field(default_factory=dict)
    """The latest prompts, grouped by length: `num_tokens.bit_length()` is the key."""
    rates: deque[tuple[float, float]] = field(default_factory=deque)
    """Rates in tokens per second, each with its time: the best rate, then the best of all later rates, and so on."""

    def computed(self, num_tokens: int, seconds: float, now: float) -> None:
        of_size = self.prompts.setdefault(num_tokens.bit_length(), deque(maxlen=MAX_SEEN))
        of_size.append(_Prompt(now, num_tokens, seconds))

    def on_rate(self, tokens_per_s: float, now: float) -> None:
        while self.rates and self.rates[-1][1] <= tokens_per_s:
            self.rates.pop()
        self.rates.append((now, tokens_per_s))
        while now - self.rates[0][0] > MEMORY_S:
            self.rates.popleft()

    def least_s(self, num_tokens: int, now: float) -> float:
        best = next((rate for at, rate in self.rates if now - at <= MEMORY_S), None)
        if best is None:
            return 0.0
        took_s = max((_least_of(seen, num_tokens, now) for seen in self.prompts.values()), default=0.0)
        return min(SHARE * took_s, num_tokens / best)


class PrefillTimes:
    """The recent prompts and rates of all workers. Times must not run backwards."""

    def __init__(self) -> None:
        self._workers: dict[str, _Worker] = {}

    def computed(self, worker: str, num_tokens: int, seconds: float, now: float) -> None:
        """A worker computed `num_tokens` uncached tokens. This took `seconds` from the first step to the
        first token.
        """
        self._workers.setdefault(worker, _Worker()).computed(num_tokens, seconds, now)

    def on_rate(self, worker: str, tokens_per_s: float, now: float) -> None:
        """A worker's measured rate in steps that compute prompts; 0 if it has measured nothing yet."""
        if tokens_per_s > 0.0:
            self._workers.setdefault(worker, _Worker()).on_rate(tokens_per_s, now)

    def least_s(self, num_to_compute: Mapping[str, int], now: float) -> float:
        """The least time from the first step to the first token on the fastest of these workers, or 0.

        0 means unknown. `num_to_compute`: how many tokens each worker would have to compute.
        """
        nothing = _Worker()
        return min(
            (self._workers.get(worker, nothing).least_s(num, now) for worker, num in num_to_compute.items()),
            default=0.0,
        )

    def forget(self, worker: str) -> None:
        """The worker is lost. A later worker of this name may be faster."""
        self._workers.pop(worker, None)


def _least_of(seen: Iterable[_Prompt], num_tokens: int, now: float) -> float:
    """The least time of recent prompts with at most `num_tokens` tokens; 0 if there are too few."""
    seconds = [each.seconds for each in seen if each.num_tokens <= num_tokens and now - each.at <= MEMORY_S]
    return min(seconds) if len(seconds) >= MIN_SEEN else 0.0


def too_close(least_prefill_s: float, left_s: float) -> DeadlineTooClose:
    """The error if the prompt would take too long even if it began now. A later retry is useless."""
    return DeadlineTooClose(
        f"the prompt takes at least {least_prefill_s:.1f} s to compute, and the request's deadline is in {left_s:.1f} s"
    )
