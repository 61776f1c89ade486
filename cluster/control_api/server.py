"""ControlServer: the control API over ZeroMQ, for gateways and operators on machines without Ray.

`OpenCalls` counts and limits the calls of each connection. `ViewCache` answers all waits for a view with one wait at
the controller. The socket is in server_socket.py.
"""

import asyncio
import logging
from collections import defaultdict
from typing import Any

from baton.config import NetworkConfig
from baton.errors import BatonError, ClusterError, FleetEnded, FleetError, WireError
from baton.fleet import FleetView
from baton.messages.control import (
    ControlApi,
    ControlRequest,
    FleetConfiguration,
    GetConfiguration,
    WaitView,
)
from baton.messages.control_codec import (
    CallFrame,
    failure,
    foreign_version,
    read_call,
    versions_differ,
)
from baton.system.awake_timer import awake_timeout
from baton.system.curve import PlaneKeys
from baton.system.tasks import end_tasks
from cluster.control_api.calls import CALLS, CONTROL_CODEC, lost_reply
from cluster.control_api.follower import ViewFollower
from cluster.control_api.server_socket import MAX_CALLS_OF_ONE, ServerSocket

logger = logging.getLogger(__name__)

MAX_CALLS = 4096
"""The most open calls of all connections together."""

FIRST_VIEW_S = 60.0
"""How long a controller that was just started or found may take to report its workers."""


class ControlServer:
    """Binds its port in the constructor, so that a port in use is reported before workers take minutes to start."""

    def __init__(self, network: NetworkConfig, port: int, keys: PlaneKeys | None) -> None:
        """Raises ConfigError if it cannot listen on `port`, which is `cluster.fleet_port`."""
        self._open_calls = OpenCalls()
        self._socket = ServerSocket(network, port, keys)
        self._control: ControlApi | None = None
        self._configuration: FleetConfiguration | None = None
        self._views: ViewCache | None = None
        self._following: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def address(self) -> str:
        """HOST:PORT at which others reach this server."""
        return self._socket.address

    def open(self) -> None:
        """Begins to answer calls. Before `serve`, each answer is an error: the fleet is still starting."""
        self._socket.open(self._on_frames)

    async def serve(self, control: ControlApi) -> FleetView:
        """Passes calls to this controller from now on; returns the present view."""
        self._configuration = await control.call(GetConfiguration())
        self._control, self._views = control, ViewCache(control)
        self._following = asyncio.create_task(self._views.run(), name="follow the fleet")
        return await self._views.wait_view(WaitView("", -1, FIRST_VIEW_S))

    async def until_ended(self) -> None:
        """Raises FleetEnded when the fleet ends by itself. Call `serve` before this."""
        assert self._following is not None
        await asyncio.shield(self._following)

    async def close(self, farewell_s: float) -> None:
        """Closes the port after `farewell_s`. During this time, callers of WaitView get FleetEnded."""
        if self._views is not None:
            self._views.end("the fleet was ended by its owner")
            await asyncio.sleep(farewell_s)
        tasks = {*self._tasks, *({self._following} if self._following else ())}
        await end_tasks(*tasks)
        self._socket.close()

    def _on_frames(self, peer: bytes, frames: list[bytes]) -> None:
        call = self._open_calls.open_call(peer, frames)
        if isinstance(call, bytes):
            self._socket.send(peer, call)
        elif call is not None:
            task = asyncio.create_task(self._reply(peer, call))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _reply(self, peer: bytes, call: CallFrame) -> None:
        try:
            request = CONTROL_CODEC.request_in(call)
            async with awake_timeout(call.timeout_s):
                reply = CONTROL_CODEC.answer(call.number, request, await self._answer(request))
        except TimeoutError:
            late = ClusterError(f"the fleet's controller did not answer within {call.timeout_s:g} s")
            reply = failure(call.number, lost_reply(late, request))
        except BatonError as error:
            reply = failure(call.number, error)
        except asyncio.CancelledError:
            closed = ClusterError("the control server was closed")
            reply = failure(call.number, lost_reply(closed, request))
        except Exception as error:  # after any error, the caller must get a reply
            logger.exception("a control call failed with an unexpected error")
            reply = failure(call.number, ClusterError(f"the control server failed: {type(error).__name__}"))
        self._open_calls.close_call(peer, call.number)
        self._socket.send(peer, reply)

    async def _answer(self, request: ControlRequest[Any]) -> Any:
        control, views = self._control, self._views
        if control is None or views is None:
            raise ClusterError("the fleet is still starting")
        if CALLS[type(request)].is_for_owner:
            raise FleetError(f"{type(request).__name__} is only for the fleet's owner")
        if isinstance(request, WaitView):  # one wait at the controller serves all gateways
            return await views.wait_view(request)
        if isinstance(request, GetConfiguration):
            return self._configuration
        return await control.call(request)  # a command continues if this wait ends


class OpenCalls:
    """Counts open calls. Every opened call must be closed exactly once."""

    def __init__(self) -> None:
        self.num_bad_messages = 0
        self._numbers: defaultdict[bytes, set[int]] = defaultdict(set)
        self.num_open = 0

    def open_call(self, peer: bytes, frames: list[bytes]) -> CallFrame | bytes | None:
        """A call to carry out, or a reply that refuses the call, or None for a message that is not a valid call."""
        try:
            if len(frames) != 1:
                raise WireError(f"expected one frame, got {len(frames)}")
            call = read_call(frames[0])
        except WireError as error:
            self._note_bad_message(error)
            foreign = foreign_version(frames[0]) if len(frames) == 1 else None
            return None if foreign is None else failure(foreign[1], versions_differ(foreign[0]))
        numbers = self._numbers[peer]
        if call.number in numbers:
            self._note_bad_message(WireError(f"call {call.number} is already open"))
            return None
        if len(numbers) >= MAX_CALLS_OF_ONE or self.num_open >= MAX_CALLS:
            if not numbers:
                del self._numbers[peer]
            limit = f"{MAX_CALLS_OF_ONE} of one connection, {MAX_CALLS} in all"
            return failure(call.number, ClusterError(f"too many open calls ({limit}); try again later"))
        numbers.add(call.number)
        self.num_open += 1
        return call

    def close_call(self, peer: bytes, number: int) -> None:
        numbers = self._numbers[peer]
        numbers.remove(number)
        self.num_open -= 1
        if not numbers:
            del self._numbers[peer]

    def _note_bad_message(self, error: WireError) -> None:
        self.num_bad_messages += 1
        if self.num_bad_messages.bit_count() == 1:  # 1, 2, 4, 8, ...: a peer must not fill the log
            logger.warning("dropped a control message (%d so far): %s", self.num_bad_messages, error)


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
        self._view = view
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _version_of(view: FleetView) -> tuple[str, int]:
    return view.controller_incarnation, view.version
