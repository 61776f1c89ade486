"""Tally: what became of the requests that a gateway received; plain counts."""

from collections import Counter

from baton.errors import RequestAborted
from gateway.requests.attempt import Cause
from gateway.requests.record import Outcome

OUTCOMES = ("received", *(outcome.value for outcome in Outcome))


class Tally:
    """received = finished + failed + rejected + aborted + those that wait + those that run, at every moment.

    `rejected` never had a worker; `failed` had one; `aborted` were ended by their clients, by name or by leaving, or
    by their deadline.
    """

    def __init__(self) -> None:
        self.paths: Counter[str] = Counter(disaggregated=0, local=0, fallback=0)
        """Finished requests by the path they really took."""
        self._counts: Counter[str] = Counter(dict.fromkeys(OUTCOMES, 0))
        self._counts.update({f"migrated_{cause.value}": 0 for cause in Cause})

    def received(self) -> None:
        self._counts["received"] += 1

    def finished(self, path: str, reason: str) -> None:
        """Which way it really took, and why, if there is more to say."""
        self.paths[path] += 1
        self._counts["finished"] += 1
        if reason:
            self._counts[f"finished_{path}: {reason}"] += 1

    def ended(self, error: BaseException, *, was_placed: bool) -> Outcome:
        """It came to an end without an answer."""
        if not isinstance(error, Exception) or isinstance(error, RequestAborted):
            outcome = Outcome.ABORTED
        else:
            outcome = Outcome.FAILED if was_placed else Outcome.REJECTED
        self._counts[outcome.value] += 1
        return outcome

    def migrated(self, cause: Cause) -> None:
        """An attempt ended so, and the request goes on with another one."""
        self._counts[f"migrated_{cause.value}"] += 1

    @property
    def counters(self) -> dict[str, int]:
        """Monotonic, for metrics and tests."""
        return dict(self._counts)
