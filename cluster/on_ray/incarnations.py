"""One incarnation of a worker: a detached actor in a placement group of its own, both named WORKER/NUMBER."""

import asyncio
import contextlib
import re
from typing import Any, TypeVar

import ray
from ray.util.placement_group import PlacementGroup, get_placement_group, remove_placement_group

from baton.errors import BatonError, ClusterError
from baton.messages.control import ControlRequest, WaitStatus
from baton.messages.control_codec import read_reply, write_call
from baton.system.awake_timer import awake_timeout
from baton.worker import WorkerEndpoint
from cluster.controller.launcher import OnStartProgress
from cluster.on_ray.actors import (
    ACTOR_CODEC,
    Introduce,
    Introduction,
    StartWorker,
    StopWorker,
    WaitProgress,
)
from cluster.on_ray.calls import answer, kill_process

R = TypeVar("R")

_TITLE = re.compile(r"(w\d+)/(\d+)")
_REAP_TIMEOUT_S = 10.0


def parse_title(title: str) -> tuple[str, int] | None:
    """Worker and number of an incarnation; None for any other name."""
    match = _TITLE.fullmatch(title)
    return None if match is None else (match[1], int(match[2]))


class RayIncarnation:
    """The controller's end of one worker actor. See cluster.controller.launcher.Incarnation."""

    def __init__(self, name: str, number: int, actor: Any, target: str | None) -> None:
        self.name = name
        self.number = number
        self.node = ""
        self.node_id = target
        """The actor's node; before that is known, the requested node."""
        self.is_over = False
        self._actor = actor
        self._pid: int | None = None
        self._has_started = False
        self._hangs = False
        """The actor did not answer in time, so it may not react to its end either."""

    @property
    def title(self) -> str:
        return f"{self.name}/{self.number}"

    async def introduce(self) -> Introduction:
        """Waits until the actor has room and a process; returns where."""
        introduction = await self._exchange(Introduce())
        self.node_id, self._pid = introduction.node_id, introduction.pid
        self.node = node_name(introduction.host, introduction.node_id)
        self._has_started = introduction.endpoint is not None
        return introduction

    async def start(self, on_progress: OnStartProgress) -> WorkerEndpoint:
        following = asyncio.create_task(self._follow(on_progress))
        try:
            endpoint = await self._exchange(StartWorker())
        except asyncio.CancelledError:
            self._hangs = True
            raise
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
        self._has_started = True
        return endpoint

    async def call(self, request: ControlRequest[R]) -> R:
        try:
            value = await self._exchange(request)
        except asyncio.CancelledError:
            self._hangs = self._hangs or isinstance(request, WaitStatus)
            raise
        if isinstance(request, WaitStatus):
            self._hangs = False
        return value

    async def stop(self, timeout_s: float) -> None:
        if self._has_started and timeout_s > 0:
            with contextlib.suppress(TimeoutError, BatonError):
                async with awake_timeout(timeout_s):
                    await self._exchange(StopWorker())
                self._hangs = False
        with contextlib.suppress(ValueError, ray.exceptions.RayError):
            ray.kill(self._actor)
        if self._hangs and self._pid is not None and self.node_id is not None:
            self._hangs = False
            with contextlib.suppress(TimeoutError, ClusterError):
                async with awake_timeout(_REAP_TIMEOUT_S):
                    await kill_process(self._pid, self.node_id)
        give_room_back(self.title)
        self.is_over = True

    async def _follow(self, on_progress: OnStartProgress) -> None:
        while (progress := (await self._exchange(WaitProgress())).progress) is not None:
            on_progress(progress)

    async def _exchange(self, request: ControlRequest[R]) -> R:
        frame = write_call(ACTOR_CODEC.frame(0, 0.0, request))
        return ACTOR_CODEC.value_in(read_reply(await answer(self._actor.call.remote(frame), None)), request)


def node_name(host: str, node_id: str) -> str:
    """A unique name, also for several nodes on one machine."""
    return f"{host}-{node_id[:6]}"


def give_room_back(title: str) -> None:
    """Removes the placement group of an incarnation, which also ends all processes in it."""
    group = group_of(title)
    if group is not None:
        remove_placement_group(group)


def group_of(title: str) -> PlacementGroup | None:
    """The placement group of an incarnation in this namespace; None if there is none."""
    try:
        group: PlacementGroup = get_placement_group(title)
    except ValueError:
        return None
    return group
