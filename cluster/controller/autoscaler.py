"""Autoscaler: observes the fleet at a fixed pace, asks the planner, and carries out or only logs the decisions."""

import asyncio
import logging
from collections import deque
from collections.abc import Collection, Sequence
from typing import Protocol

from baton.clock import Clock
from baton.config import AutoscalingConfig
from baton.errors import ClusterError, FleetError
from baton.fleet import GatewayReport, ReplicaDescription, ReplicaState
from baton.system.standstill import Standstill
from baton.worker import WorkerRole
from cluster.controller.observation import merge
from cluster.controller.planner import Bounds, Decision, NoChange, Planner, RoleChange, ScaleDecision

logger = logging.getLogger(__name__)

_STALE_AFTER = 3.0
"""The report of a silent gateway no longer counts after this many intervals."""
_PACE = 2.0
"""Two decisions are at most this many intervals apart; a longer gap is a standstill of this process."""
_MAX_GATEWAYS = 1000
_MAX_DECISIONS = 50
_GRACE = 2.0
"""A planner that still has a wish repeats it within this many intervals after the longest cool-down."""


class ScaledFleet(Protocol):
    """What an autoscaler observes and changes. A change that fails raises FleetError or ClusterError."""

    def replicas_to_scale(self) -> Sequence[ReplicaDescription]:
        """All replicas. A worker that changes its role is described as starting in its new role."""
        ...

    @property
    def leaving(self) -> Collection[str]:
        """Names of the replicas that drain for good. `scale` does not count these."""
        ...

    async def scale(self, role: WorkerRole, count: int) -> None: ...

    async def set_role(self, worker: str, role: WorkerRole) -> None: ...


class Autoscaler:
    """Decides again and again, and carries out what is decided. All methods belong to one event loop."""

    def __init__(
        self,
        config: AutoscalingConfig,
        bounds: Bounds,
        has_equal_ranks: bool,
        clock: Clock,
        fleet: ScaledFleet,
    ) -> None:
        """`has_equal_ranks`: workers of both roles have the same number of ranks, so roles may change."""
        self._config = config
        self._clock = clock
        self._fleet = fleet
        self._standstill = Standstill(_PACE * config.interval_s)
        self._planner = Planner(config, bounds, config.may_change_roles and has_equal_ranks)
        self._reports: dict[str, tuple[float, GatewayReport]] = {}
        self._log = DecisionLog(config)

    @property
    def decisions(self) -> tuple[str, ...]:
        """The latest decisions, oldest first, without repetitions."""
        return self._log.sentences

    def report(self, report: GatewayReport) -> None:
        """Stores a gateway's report. The report counts for three intervals."""
        if report.gateway in self._reports or len(self._reports) < _MAX_GATEWAYS:
            self._reports[report.gateway] = (self._running_s(), report)

    async def run(self) -> None:
        """Decides at a fixed pace until cancelled. A decision does not wait for former changes, which may take long."""
        async with asyncio.TaskGroup() as changes:
            while True:
                await asyncio.sleep(self._config.interval_s)
                try:
                    decision = self._decide()
                except Exception:  # the next decision may succeed
                    logger.exception("a decision failed unexpectedly")
                    continue
                changes.create_task(self._carry_out(decision))

    async def decide_once(self) -> Decision:
        """Decides once, and returns when the change is carried out."""
        decision = self._decide()
        await self._carry_out(decision)
        return decision

    def _decide(self) -> Decision:
        now = self._running_s()
        self._forget_stale(now)
        reports = [report for _, report in self._reports.values()]
        observation = (
            merge(self._fleet.replicas_to_scale(), reports, self._fleet.leaving) if reports else None
        )
        decision = self._planner.observe(observation, now)
        if (sentence := self._log.decided(decision, now)) is not None:
            logger.info("%s", sentence)
        return decision

    async def _carry_out(self, decision: Decision) -> None:
        if decision.change is not None and self._config.mode == "on":
            await self._act(decision.change)

    def _forget_stale(self, now: float) -> None:
        oldest = now - _STALE_AFTER * self._config.interval_s
        self._reports = {name: entry for name, entry in self._reports.items() if entry[0] >= oldest}

    def _running_s(self) -> float:
        """The time without this process's standstills, which make no report older and no shortage longer."""
        return self._standstill.running(self._clock.now())

    async def _act(self, change: ScaleDecision | RoleChange) -> None:
        """Carries out a change. If this fails, logs the failure; the planner decides the change again if the load still
        needs it."""
        try:
            if isinstance(change, ScaleDecision):
                await self._fleet.scale(change.role, change.count)
                return
            await self._fleet.set_role(change.worker, change.role)
            if change.replaces_unplaced:  # afterwards: the fleet keeps its last decode replica, placed or not
                await self._remove_unplaced(change.role)
        except Exception as error:  # an error must not end later decisions or other changes
            if not isinstance(error, FleetError | ClusterError):
                logger.exception("a change failed unexpectedly")
            self._planner.refused(change, self._running_s())
            logger.info("%s", self._log.note(f"the change failed: {error}"))

    async def _remove_unplaced(self, role: WorkerRole) -> None:
        """Removes a replica of this role that still waits for a node with room, if there is one."""
        leaving = self._fleet.leaving
        states = [
            r.state for r in self._fleet.replicas_to_scale() if r.role is role and r.name not in leaving
        ]
        if ReplicaState.PLACING in states:
            await self._fleet.scale(role, len(states) - 1)


class DecisionLog:
    """The latest decisions as sentences, without repetitions; pure.

    A reason why nothing changes is noted when it is new. A dry run carries nothing out, so its planner decides the
    same again after each cool-down. Such a decision is called a wish. A wish is noted only once as long as it stays the
    same.
    """

    def __init__(self, config: AutoscalingConfig) -> None:
        self._is_dry_run = config.mode == "dry_run"
        self._wish_lasts_s = (
            max(config.grow_cooldown_s, config.shrink_cooldown_s) + _GRACE * config.interval_s
        )
        self._sentences: deque[str] = deque(maxlen=_MAX_DECISIONS)
        self._last: tuple[NoChange | None, WorkerRole | None] | None = None
        self._wishes: dict[WorkerRole, tuple[object, float]] = {}
        """By role, the change that a dry run would make, and when the planner last decided so."""

    @property
    def sentences(self) -> tuple[str, ...]:
        """The latest decisions as sentences, oldest first."""
        return tuple(self._sentences)

    def note(self, sentence: str) -> str:
        self._sentences.append(sentence)
        return sentence

    def decided(self, decision: Decision, now: float) -> str | None:
        """Notes and returns the decision's sentence; None if it says nothing new."""
        if self._is_dry_run and decision.change is not None:
            return self._note_wish(decision, decision.change, now)
        if decision.no_change is not None and not self._is_new(decision, decision.no_change):
            return None
        self._last = (decision.no_change, decision.role)
        return self.note(decision.sentence)

    def _note_wish(self, decision: Decision, change: ScaleDecision | RoleChange, now: float) -> str | None:
        # Two changes of role to the same role count as equal: which worker would change may vary between decisions.
        what = change if isinstance(change, ScaleDecision) else RoleChange
        former, noted_at = self._wishes.get(change.role, (None, now))
        self._wishes[change.role] = (what, now)
        if what == former and now - noted_at <= self._wish_lasts_s:
            return None
        self._last = (None, change.role)
        return self.note(f"would do: {decision.sentence}")

    def _is_new(self, decision: Decision, no_change: NoChange) -> bool:
        if decision.role in self._wishes:
            if no_change is NoChange.COOLING:
                return False  # nothing new: the cool-down follows a change that was not made
            if no_change is NoChange.NOT_YET:
                del self._wishes[decision.role]  # the role was not short then, so its next wish is new
        return (no_change, decision.role) != self._last
