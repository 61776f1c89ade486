"""RoleWatch: measures how long one role has been short of workers, or has had too many; pure, and decides nothing.

    worst signal / its target
      |            _____
    1 |- - - - - -/- - -\\- - - - - - - - - -  missed for `grow_after_s`: short
      |          /       \\
  0.8 |- - - - -/- - - - -\\- - - - - - - - -  between the two lines nothing changes
      |________/           \\______________    below for `shrink_after_s`, and the work of that time fits on
      +---------------------------------- t    one worker fewer: one worker is spare

The watch learns whether the work fits. A role that was short remembers the work of each worker at that time. No worker
is spare as long as each of the other workers would have more than 0.7 of that work. Requests change over time, so the
limit is raised with each hour, by the factor 1 / 0.7.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from baton.config import AutoscalingConfig
from baton.worker import WorkerRole, WorkerStatus
from cluster.controller.load_signals import Signal, percent
from cluster.controller.observation import Observation, ObservedWorker

CALM = 0.8
ROOM_TO_SPARE = 0.7
FADE_S = 3600.0
_MAX_SAMPLES = 10_000


@dataclass(frozen=True, slots=True)
class Shortage:
    """How long the role has missed its targets, and the worst signal now."""

    worst: Signal
    lasted_s: float


@dataclass(frozen=True, slots=True)
class _Work:
    """The work of a role at one moment, over all its workers."""

    at: float
    amount: float
    blocks_used: float
    """KV blocks in use by decode workers, counted in workers: 1.0 means all blocks of one worker."""


class RoleWatch:
    """The watch of one role. Call `note` with every observation, in chronological order."""

    def __init__(self, config: AutoscalingConfig, role: WorkerRole) -> None:
        self._config = config
        self._role = role
        self._missed_since: float | None = None
        self._calm_since: float | None = None
        self.worst: Signal | None = None
        """The signal nearest to its target or furthest above it; None without signals."""
        self._now = 0.0
        self._work: deque[_Work] = deque(maxlen=_MAX_SAMPLES)
        self._earlier: deque[tuple[float, dict[str, float]]] = deque(maxlen=_MAX_SAMPLES)
        self._limit: tuple[float, float] | None = None
        """The work of each worker when the role was last short, and the time of that shortage."""

    def note(
        self, observation: Observation, signals: list[Signal], now: float, of_fewer: Sequence[Signal] = ()
    ) -> None:
        """Adds an observation. `of_fewer`: see `signals_of_fewer`. They never count as a shortage, but the role is calm
        only while they, too, are below CALM."""
        self._now = now
        self.worst = max(signals, key=lambda signal: signal.ratio, default=None)
        ratio = self.worst.ratio if self.worst else 0.0
        is_complete = all(_is_known(worker) for worker in observation.serving(self._role))
        self._missed_since = held_since(self._missed_since, ratio > 1.0, now)
        is_calm = is_complete and all(signal.ratio < CALM for signal in (*signals, *of_fewer))
        self._calm_since = held_since(self._calm_since, is_calm, now)
        self._work.append(self._work_now(observation, now))
        while self._work[0].at < now - self._config.shrink_after_s:
            self._work.popleft()
        self._earlier.append((now, {signal.what: signal.value for signal in signals}))
        while self._earlier[0][0] < now - self._config.grow_after_s:
            self._earlier.popleft()

    def report_missing(self) -> None:
        """Call it if there is no report of the fleet. All durations then begin anew with the next observation."""
        self._missed_since = self._calm_since = None

    def remember_overload(self, num_serving: int) -> None:
        """Records that the recent work was too much for these workers."""
        amount, _ = self._mean(self._config.grow_after_s)
        if num_serving and amount:
            self._limit = (amount / num_serving, self._now)

    @property
    def shortage(self) -> Shortage | None:
        """The present shortage; None if no target is missed."""
        if self._missed_since is None or self.worst is None:
            return None
        return Shortage(self.worst, self._now - self._missed_since)

    def calm_for(self) -> float:
        """Seconds for which all targets have been met with room to spare."""
        return 0.0 if self._calm_since is None else self._now - self._calm_since

    def falls_from(self) -> float | None:
        """The value that the present worst signal had `grow_after_s` ago, if its value has fallen by more than a tenth
        since; else None."""
        if self.worst is None:
            return None
        before = self._earlier[0][1].get(self.worst.what, 0.0)
        return before if self.worst.value < 0.9 * before else None

    def utilization(self, num_serving: int) -> float:
        """The share of the last `grow_after_s` in which prefill workers had work; 1.0 if none serves."""
        return self._mean(self._config.grow_after_s)[0] / num_serving if num_serving else 1.0

    def fewer_suffice(self, num_workers: int, over_s: float) -> str | None:
        """The load of each worker, in words, if `num_workers` workers did the work of the last `over_s` seconds.

        None if they could not do this work, or if a target was nearly missed in that time.
        """
        if self.calm_for() < over_s:
            return None
        amount, blocks = self._mean(over_s)
        if num_workers == 0:
            return "there was no work" if amount == 0.0 else None
        each, use = amount / num_workers, blocks / num_workers
        if each > self._bearable():
            return None
        target = self._config.target_block_use
        if target is not None and use > ROOM_TO_SPARE * target:
            return None
        noun = "1 worker" if num_workers == 1 else f"{num_workers} workers"
        if self._role is WorkerRole.PREFILL:
            return f"{noun} would be {percent(each)} busy"
        return f"{noun} would decode {each:.0f} tokens/s{'' if num_workers == 1 else ' each'}"

    def _work_now(self, observation: Observation, now: float) -> _Work:
        """For prefill workers, how many of them have requests; for decode workers, their tokens/s.

        The mean number of prefill workers that have requests, divided by the number of workers, is the utilization. The
        number of running requests does not measure work: slower workers have more running requests.
        """
        serving = observation.serving(self._role)
        statuses = [worker.status for worker in serving if worker.status is not None]
        if self._role is WorkerRole.PREFILL:
            return _Work(now, float(sum(worker.num_requests > 0 for worker in serving)), 0.0)
        used = sum(1.0 - s.kv_blocks.free / s.kv_blocks.total for s in statuses if s.kv_blocks.total)
        return _Work(now, sum(_tokens_per_s(status) for status in statuses), used)

    def _bearable(self) -> float:
        """The most work that one worker of this role may have. Without a known limit, this is infinite for decode
        workers."""
        at_most = ROOM_TO_SPARE if self._role is WorkerRole.PREFILL else float("inf")
        if self._limit is None:
            return at_most
        limit, since = self._limit
        # After 1,990 hours, the power would be too large for a float.
        num_hours = min(int((self._now - since) / FADE_S), 1000)
        return min(at_most, limit * ROOM_TO_SPARE ** (1 - num_hours))

    def _mean(self, over_s: float) -> tuple[float, float]:
        recent = [work for work in self._work if work.at >= self._now - over_s]
        amount = sum(work.amount for work in recent) / len(recent)
        return amount, sum(work.blocks_used for work in recent) / len(recent)


def _tokens_per_s(status: WorkerStatus) -> float:
    return status.num_decoding / status.load.decode_step_s if status.load.decode_step_s else 0.0


def _is_known(worker: ObservedWorker) -> bool:
    """Whether the worker's status is recent and has its measurements."""
    status = worker.status
    if status is None:
        return False
    is_decoding = status.role is WorkerRole.DECODE and status.requests.running > 0
    return not is_decoding or status.load.decode_step_s > 0.0


def held_since(since: float | None, holds: bool, now: float) -> float | None:
    """Since when a condition has held; None if it does not hold now. `since`: the result of the last call."""
    if not holds:
        return None
    return now if since is None else since
