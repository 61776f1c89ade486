"""Slot: one worker that there is to be, life after life, and when the next may begin; no clock, no process.

PLACING ---> STARTING ---> SERVING ---> DRAINING ---> (gone, or PLACING: its next life)
 ^    |          |            |
 |    v          v            v
 |   BACKING_OFF  or  CRASH_LOOP
 +---------+---------------+
"""

from collections import deque
from dataclasses import dataclass, field

from baton.fleet import SlotDescription, SlotState
from baton.worker import WorkerRole

_ENDED = frozenset({SlotState.BACKING_OFF, SlotState.CRASH_LOOP})

MOVES: dict[SlotState, frozenset[SlotState]] = {
    SlotState.PLACING: _ENDED | {SlotState.STARTING},
    SlotState.STARTING: _ENDED | {SlotState.SERVING},
    SlotState.SERVING: _ENDED | {SlotState.DRAINING},
    SlotState.DRAINING: frozenset({SlotState.PLACING}),
    SlotState.BACKING_OFF: frozenset({SlotState.PLACING}),
    SlotState.CRASH_LOOP: frozenset({SlotState.PLACING}),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """How soon a dead worker is replaced. Times are in seconds."""

    delay_s: float
    """Before the third life in a row that does not last. The second begins at once, later ones wait twice as long."""
    longest_delay_s: float
    crash_loop_deaths: int
    """So many deaths within `crash_loop_window_s` are a crash loop."""
    crash_loop_window_s: float
    stable_after_s: float
    """A life that served this long makes its predecessors forgotten."""


class Restarts:
    """Decides, death by death, how long to wait. Once in a crash loop, only a life that lasts leads out of it."""

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self._num_short_lives = 0
        self._deaths: deque[float] = deque(maxlen=policy.crash_loop_deaths)
        self._is_looping = False

    def died(self, now: float, served_s: float) -> tuple[SlotState, float]:
        """BACKING_OFF or CRASH_LOOP, and the seconds until the next life may begin."""
        policy = self._policy
        if served_s >= policy.stable_after_s:
            self._num_short_lives, self._is_looping = 0, False
            self._deaths.clear()
        self._num_short_lives += 1
        self._deaths.append(now)
        is_full = len(self._deaths) == policy.crash_loop_deaths
        if self._is_looping or (is_full and now - self._deaths[0] <= policy.crash_loop_window_s):
            self._is_looping = True
            return SlotState.CRASH_LOOP, policy.longest_delay_s
        if self._num_short_lives == 1:
            return SlotState.BACKING_OFF, 0.0
        doublings = min(self._num_short_lives - 2, 30)
        return SlotState.BACKING_OFF, min(policy.longest_delay_s, policy.delay_s * 2.0**doublings)


@dataclass(slots=True)
class Slot:
    """What the controller remembers of one worker from life to life."""

    name: str
    role: WorkerRole
    restarts: Restarts
    num_starts: int = 0
    state: SlotState = SlotState.PLACING
    node: str = ""
    last_failure: str = ""
    next_start_at: float | None = field(default=None)

    def move(self, state: SlotState) -> None:
        """The one place where a slot changes its state."""
        assert state in MOVES[self.state], f"{self.name}: {self.state} -> {state}"
        if self.state is SlotState.DRAINING:
            self.last_failure = ""  # this life ended as asked
        self.state = state
        if state in (SlotState.PLACING, *_ENDED):
            self.node = ""
        if state is SlotState.PLACING:
            self.next_start_at = None

    def died(self, now: float, served_s: float, reason: str) -> float:
        """Its life ended unasked; seconds until the next one may begin."""
        state, delay_s = self.restarts.died(now, served_s)
        self.move(state)
        self.last_failure = reason
        self.next_start_at = now + delay_s
        return delay_s

    def describe(self, now: float) -> SlotDescription:
        return SlotDescription(
            name=self.name,
            role=self.role,
            state=self.state,
            node=self.node,
            num_starts=self.num_starts,
            last_failure=self.last_failure,
            next_start_in_s=None if self.next_start_at is None else max(0.0, self.next_start_at - now),
        )
