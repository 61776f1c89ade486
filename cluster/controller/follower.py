"""Follower: keeps a gateway's workers those of the fleet; while the controller is away, what is known stays."""

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from baton.errors import ClusterError, FleetEnded
from baton.fleet import FleetView, GatewayReport
from baton.worker import WorkerEndpoint

logger = logging.getLogger(__name__)

POLL_S = 5.0
"""How long a question for news waits for it."""
RETRY_S = 1.0


class ViewSource(Protocol):
    """A controller, or a handle to one."""

    async def next_view(self, controller_incarnation: str, version: int, timeout_s: float) -> FleetView: ...


class Registry(Protocol):
    """Who wants to know the workers: the gateway."""

    def add_worker(self, endpoint: WorkerEndpoint) -> None: ...

    def remove_worker(self, name: str, reason: str) -> None: ...


class ReportSink(Protocol):
    """A controller, or a handle to one."""

    async def report(self, report: GatewayReport) -> None: ...


async def keep_reporting(sink: ReportSink, report: Callable[[], GatewayReport], interval_s: float) -> None:
    """Tells what a gateway saw, at a fixed pace, until it is cancelled. A report that nobody takes is dropped."""
    while True:
        await asyncio.sleep(interval_s)
        try:
            await sink.report(report())
        except ClusterError as error:
            logger.debug("nobody takes a report: %s", error)


class Follower:
    """Asks for news again and again. A worker of a new incarnation replaces the one of its name."""

    def __init__(self, source: ViewSource, registry: Registry) -> None:
        self._source = source
        self._registry = registry
        self._known: dict[str, WorkerEndpoint] = {}
        self._view = FleetView("", -1, ())

    async def run(self) -> None:
        """Until it is cancelled. Raises FleetEnded."""
        complaint = ""
        while True:
            try:
                await self.catch_up(POLL_S)
                complaint = ""
            except FleetEnded:
                raise
            except ClusterError as error:
                if str(error) != complaint:  # else it would be said every second
                    complaint = str(error)
                    logger.warning(
                        "nobody tells which workers there are, so those that are known stay: %s", error
                    )
                await asyncio.sleep(RETRY_S)

    async def catch_up(self, timeout_s: float) -> tuple[WorkerEndpoint, ...]:
        """Takes in the next news, or that there was none in this time; who serves."""
        view = self._view
        self._view = await self._source.next_view(view.controller_incarnation, view.version, timeout_s)
        self._apply(self._view)
        return self._view.endpoints

    def _apply(self, view: FleetView) -> None:
        reasons = dict(view.deaths)
        present = {endpoint.ref.name: endpoint for endpoint in view.endpoints}
        for name, known in list(self._known.items()):
            now = present.get(name)
            if now is not None and now.ref == known.ref:
                continue
            reason = reasons.get(known.ref.incarnation)
            if reason is not None:
                extra = {"worker": name}
                logger.error("worker %s (%s) died: %s", name, known.role.value, reason, extra=extra)
            if now is None:
                self._registry.remove_worker(name, reason or "it left the fleet")
        for name, endpoint in present.items():
            former = self._known.get(name)
            if former is None or former.ref != endpoint.ref:
                self._registry.add_worker(endpoint)
        self._known = present
