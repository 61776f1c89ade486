"""Autoscaler: looks at the fleet at a fixed pace, asks the planner, and does what it says, or only tells."""

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from baton.clock import Clock
from baton.config import AutoscalingConfig, BatonConfig
from baton.errors import ClusterError, FleetError
from baton.fleet import GatewayReport, SlotDescription
from baton.system.standstill import Standstill
from baton.worker import WorkerRole
from cluster.controller.observation import merge
from cluster.controller.planner import Decision, Planner, Reason, RoleChange, ScaleDecision

logger = logging.getLogger(__name__)

_STALE_AFTER = 3.0
"""Intervals after which a gateway that is not heard of any more does not count."""
_PACE = 2.0
"""Intervals between two looks of ours beyond which we stood still."""
_MAX_GATEWAYS = 1000
_MAX_DECISIONS = 50


class Scalable(Protocol):
    """Whoever owns the workers' processes; raises FleetError or ClusterError where it cannot do as told."""

    def slots(self) -> Sequence[SlotDescription]: ...

    async def scale(self, role: WorkerRole, count: int) -> None:
        """So many slots there shall be; returns at once. Of too many, those go first in which no worker serves."""
        ...

    async def set_role(self, worker: str, role: WorkerRole) -> None:
        """Returns once the worker serves in its new role."""
        ...


class Autoscaler:
    """One loop; everything belongs to one event loop."""

    def __init__(self, config: BatonConfig, fleet: Scalable, clock: Clock) -> None:
        self._config: AutoscalingConfig = config.autoscaling
        self._fleet = fleet
        self._clock = clock
        self._standstill = Standstill(_PACE * config.autoscaling.interval_s)
        is_alike = len({config.num_ranks(role) for role in WorkerRole}) == 1
        self._planner = Planner(
            config.autoscaling,
            {role: config.worker_bounds(role) for role in WorkerRole},
            may_change_roles=config.autoscaling.may_change_roles and is_alike,
        )
        self._reports: dict[str, tuple[float, GatewayReport]] = {}
        self._decisions: deque[str] = deque(maxlen=_MAX_DECISIONS)
        self._last: tuple[Reason | None, WorkerRole | None] | None = None

    @property
    def decisions(self) -> tuple[str, ...]:
        """The latest, oldest first; of those that change nothing, only where the reason is another than before."""
        return tuple(self._decisions)

    def report(self, report: GatewayReport) -> None:
        """A gateway's word; it counts for three intervals."""
        if report.gateway in self._reports or len(self._reports) < _MAX_GATEWAYS:
            self._reports[report.gateway] = (self._running_s(), report)

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            await asyncio.sleep(self._config.interval_s)
            await self.look()

    async def look(self) -> Decision:
        """Once: observe, decide, act. What is refused is told, and tried again when the load still asks for it."""
        now = self._running_s()
        self._forget_stale(now)
        reports = [report for _, report in self._reports.values()]
        observation = merge(self._fleet.slots(), reports) if reports else None
        decision = self._planner.observe(observation, now)
        self._tell(decision)
        if decision.change is not None and self._config.mode == "on":
            await self._act(decision.change)
        return decision

    def _forget_stale(self, now: float) -> None:
        oldest = now - _STALE_AFTER * self._config.interval_s
        self._reports = {name: entry for name, entry in self._reports.items() if entry[0] >= oldest}

    def _running_s(self) -> float:
        """Time in which this process stood still makes no report older, and no shortage longer."""
        return self._standstill.running(self._clock.now())

    def _tell(self, decision: Decision) -> None:
        kind = (decision.reason, decision.role)
        if decision.change is None and kind == self._last:
            return
        self._last = kind
        is_wish = decision.change is not None and self._config.mode == "dry_run"
        self._note(f"would do: {decision.sentence}" if is_wish else decision.sentence)

    def _note(self, sentence: str) -> None:
        self._decisions.append(sentence)
        logger.info("%s", sentence)

    async def _act(self, change: ScaleDecision | RoleChange) -> None:
        try:
            if isinstance(change, ScaleDecision):
                await self._fleet.scale(change.role, change.count)
                return
            if change.replaces_unplaced:
                count = sum(slot.role is change.role for slot in self._fleet.slots())
                await self._fleet.scale(change.role, count - 1)
            await self._fleet.set_role(change.worker, change.role)
        except (FleetError, ClusterError) as error:
            self._planner.refused(change, self._running_s())
            self._note(f"that came to nothing: {error}")
