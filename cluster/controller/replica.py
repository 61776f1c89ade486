"""Replica: a fleet's place for one worker, and when its next incarnation may begin; knows no clock and no process.

PLACING ---> STARTING ---> SERVING ---> DRAINING ---> (gone, or PLACING: its next incarnation)
 ^    |          |            |
 |    v          v            v
 |   BACKING_OFF  or  CRASH_LOOP
 +---------+---------------+

If the node of an incarnation begins to drain before the incarnation serves, the replica is PLACING again.
"""

from collections import deque
from dataclasses import dataclass

from baton.config import ClusterConfig
from baton.fleet import ReplicaDescription, ReplicaState
from baton.worker import WorkerRole

_ENDED = frozenset({ReplicaState.BACKING_OFF, ReplicaState.CRASH_LOOP})

MOVES: dict[ReplicaState, frozenset[ReplicaState]] = {
    ReplicaState.PLACING: _ENDED | {ReplicaState.PLACING, ReplicaState.STARTING},
    ReplicaState.STARTING: _ENDED | {ReplicaState.PLACING, ReplicaState.SERVING},
    ReplicaState.SERVING: _ENDED | {ReplicaState.DRAINING},
    ReplicaState.DRAINING: frozenset({ReplicaState.PLACING}),
    ReplicaState.BACKING_OFF: frozenset({ReplicaState.PLACING}),
    ReplicaState.CRASH_LOOP: frozenset({ReplicaState.PLACING}),
}


class Restarts:
    """Decides after each death how long to wait. Only an incarnation that is stable ends a crash loop.

    If the first two incarnations fail early, the second begins at once, and the third after `restart_delay_s`. From
    the fourth on, each wait is twice as long as the one before.
    """

    def __init__(self, config: ClusterConfig) -> None:
        self._config = config
        self._num_short_incarnations = 0
        self._deaths: deque[float] = deque(maxlen=config.crash_loop_deaths)
        self._is_looping = False

    def died(self, now: float, served_s: float) -> tuple[ReplicaState, float]:
        """BACKING_OFF or CRASH_LOOP, and the seconds until the next incarnation may begin."""
        config = self._config
        if served_s >= config.stable_after_s:
            self._num_short_incarnations, self._is_looping = 0, False
            self._deaths.clear()
            return ReplicaState.BACKING_OFF, 0.0
        self._num_short_incarnations += 1
        self._deaths.append(now)
        is_full = len(self._deaths) == config.crash_loop_deaths
        if self._is_looping or (is_full and now - self._deaths[0] <= config.crash_loop_window_s):
            self._is_looping = True
            return ReplicaState.CRASH_LOOP, config.restart_delay_max_s
        if self._num_short_incarnations == 1:
            return ReplicaState.BACKING_OFF, 0.0
        doublings = min(self._num_short_incarnations - 2, 30)
        return ReplicaState.BACKING_OFF, min(
            config.restart_delay_max_s, config.restart_delay_s * 2.0**doublings
        )


@dataclass(slots=True)
class Replica:
    """The controller's record of one worker, across incarnations."""

    name: str
    role: WorkerRole
    restarts: Restarts
    num_starts: int = 0
    state: ReplicaState = ReplicaState.PLACING
    node: str = ""
    last_failure: str = ""
    next_start_at: float | None = None

    def move(self, state: ReplicaState) -> None:
        """Changes the state. All changes of a replica's state are made here."""
        assert state in MOVES[self.state], f"{self.name}: {self.state} -> {state}"
        if self.state is ReplicaState.DRAINING:
            self.last_failure = ""  # the incarnation ended because a command asked for it
        self.state = state
        if state in (ReplicaState.PLACING, *_ENDED):
            self.node = ""
        if state is ReplicaState.PLACING:
            self.next_start_at = None

    def died(self, now: float, served_s: float, reason: str) -> float:
        """Records that the incarnation failed; returns the seconds until the next one may begin."""
        state, delay_s = self.restarts.died(now, served_s)
        self.move(state)
        self.last_failure = reason
        self.next_start_at = now + delay_s
        return delay_s

    def describe(self, now: float) -> ReplicaDescription:
        return ReplicaDescription(
            name=self.name,
            role=self.role,
            state=self.state,
            node=self.node,
            num_starts=self.num_starts,
            last_failure=self.last_failure,
            next_start_in_s=None if self.next_start_at is None else max(0.0, self.next_start_at - now),
        )
