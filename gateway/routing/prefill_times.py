"""PrefillTimes: what it takes at least to compute a prompt, by what others took lately; pure, in bounded memory.

Two things are known, and each may be too much, so the smaller one counts:

    half of what prompts no longer took on the same worker  too much after a time when many shared its steps
    tokens / the best rate that the worker told             too much where prompts were so short that steps were empty

Nothing is concluded from longer prompts.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

MEMORY_S = 60.0
"""What is older says nothing any more: so whoever was refused may try, and a worker that has become faster is found."""
MIN_SEEN = 4
"""Of fewer prompts of about one size nobody knows whether they were slow by chance."""
MAX_SEEN = 16
SHARE = 0.5


class _Prompt(NamedTuple):
    at: float
    num_tokens: int
    seconds: float


@dataclass(slots=True)
class _Worker:
    """Times are those of the caller's clock, with what was seen then."""

    prompts: dict[int, deque[_Prompt]] = field(default_factory=dict)
    """The latest, by the bits of their number of tokens."""
    rates: deque[tuple[float, float]] = field(default_factory=deque)
    """Tokens a second: the best one, the best one after that, and so on."""

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
    """Times must not run backwards."""

    def __init__(self) -> None:
        self._workers: dict[str, _Worker] = {}

    def computed(self, worker: str, num_tokens: int, seconds: float, now: float) -> None:
        """So many tokens, found in no cache, took so long from the first step to the first token."""
        self._workers.setdefault(worker, _Worker()).computed(num_tokens, seconds, now)

    def on_rate(self, worker: str, tokens_per_s: float, now: float) -> None:
        """What a worker measures in steps that compute prompts; 0 if it has measured nothing yet."""
        if tokens_per_s > 0.0:
            self._workers.setdefault(worker, _Worker()).on_rate(tokens_per_s, now)

    def least_s(self, lacking: Mapping[str, int], now: float) -> float:
        """From the first step to the first token, on whichever of these workers that is, of which each lacks so many
        tokens; 0 if nobody knows."""
        nothing = _Worker()
        return min(
            (self._workers.get(worker, nothing).least_s(num, now) for worker, num in lacking.items()),
            default=0.0,
        )

    def forget(self, worker: str) -> None:
        """It is gone; who comes back by its name may be faster."""
        self._workers.pop(worker, None)


def _least_of(seen: Iterable[_Prompt], num_tokens: int, now: float) -> float:
    """What those took that are no longer than this."""
    seconds = [each.seconds for each in seen if each.num_tokens <= num_tokens and now - each.at <= MEMORY_S]
    return min(seconds) if len(seconds) >= MIN_SEEN else 0.0
