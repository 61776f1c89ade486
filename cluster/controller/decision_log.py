"""DecisionLog: the latest decisions as sentences, without repetitions; pure.

A reason why nothing changes is noted when it is new. A dry run carries nothing out, so its planner decides the same
again after each cool-down. Such a wish is noted once while it stays the same.
"""

from collections import deque

from baton.config import AutoscalingConfig
from baton.worker import WorkerRole
from cluster.controller.planner import Decision, Reason, RoleChange, ScaleDecision

_MAX_DECISIONS = 50
_GRACE = 2.0
"""Intervals after the longest cool-down in which the planner repeats a wish that it still has."""


class DecisionLog:
    def __init__(self, config: AutoscalingConfig) -> None:
        self._is_dry_run = config.mode == "dry_run"
        self._wish_lasts_s = (
            max(config.grow_cooldown_s, config.shrink_cooldown_s) + _GRACE * config.interval_s
        )
        self._sentences: deque[str] = deque(maxlen=_MAX_DECISIONS)
        self._last: tuple[Reason | None, WorkerRole | None] | None = None
        self._wishes: dict[WorkerRole, tuple[object, float]] = {}
        """By role, the change that a dry run would make, and when the planner last decided so."""

    @property
    def sentences(self) -> tuple[str, ...]:
        """The latest sentences, oldest first."""
        return tuple(self._sentences)

    def note(self, sentence: str) -> str:
        self._sentences.append(sentence)
        return sentence

    def decided(self, decision: Decision, now: float) -> str | None:
        """Notes and returns the decision's sentence; None if it says nothing new."""
        if self._is_dry_run and decision.change is not None:
            return self._wish(decision, decision.change, now)
        if decision.reason is not None and not self._is_new(decision, decision.reason):
            return None
        self._last = (decision.reason, decision.role)
        return self.note(decision.sentence)

    def _wish(self, decision: Decision, change: ScaleDecision | RoleChange, now: float) -> str | None:
        # Which worker would change its role may vary from one look to the next.
        what = change if isinstance(change, ScaleDecision) else RoleChange
        former, noted_at = self._wishes.get(change.role, (None, now))
        self._wishes[change.role] = (what, now)
        if what == former and now - noted_at <= self._wish_lasts_s:
            return None
        self._last = (None, change.role)
        return self.note(f"would do: {decision.sentence}")

    def _is_new(self, decision: Decision, reason: Reason) -> bool:
        if decision.role in self._wishes:
            if reason is Reason.COOLING:
                return False  # the cool-down of a change that was not made
            if reason is Reason.NOT_YET:
                del self._wishes[decision.role]  # the role was not short in between
        return (reason, decision.role) != self._last
