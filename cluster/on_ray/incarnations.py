"""One incarnation of a worker: a detached actor in its own placement group. Both have the same name, a Title."""

import asyncio
import contextlib
import re
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import ray
from ray.util.placement_group import (
    get_placement_group,
    placement_group_table,
    remove_placement_group,
)

from baton.errors import BatonError, ClusterError
from baton.messages.control import ControlRequest, WaitStatus
from baton.messages.control_codec import read_reply, write_call
from baton.system.awake_timer import awake_timeout
from baton.system.cpus import CpuShare
from baton.system.tasks import end_tasks
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
from cluster.on_ray.calls import Unreachable, answer, kill_process

R = TypeVar("R")

_TITLE = re.compile(r"(w\d+)/(\d+)@([0-9a-f]+)")
_FLEET_DIGITS = 8
_REAP_TIMEOUT_S = 10.0


class Title(NamedTuple):
    """WORKER/NUMBER@FLEET. If one fleet ends while the next of its name begins, `fleet` tells them apart."""

    worker: str
    number: int
    fleet: str

    def __str__(self) -> str:
        return f"{self.worker}/{self.number}@{self.fleet}"


def parse_title(text: str) -> Title | None:
    """The title in this text; None if the text is no title."""
    match = _TITLE.fullmatch(text)
    return None if match is None else Title(match[1], int(match[2]), match[3])


def fleet_of(actor_id: str) -> str:
    """The fleet's id, from the id of its controller's actor, which a restart does not change."""
    return actor_id[:_FLEET_DIGITS]


def remove_incarnations(is_theirs: Callable[[Title], bool]) -> None:
    """Ends by force the workers in this namespace for whose titles `is_theirs` is true, and gives their room back.

    Also gives back the room of workers that have died: their actors have no name any more.
    """
    for title in filter(is_theirs, filter(None, map(parse_title, ray.util.list_named_actors()))):
        with contextlib.suppress(ValueError):  # the actor has just ended
            ray.kill(ray.get_actor(str(title)))
    for title in filter(is_theirs, titles_with_room()):
        give_room_back(str(title))


def titles_with_room() -> list[Title]:
    """The titles of all incarnations, in all namespaces, that have a placement group or wait for room for it."""
    groups = (group["name"] for group in placement_group_table().values() if group["state"] != "REMOVED")
    return list(filter(None, map(parse_title, groups)))


class RayIncarnation:
    """The controller's end of one worker actor. See cluster.controller.launcher.Incarnation."""

    def __init__(self, title: Title, actor: Any, target: str | None) -> None:
        self.title = title
        self.name, self.number, _ = title
        self.host = self.node = ""
        self.node_id = target
        """The actor's node; before that is known, the requested node."""
        self.share: CpuShare | None = None
        """The worker's CPU share; None on a GPU."""
        self.is_over = False
        self._actor = actor
        self._pid: int | None = None
        self._has_started = False
        self._hangs = False
        """The actor did not answer in time, so it may not react to `ray.kill` either."""

    @property
    def failed_to_start(self) -> bool:
        """Whether its process has ended before the worker served."""
        return self.is_over and self._pid is not None and not self._has_started

    async def introduce(self) -> Introduction:
        """Waits until the actor has room and a process; returns where the process runs."""
        introduction = await self._exchange(Introduce())
        self.node_id, self._pid = introduction.node_id, introduction.pid
        self.host = introduction.host
        self.node = node_name(introduction.host, introduction.node_id)
        self._has_started = introduction.endpoint is not None
        return introduction

    async def start(self, on_progress: OnStartProgress) -> WorkerEndpoint:
        following = asyncio.create_task(self._follow(on_progress))
        try:
            endpoint = await self._exchange(StartWorker(self.share))
        except asyncio.CancelledError:
            self._hangs = True
            raise
        finally:
            await end_tasks(following)
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
        try:
            await self._end_process(timeout_s)
        finally:  # also if the caller stops waiting
            give_room_back(str(self.title))
            self.is_over = True

    async def _end_process(self, timeout_s: float) -> None:
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

    async def _follow(self, on_progress: OnStartProgress) -> None:
        while (progress := (await self._exchange(WaitProgress())).progress) is not None:
            on_progress(progress)

    async def _exchange(self, request: ControlRequest[R]) -> R:
        """The actor's answer. Repeats the call once if the actor cannot be reached: a broken connection, which Ray
        restores, must not end a worker. All calls but StopWorker may be repeated.
        """
        frame = write_call(ACTOR_CODEC.frame(0, 0.0, request))
        try:
            reply = await answer(self._actor.call.remote(frame), None)
        except Unreachable:
            if isinstance(request, StopWorker):
                raise
            reply = await answer(self._actor.call.remote(frame), None)
        return ACTOR_CODEC.value_in(read_reply(reply), request)


def node_name(host: str, node_id: str) -> str:
    """A unique name, even if several nodes are on one machine."""
    return f"{host}-{node_id[:6]}"


def give_room_back(title: str) -> None:
    """Removes the placement group of an incarnation in this namespace, which also ends all processes in the group."""
    with contextlib.suppress(ValueError):  # there is none
        remove_placement_group(get_placement_group(title))
