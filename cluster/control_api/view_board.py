"""The fleet's latest view for any number of readers; its controller is asked by one."""

import asyncio
import logging

from baton.errors import ClusterError, FleetEnded
from baton.fleet import FleetView
from cluster.controller.follower import POLL_S, RETRY_S, ViewSource

logger = logging.getLogger(__name__)


class ViewBoard:
    """A ViewSource over another one. While that does not answer, what it said last stays."""

    def __init__(self, source: ViewSource) -> None:
        self._source = source
        self._view: FleetView | None = None
        self._end: str | None = None
        """Why there is no more news."""
        self._changed = asyncio.Event()

    async def run(self) -> None:
        """Until it is cancelled. Raises FleetEnded, as every reader then hears."""
        complaint = ""
        while True:
            incarnation, version = ("", -1)
            if self._view is not None:
                incarnation, version = self._view.controller_incarnation, self._view.version
            try:
                self._show(await self._source.next_view(incarnation, version, POLL_S))
                complaint = ""
            except FleetEnded as error:
                self.end(str(error))
                raise
            except ClusterError as error:
                if str(error) != complaint:  # else it would be said every second
                    complaint = str(error)
                    logger.warning(
                        "the fleet's controller does not answer, so its last word stays: %s", error
                    )
                await asyncio.sleep(RETRY_S)

    async def next_view(self, controller_incarnation: str, version: int, timeout_s: float) -> FleetView:
        """As a controller's. ClusterError if nothing was heard of the fleet yet."""
        known = (controller_incarnation, version)
        try:
            async with asyncio.timeout(timeout_s):
                while self._end is None and (self._view is None or known == _version_of(self._view)):
                    await self._changed.wait()
        except TimeoutError:
            pass
        if self._end is not None:
            raise FleetEnded(self._end)
        if self._view is None:
            raise ClusterError("the fleet's controller has not answered yet")
        return self._view

    def end(self, reason: str) -> None:
        """Every reader hears FleetEnded, at once and from now on."""
        self._end = reason
        self._notify()

    def _show(self, view: FleetView) -> None:
        if self._view is None or _version_of(view) != _version_of(self._view):
            self._view = view
            self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _version_of(view: FleetView) -> tuple[str, int]:
    return view.controller_incarnation, view.version
