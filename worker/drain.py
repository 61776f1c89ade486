"""DrainState: how a worker leaves its role, for good or for the other role; knows no request and no clock.

               time is up: remaining               nothing remains to lose: it is drained,
               requests are given back             or serves in its new role
FINISHING ------------------------------> ENDING --------------------------------------> OVER
    |                                       |                                             ^
    |                                       | the leases' time is up, too: it is drained  |
    |                                       | with a loss, or serves in its old role      |
    |                                       +---------------------------------------------+
    +-- nothing remains to lose --------------------------------------------------------->+
"""

from concurrent.futures import Future
from enum import Enum

from baton.worker import KVBlockCounts, RequestCounts, WorkerRole
from worker.role import Role

ANSWER_TIMEOUT_S = 2.0
"""After the last deadline, the engine has this time to finish its step, and then as much time again to report."""


def longest_drain_s(timeout_s: float, lease_s: float) -> float:
    """After this time, a worker has answered a drain or a change of role, whatever its engine does."""
    return timeout_s + lease_s + 2 * ANSWER_TIMEOUT_S


class DrainStage(Enum):
    """The stages of a drain. New requests are refused in all of them."""

    FINISHING = "finishing"
    """Requests have time to end by themselves."""
    ENDING = "ending"
    """All requests have ended or were given back. The drain waits for the end of transfers and leases."""
    OVER = "over"


LEGAL_MOVES = {
    DrainStage.FINISHING: {DrainStage.ENDING, DrainStage.OVER},
    DrainStage.ENDING: {DrainStage.OVER},
    DrainStage.OVER: set[DrainStage](),
}


class DrainState:
    """A drain or a change of role. Only the engine's thread changes this state; any thread may wait for `outcome`.

    Times are the caller's, in seconds.
    """

    def __init__(self, target: Role | None, now: float, timeout_s: float, lease_s: float) -> None:
        """`target`: the next role, or None if the worker is drained for good.

        After `timeout_s`, leases have `lease_s` more to end.
        """
        self.target = target
        self.stage = DrainStage.FINISHING
        self.is_clean = False
        """Whether the drain ended in time, with nothing that could be lost; known when the drain is over."""
        self.outcome: Future[bool] = Future()
        """The value of `is_clean`, once the engine serves in the resulting role."""
        self.give_back_at = now + timeout_s
        self.give_up_at = self.give_back_at + lease_s
        self.obstacle = ""
        """What remained when the drain ended, in words."""
        self.refusal: str | None = None
        """Why the drain could not begin."""
        self._attached: list[DrainState] = []

    @property
    def doing(self) -> str:
        """What the worker does meanwhile, in words."""
        return "is draining" if self.target is None else f"is changing to a {self.target.kind.value} worker"

    @property
    def abandoned_at(self) -> float:
        """From this time on, a change of role fails even if the worker is drained: its caller stops waiting soon."""
        return self.give_up_at + ANSWER_TIMEOUT_S

    def may_attach(self, other: "DrainState") -> bool:
        """Whether `other` can get the outcome of this drain: both have the same target, and this drain is not over."""
        return self.stage is not DrainStage.OVER and self._next_kind is other._next_kind

    def attach(self, other: "DrainState") -> None:
        """Gives `other` the outcome of this drain, which now keeps the earlier deadlines of the two drains."""
        self.give_back_at = min(self.give_back_at, other.give_back_at)
        self.give_up_at = min(self.give_up_at, other.give_up_at)
        self._attached.append(other)

    def refuse(self, reason: str) -> None:
        """Ends the drain before it begins."""
        self.refusal = reason
        self.outcome.set_result(False)

    def next_deadline(self) -> float | None:
        """The time to call `advance` even if nothing happens."""
        times = {DrainStage.FINISHING: self.give_back_at, DrainStage.ENDING: self.give_up_at}
        return times.get(self.stage)

    def advance(self, now: float, is_drained: bool) -> DrainStage | None:
        """Advances by at most one stage and returns the new one. `is_drained`: see `Role.is_drained`."""
        if self.stage is DrainStage.OVER:
            return None
        is_abandoned = self.target is not None and now >= self.abandoned_at
        if is_drained and not is_abandoned:
            return self._end(True)
        if self.stage is DrainStage.FINISHING and now >= self.give_back_at:
            return self._move_to(DrainStage.ENDING)
        if now >= self.give_up_at:
            return self._end(False)
        return None

    def report_outcome(self) -> None:
        """Completes `outcome`, also of the drains that were attached to this one."""
        for each in (self, *self._attached):
            each.obstacle = self.obstacle
            each.outcome.set_result(self.is_clean)

    @property
    def _next_kind(self) -> WorkerRole | None:
        return None if self.target is None else self.target.kind

    def _end(self, is_clean: bool) -> DrainStage:
        self.is_clean = is_clean
        return self._move_to(DrainStage.OVER)

    def _move_to(self, stage: DrainStage) -> DrainStage:
        assert stage in LEGAL_MOVES[self.stage], f"{self.stage} -> {stage}"
        self.stage = stage
        return stage


def what_remains(requests: RequestCounts, blocks: KVBlockCounts) -> str:
    """Everything that a drain of this worker would still wait for, in words; empty if there is nothing."""
    counts = {
        "requests run": requests.running,
        "requests wait": requests.waiting,
        "requests wait for KV": requests.waiting_for_remote_kvs,
        "blocks are leased": blocks.leased,
        "blocks are quarantined": blocks.quarantined,
    }
    return ", ".join(f"{count} {what}" for what, count in counts.items() if count)
