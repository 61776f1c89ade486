"""AvoidedPairs: pairs whose latest hand-over failed on the link, although both workers may be healthy; pure.

    works ---- a hand-over fails on the link ----> avoided for a pause
      ^                                               |
      |                                               v
      +------ it succeeds ------ after a pause, one request tries the pair ------ it fails: the pause doubles

The gateway cannot observe the link between two workers. So only a request can show whether the link works
again.
"""

import logging
from dataclasses import dataclass

from gateway.routing.placement import Pair

logger = logging.getLogger(__name__)

FIRST_PAUSE_S = 30.0
LONGEST_PAUSE_S = 300.0


@dataclass(slots=True)
class _Failure:
    """The latest failure of a pair."""

    at: float
    pause_s: float
    avoided_until: float


class AvoidedPairs:
    """The failed pairs of one gateway. Times must not run backwards."""

    def __init__(self) -> None:
        self._failures: dict[Pair, _Failure] = {}

    def at(self, now: float) -> frozenset[Pair]:
        """Pairs that no request should try now."""
        return frozenset(pair for pair, failure in self._failures.items() if now < failure.avoided_until)

    def placed(self, pair: Pair, now: float) -> None:
        """A request tries the pair. If the pair's pause was over, a new pause begins, so that no other
        request tries the pair."""
        failure = self._failures.get(pair)
        if failure is not None and now >= failure.avoided_until:
            failure.avoided_until = now + failure.pause_s

    def failed(self, pair: Pair, began_at: float, reason: str, now: float) -> None:
        """Records that a hand-over failed on the link. Its attempt began at `began_at`. Attempts that were already
        running at the pair's latest failure are ignored, since they show nothing new."""
        failure = self._failures.get(pair)
        if failure is not None and began_at <= failure.at:
            return
        pause_s = FIRST_PAUSE_S if failure is None else min(2.0 * failure.pause_s, LONGEST_PAUSE_S)
        self._failures[pair] = _Failure(now, pause_s, now + pause_s)
        if failure is None:
            logger.warning("KV cannot be transferred from %s to %s; avoiding this pair: %s", *pair, reason)

    def works(self, pair: Pair) -> None:
        """Records that a hand-over succeeded."""
        if self._failures.pop(pair, None) is not None:
            logger.info("KV can be transferred from %s to %s again; no longer avoiding this pair", *pair)

    def forget(self, worker: str) -> None:
        """Forgets the failures of a worker's pairs. The worker is lost, which explains them, or has a new role."""
        self._failures = {pair: failure for pair, failure in self._failures.items() if worker not in pair}

    def __len__(self) -> int:
        """The number of pairs that have not worked since they failed."""
        return len(self._failures)
