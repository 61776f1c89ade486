"""World: a heap of events on virtual time, seeded randomness, and a log whose hash identifies the run."""

import hashlib
import heapq
import math
import random
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from baton.clock import VirtualClock

TICK_S = 2.0**-20
"""Durations are multiples of this time. So sums of durations are exact, and deadlines are met exactly."""

MAX_EVENTS = 100_000
"""The most events of a run: many times as many as any seed of the fault simulation needs."""


class Violation(Exception):
    """A promise was broken; `invariant` names it."""

    def __init__(self, invariant: str, message: str) -> None:
        super().__init__(invariant, message)
        self.invariant = invariant

    def __str__(self) -> str:
        return f"{self.invariant}: {self.args[1]}"


class Process:
    """A process that events happen to. It may be stopped, or have ended, when an event is due."""

    incarnation = ""
    is_dead = False
    died_at = 0.0
    """When the process died; only valid once it is dead."""
    paused_until = 0.0
    paused_s = 0.0
    """The total time for which the process was paused."""


@dataclass(slots=True)
class ScheduledEvent:
    action: Callable[[], None]
    process: Process | None
    is_plane: bool


@dataclass(slots=True)
class World:
    """Runs events in the order of their times; events of one time in the order of their creation."""

    seed: int
    is_verbose: bool = False
    max_events: float = MAX_EVENTS
    has_ticks: bool = True
    """Whether the times of events are multiples of TICK_S."""
    now: float = 0.0
    num_events: int = 0
    counts: "Counter[str]" = field(default_factory=Counter)
    """How often each fault and path occurred."""
    accidents: "Counter[tuple[int, ...]]" = field(default_factory=Counter)
    """By prompt: how often a device failed to compute it alone, although the device works before and afterwards."""
    violation: Violation | None = None
    is_calm: bool = False
    """Whether fault injection is over; all activity must then end."""
    after_event: Callable[[], None] = lambda: None
    clocks: list[VirtualClock] = field(default_factory=list)
    rng: random.Random = field(init=False)
    _heap: list[tuple[float, int, ScheduledEvent]] = field(default_factory=list)
    _num_made: int = 0
    _is_nested: bool = False
    _log: hashlib.blake2b = field(default_factory=lambda: hashlib.blake2b(digest_size=16))

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)

    # randomness and time

    def chance(self, probability: float) -> bool:
        return probability > 0.0 and self.rng.random() < probability

    def between(self, low_s: float, high_s: float) -> float:
        """A duration, in whole ticks."""
        return int(self.rng.uniform(low_s, high_s) / TICK_S) * TICK_S

    def clock(self, offset_s: float) -> VirtualClock:
        """A clock of one process. All clocks run equally fast, but from different origins."""
        clock = VirtualClock(offset_s + self.now)
        self.clocks.append(clock)
        return clock

    # events

    def at(
        self,
        when: float,
        action: Callable[[], None],
        process: Process | None = None,
        *,
        is_plane: bool = True,
    ) -> None:
        """Runs `action` at this time. If `process` is paused then, runs `action` when `process` continues. Does nothing
        if `process` is dead. `is_plane`: an event of the planes (messages, reads, timers, devices). Such an event also
        happens while an engine waits for its device.
        """
        if self.has_ticks:
            when = math.ceil(when / TICK_S) * TICK_S
        self._push(max(when, self.now), ScheduledEvent(action, process, is_plane))

    def after(
        self,
        delay_s: float,
        action: Callable[[], None],
        process: Process | None = None,
        *,
        is_plane: bool = True,
    ) -> None:
        self.at(self.now + delay_s, action, process, is_plane=is_plane)

    def run(self, until: float, is_done: Callable[[], bool] = lambda: False) -> None:
        """Runs the events up to this time; raises the first violation."""
        while self._heap and self._heap[0][0] <= until and not is_done():
            self._run_next()
            if self.violation is not None:
                raise self.violation
        if not is_done():
            self._move_to(until)

    def pass_time(self, is_over: Callable[[], bool]) -> None:
        """Lets time pass while an engine waits for its device: only the planes' events happen."""
        was_nested, self._is_nested = self._is_nested, True
        kept: list[tuple[float, int, ScheduledEvent]] = []
        while not is_over() and self._heap and self.violation is None:
            if self._heap[0][2].is_plane:
                self._run_next()
            else:
                kept.append(heapq.heappop(self._heap))
        for entry in kept:
            heapq.heappush(self._heap, entry)
        self._is_nested = was_nested

    def log(self, subject: str, what: str, detail: Callable[[], object] | None = None) -> None:
        """Adds a line; `detail` is called only if the log is printed."""
        line = f"{self.now:.6f} {subject} {what}"
        self._log.update(line.encode())
        if self.is_verbose:
            print(line if detail is None else f"{line} {detail()}")

    def digest(self) -> str:
        return self._log.hexdigest()

    def violate(self, invariant: str, message: str, cause: Exception | None = None) -> None:
        """Records a broken promise, for code in which an exception would be caught. The first broken promise ends the
        run."""
        if self.violation is None:
            self.violation = Violation(invariant, message)
            self.violation.__cause__ = cause

    def _run_next(self) -> None:
        when, _, event = heapq.heappop(self._heap)
        process = event.process
        if process is not None:
            if process.is_dead:
                return
            if process.paused_until > when:
                self._push(process.paused_until, event)
                return
        self._move_to(when)
        self.num_events += 1
        if self.num_events > self.max_events:
            self.violate("comes to rest", f"still busy after {self.num_events} events")
            return
        try:
            event.action()
            if not self._is_nested:
                self.after_event()
        except Violation as violation:
            self.violation = self.violation or violation
        except Exception as error:  # no event may raise
            last = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{last.filename.rpartition('/')[2]}:{last.lineno}"
            self.violate("no exception", f"{type(error).__name__} at {where}: {error}", error)
            if self.is_verbose:
                traceback.print_exc()

    def _push(self, when: float, event: ScheduledEvent) -> None:
        self._num_made += 1
        heapq.heappush(self._heap, (when, self._num_made, event))

    def _move_to(self, when: float) -> None:
        passed = when - self.now
        if passed > 0.0:
            self.now = when
            for clock in self.clocks:
                clock.advance(passed)
