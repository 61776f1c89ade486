"""Follows a fleet: passes on each view, and makes a gateway's workers match the latest view."""

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from baton.errors import ClusterError, FleetEnded
from baton.fleet import FleetView, GatewayReport
from baton.messages.control import ControlApi, ReportLoad, WaitView
from baton.worker import WorkerEndpoint

logger = logging.getLogger(__name__)

POLL_S = 5.0
"""How long one WaitView waits for a change."""
RETRY_S = 1.0


class Registry(Protocol):
    """The part of a gateway that connects to workers."""

    def add_worker(self, endpoint: WorkerEndpoint) -> None: ...

    def remove_worker(self, name: str) -> None:
        """Removes a worker that left as planned."""
        ...

    def worker_died(self, name: str, reason: str) -> None:
        """Removes a worker that was lost."""
        ...


async def keep_reporting(control: ControlApi, report: Callable[[], GatewayReport], interval_s: float) -> None:
    """Sends a gateway's reports at a fixed pace until cancelled. A report that cannot be sent is dropped."""
    while True:
        await asyncio.sleep(interval_s)
        try:
            await control.call(ReportLoad(report()))
        except ClusterError as error:
            logger.debug("dropped a report: %s", error)


class ViewFollower:
    """Calls `on_view` with each answer to a WaitView. Retries while the controller is unreachable."""

    def __init__(self, control: ControlApi, on_view: Callable[[FleetView], None]) -> None:
        self._control = control
        self._on_view = on_view
        self._view = FleetView("", -1, ())

    async def run(self) -> None:
        """Runs until cancelled. Raises FleetEnded."""
        complaint = ""
        while True:
            try:
                await self.catch_up(POLL_S)
                complaint = ""
            except FleetEnded:
                raise
            except ClusterError as error:
                if str(error) != complaint:  # else it would be logged every second
                    complaint = str(error)
                    logger.warning("controller unreachable; keeping the last known worker list: %s", error)
                await asyncio.sleep(RETRY_S)

    async def catch_up(self, wait_s: float) -> FleetView:
        """The next view, or the present one if nothing has changed within `wait_s`."""
        known = self._view
        request = WaitView(known.controller_incarnation, known.version, wait_s)
        self._view = await self._control.call(request)
        self._on_view(self._view)
        return self._view


class ViewedWorkers:
    """Adds and removes a gateway's workers. A new incarnation of a worker replaces the former one."""

    def __init__(self, registry: Registry, *, is_beside_controller: bool) -> None:
        """`is_beside_controller`: the controller is in this process, and logs deaths itself."""
        self._registry = registry
        self._is_beside_controller = is_beside_controller
        self._known: dict[str, WorkerEndpoint] = {}

    def apply(self, view: FleetView) -> None:
        reasons = dict(view.deaths)
        present = {endpoint.ref.name: endpoint for endpoint in view.endpoints}
        for name, known in self._known.items():
            reason = reasons.get(known.ref.incarnation)
            if reason is not None:
                if not self._is_beside_controller:
                    extra = {"worker": name}
                    logger.error("worker %s (%s) died: %s", name, known.role.value, reason, extra=extra)
                self._registry.worker_died(name, reason)
            elif name not in present:
                self._registry.remove_worker(name)
        for name, endpoint in present.items():
            former = self._known.get(name)
            if former is None or former.ref != endpoint.ref:
                self._registry.add_worker(endpoint)
        self._known = present
