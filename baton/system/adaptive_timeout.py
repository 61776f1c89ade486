"""AdaptiveTimeout: how long a peer may be silent before it counts as lost, learned from its own pauses; pure."""

_LEAST = 0.4
"""The shortest limit, as a part of the longest."""
_TIMES_THE_LONGEST = 3.0
"""A peer may be silent for this many times its longest recent pause."""
_WINDOW_S = 30.0
"""A pause counts as recent for one to two windows."""


class AdaptiveTimeout:
    """The limit for one peer, which must send messages all the time.

    The caller passes all times, in seconds, without its own standstills. On a busy machine, most pauses of a
    healthy peer are short and a few are very long. So the limit depends on the longest pause, not on a mean and
    a deviation as in phi-accrual detectors.
    """

    def __init__(self, timeout_s: float) -> None:
        """No limit is above `timeout_s`, and none below 2/5 of it."""
        self._timeout_s = timeout_s
        self._heard_since: float | None = None
        self._window_began_at = 0.0
        self._longest_s = self._former_longest_s = 0.0

    @property
    def least_s(self) -> float:
        """The shortest limit."""
        return _LEAST * self._timeout_s

    def on_message(self, pause_s: float, now: float) -> None:
        """The peer has sent something, after a pause of `pause_s`.

        A pause above the timeout says nothing about later pauses: the peer was stopped or unreachable.
        """
        if self._heard_since is None:
            self._heard_since = self._window_began_at = now
        elif now - self._window_began_at > _WINDOW_S:
            self._former_longest_s, self._longest_s, self._window_began_at = self._longest_s, 0.0, now
        if pause_s <= self._timeout_s:
            self._longest_s = max(self._longest_s, pause_s)

    def limit_s(self, now: float) -> float:
        """How long the peer may be silent. For a new peer, that is the whole timeout."""
        if self._heard_since is None or now - self._heard_since <= self._timeout_s:
            return self._timeout_s
        learned_s = _TIMES_THE_LONGEST * max(self._longest_s, self._former_longest_s)
        return min(self._timeout_s, max(self.least_s, learned_s))
