"""Limits of each caller's key: requests and tokens per minute, and requests at once; pure."""

from typing import Literal

from baton.errors import RateLimited
from gateway.auth.callers import Caller

CONCURRENCY_RETRY_S = 1.0
"""When a caller with too many requests at once should try again. This is a guess: the gateway does not know when one of
these requests will end."""


class TokenBucket:
    """Holds up to `capacity` tokens, gains `rate_per_s` tokens per second, and starts full (the leaky bucket as a
    meter, ITU-T I.371)."""

    def __init__(self, rate_per_s: float, capacity: float, now: float) -> None:
        assert rate_per_s > 0.0
        assert capacity >= 1.0
        self._rate_per_s = rate_per_s
        self._capacity = capacity
        self._level = capacity
        self._at = now

    def wait_s(self, now: float) -> float:
        """The seconds until the bucket holds a whole token; 0 if it already does."""
        self.spend(0, now)
        missing = 1.0 - self._level
        # Tolerates rounding, so that a caller that waited for this time is admitted.
        return missing / self._rate_per_s if missing > 1e-9 else 0.0

    def spend(self, number: int, now: float) -> None:
        """Takes tokens. The level may become negative; tokens that are gained later pay the debt."""
        level = min(self._capacity, self._level + (now - self._at) * self._rate_per_s)
        self._level, self._at = level - number, now


class CallerRates:
    """The buckets of all callers. If a caller's rate changes, the caller gets a new, full bucket at its next `check`.
    Running requests have the rate with which they began, so `count` never replaces the bucket."""

    def __init__(self, unit: Literal["requests", "tokens"]) -> None:
        self._unit = unit
        self._buckets: dict[str, tuple[int, TokenBucket]] = {}

    def check(self, caller: Caller, now: float) -> RateLimited | None:
        """The error if the caller must wait; it contains the time to wait."""
        per_minute = self._per_minute(caller)
        if per_minute is None:
            self._buckets.pop(caller.name, None)
            return None
        known = self._buckets.get(caller.name)
        if known is None or known[0] != per_minute:
            known = self._buckets[caller.name] = (per_minute, TokenBucket(per_minute / 60.0, per_minute, now))
        if not (wait_s := known[1].wait_s(now)):
            return None
        return RateLimited(
            f"the key of '{caller.name}' allows {per_minute} {self._unit} per minute, which are used up; "
            f"try again in {wait_s:.1f} s",
            wait_s,
        )

    def count(self, caller: Caller, number: int, now: float) -> None:
        """Counts what the caller uses, even beyond its limit. A negative number takes usage back. Call `check` first,
        at least once for each caller."""
        if known := self._buckets.get(caller.name):
            known[1].spend(number, now)

    def _per_minute(self, caller: Caller) -> int | None:
        return caller.requests_per_minute if self._unit == "requests" else caller.tokens_per_minute


class Concurrency:
    """Counts the unfinished requests of each caller."""

    def __init__(self) -> None:
        self._running: dict[str, int] = {}

    def begin(self, caller: Caller) -> RateLimited | None:
        """Counts one more request of the caller, until `end`. If that would be too many, counts nothing, and returns an
        error."""
        running = self._running.get(caller.name, 0)
        if caller.max_concurrent is not None and running >= caller.max_concurrent:
            return RateLimited(
                f"the key of '{caller.name}' allows {caller.max_concurrent} requests at once, and as many run now; "
                "try again when one of these requests has ended",
                CONCURRENCY_RETRY_S,
            )
        self._running[caller.name] = running + 1
        return None

    def end(self, caller: Caller) -> None:
        """Counts one request less. Call this once for each request that began."""
        self._running[caller.name] -= 1
        if not self._running[caller.name]:
            del self._running[caller.name]
