"""RayCarrier: control calls as calls of the controller's actor, bytes in and bytes out."""

import asyncio
from typing import Any

import ray
from ray.exceptions import AuthenticationError, RayError

from baton.errors import ClusterError, FleetEnded
from baton.messages.control_codec import CallFrame, ControlCodec, Reply, read_reply, write_call
from baton.system.awake_timer import awake_timeout
from cluster.control_api.calls import CALLS
from cluster.on_ray.actors import Introduce, Introduction
from cluster.on_ray.calls import answer, kill_process
from cluster.on_ray.session import lost_process

CONTROLLER_NAME = "controller"
CONTROLLER_CLASS = "ControllerActor"
"""The class of the controller's actor. It tells a fleet from another program that uses the same namespace of Ray."""

CONTROLLER_CODEC = ControlCodec((*CALLS, Introduce))

RESTART_S = 30.0
"""How long a call waits, beyond its own time, for a controller that restarts."""

_WHO = "the fleet's controller"


class RayCarrier:
    """See cluster.control_api.calls.Carrier. Ray repeats calls to a controller that it restarts."""

    address = "its name on this Ray cluster"
    connection = 0  # constant: an actor's handle never refers to another fleet
    refusal = None  # Ray has already admitted this process

    def __init__(self, actor: Any, start_s: float = RESTART_S) -> None:
        """`start_s`: how long a call waits, beyond its own time, for a controller that has never answered.

        On a busy machine, the controller's process may take minutes to start.
        """
        self.actor = actor
        self._start_s = start_s
        self.has_answered = False
        """Whether the controller has replied. Before that, it may have no process."""
        self._process: Introduction | None = None
        """The process of the controller that replied last."""

    async def exchange(self, frame: CallFrame, hangs_after_s: float | None = None) -> Reply:
        """The reply. With `hangs_after_s`, kills a controller that hangs, for example after SIGSTOP; Ray restarts it.

        With `hangs_after_s`, also raises FleetEnded if the controller has ended by itself, for example because neither
        a gateway nor an owner has called for long, or if a process of a private Ray has ended: Ray does not restart it.
        """
        if hangs_after_s is None:
            return await self._ask(frame)
        if (loss := lost_process()) is not None:
            raise FleetEnded(f"the fleet has ended: {loss}")
        try:
            reply = await self.ask_or_kill(frame.timeout_s + hangs_after_s, frame)
        except ClusterError as error:
            if await asyncio.to_thread(self._is_gone):
                raise FleetEnded(f"the fleet has ended: {error}") from None
            raise
        self._process = CONTROLLER_CODEC.value_in(
            await self._ask(CONTROLLER_CODEC.frame(0, 0.0, Introduce())), Introduce()
        )
        return reply

    async def ask_or_kill(self, within_s: float, frame: CallFrame | None = None) -> Reply:
        """The reply to this frame, or to an Introduce; kills a controller that does not reply in time."""
        try:
            async with awake_timeout(within_s):
                return await self._ask(frame or CONTROLLER_CODEC.frame(0, 0.0, Introduce()))
        except TimeoutError:
            if self._process is not None:
                await kill_process(self._process.pid, self._process.node_id)
            raise ClusterError(f"{_WHO} did not answer for {within_s:g} s") from None

    async def _ask(self, frame: CallFrame) -> Reply:
        bound_s = frame.timeout_s + (RESTART_S if self.has_answered else max(RESTART_S, self._start_s))
        try:
            async with awake_timeout(bound_s):
                reply = read_reply(await answer(self.actor.call.remote(write_call(frame)), _WHO))
        except TimeoutError:
            raise ClusterError(
                f"{_WHO} did not answer for {bound_s:g} s; the workers continue to serve"
            ) from None
        self.has_answered = True
        return reply

    def _is_gone(self) -> bool:
        """Whether the controller has ended for good: a restarted actor keeps its name."""
        try:
            # Unlike `get_actor`, which remembers names, this asks Ray's head each time.
            if CONTROLLER_NAME not in ray.util.list_named_actors():
                return True
            named = _named_actor()
        except AuthenticationError:  # Ray says so after its head has restarted: it is another cluster now
            return True
        except RayError:  # the head is unreachable, perhaps only for a while
            return False
        return named is None or bool(named._actor_id != self.actor._actor_id)


def controller_actor() -> Any:
    """The controller's actor in this driver's namespace; None if there is none.

    Raises ClusterError if an actor of another program has the controller's name.
    """
    named = _named_actor()
    if named is None:
        return None
    kind = named._ray_actor_creation_function_descriptor.class_name
    if kind != CONTROLLER_CLASS:
        raise ClusterError(
            f"an actor of another program (class {kind}) has the name '{CONTROLLER_NAME}' in this fleet's Ray "
            "namespace (cluster.name); use another cluster.name"
        )
    return named


def _named_actor() -> Any:
    """The actor with the controller's name, of whatever program; None if there is none."""
    try:
        return ray.get_actor(CONTROLLER_NAME)
    except ValueError:
        return None
