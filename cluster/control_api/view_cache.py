"""The fleet's latest view for any number of readers, with one WaitView at the controller."""

import asyncio

from baton.errors import ClusterError, FleetEnded
from baton.fleet import FleetView
from baton.messages.control import ControlApi, WaitView
from cluster.controller.follower import ViewFollower


class ViewCache:
    """Answers WaitView as a controller does; keeps the last view while the controller is unreachable."""

    def __init__(self, control: ControlApi) -> None:
        self._follower = ViewFollower(control, self._show)
        self._view: FleetView | None = None
        self._end: str | None = None
        """Why no more views follow."""
        self._changed = asyncio.Event()

    async def run(self) -> None:
        """Runs until cancelled. Raises FleetEnded when the fleet ends; then `wait_view` raises it, too."""
        try:
            await self._follower.run()
        except FleetEnded as error:
            self.end(str(error))
            raise

    async def wait_view(self, request: WaitView) -> FleetView:
        """See WaitView. Raises ClusterError if the controller has never answered."""
        known = (request.controller_incarnation, request.version)
        try:
            async with asyncio.timeout(request.wait_s):
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
        """From now on, `wait_view` raises FleetEnded, also for callers that already wait."""
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
