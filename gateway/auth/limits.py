"""Limits of each caller's key: how often, and how many at once; pure, time is an argument."""

from baton.errors import RateLimited
from gateway.auth.callers import Caller

CONCURRENCY_RETRY_S = 1.0
"""A guess: when one of a caller's own requests will end is unknown."""


class TokenBucket:
    """Holds up to `capacity` tokens, gains `rate_per_s` of them, and starts full (the leaky bucket as a meter, ITU-T
    I.371)."""

    def __init__(self, rate_per_s: float, capacity: float, now: float) -> None:
        assert rate_per_s > 0.0
        assert capacity >= 1.0
        self._rate_per_s = rate_per_s
        self._capacity = capacity
        self._level = capacity
        self._at = now

    def take(self, now: float) -> float:
        """Takes one token and returns 0. If there is none, takes nothing, and returns the seconds until there will be
        one.
        """
        self._level = min(self._capacity, self._level + (now - self._at) * self._rate_per_s)
        self._at = now
        if self._level >= 1.0 - 1e-9:  # tolerance: a wait as long as this returned must suffice
            self._level = max(0.0, self._level - 1.0)
            return 0.0
        return (1.0 - self._level) / self._rate_per_s


class RequestRates:
    """Every caller's bucket; a caller whose rate changes starts with a full one."""

    def __init__(self) -> None:
        self._buckets: dict[str, tuple[int, TokenBucket]] = {}

    def count(self, caller: Caller, now: float) -> None:
        """Counts one more request of this caller; RateLimited says when it would be admitted."""
        per_minute = caller.requests_per_minute
        if per_minute is None:
            return
        known = self._buckets.get(caller.name)
        if known is None or known[0] != per_minute:
            known = self._buckets[caller.name] = (per_minute, TokenBucket(per_minute / 60.0, per_minute, now))
        wait_s = known[1].take(now)
        if wait_s > 0.0:
            raise RateLimited(
                f"the key of '{caller.name}' allows {per_minute} requests per minute, which are used up; "
                f"try again in {wait_s:.1f} s",
                wait_s,
            )


class Concurrency:
    """Unfinished requests of each caller."""

    def __init__(self) -> None:
        self._running: dict[str, int] = {}

    def begin(self, caller: Caller) -> RateLimited | None:
        """Counts one more request of the caller, until `end`; returns why the caller may not have it."""
        running = self._running.get(caller.name, 0)
        if caller.max_concurrent is not None and running >= caller.max_concurrent:
            return RateLimited(
                f"the key of '{caller.name}' allows {caller.max_concurrent} requests at once, which already run; "
                "try again when one of them has ended",
                CONCURRENCY_RETRY_S,
            )
        self._running[caller.name] = running + 1
        return None

    def end(self, caller: Caller) -> None:
        """Call once for each request that began."""
        self._running[caller.name] -= 1
        if not self._running[caller.name]:
            del self._running[caller.name]
