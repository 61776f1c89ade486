"""One life of a worker: a detached actor in a placement group of its own, both named WORKER/NUMBER."""

import asyncio
import contextlib
import re
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, get_placement_group, remove_placement_group

from baton.errors import BatonError, ClusterError
from baton.system.awake_timer import awake_timeout
from baton.worker import WorkerEndpoint, WorkerRole, WorkerStatus
from cluster.controller.launcher import OnStartProgress
from cluster.on_ray.actors import Introduction
from cluster.on_ray.calls import answer, kill_process

_TITLE = re.compile(r"(w\d+)/(\d+)")
_REAP_TIMEOUT_S = 10.0


def parse_title(title: str) -> tuple[str, int] | None:
    """Worker and number of a life; None if it is the name of something else."""
    match = _TITLE.fullmatch(title)
    return None if match is None else (match[1], int(match[2]))


class RayLife:
    """The control plane of one actor, from the outside. See cluster.controller.launcher.Life."""

    def __init__(self, name: str, number: int, actor: Any, target: str | None) -> None:
        self.name = name
        self.number = number
        self.node = ""
        self.node_id = target
        """Where it is; before that is known, where it shall go."""
        self.is_over = False
        self._actor = actor
        self._pid: int | None = None
        self._has_started = False
        self._hangs = False
        """It did not answer in time, so it may not hear that it is to end either."""

    @property
    def title(self) -> str:
        return f"{self.name}/{self.number}"

    async def introduce(self) -> Introduction:
        """Waits until the actor has room and a process, and learns where."""
        introduction: Introduction = await self._answer(self._actor.introduce.remote())
        self.node_id, self._pid = introduction.node_id, introduction.pid
        self.node = node_name(introduction.host, introduction.node_id)
        self._has_started = introduction.endpoint is not None
        return introduction

    async def start(self, on_progress: OnStartProgress) -> WorkerEndpoint:
        following = asyncio.create_task(self._follow(on_progress))
        try:
            endpoint: WorkerEndpoint = await self._answer(self._actor.start.remote())
        except asyncio.CancelledError:
            self._hangs = True
            raise
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
        self._has_started = True
        return endpoint

    async def status(self, after_s: float) -> WorkerStatus:
        try:
            status: WorkerStatus = await self._answer(self._actor.status.remote(after_s))
        except asyncio.CancelledError:
            self._hangs = True
            raise
        self._hangs = False
        return status

    async def drain(self, timeout_s: float) -> bool:
        is_empty: bool = await self._answer(self._actor.drain.remote(timeout_s))
        return is_empty

    async def set_role(self, role: WorkerRole, timeout_s: float) -> None:
        await self._answer(self._actor.set_role.remote(role, timeout_s))

    async def stop(self, timeout_s: float) -> None:
        if self._has_started and timeout_s > 0:
            with contextlib.suppress(TimeoutError, BatonError):
                async with awake_timeout(timeout_s):
                    await self._answer(self._actor.stop.remote())
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
        while (progress := await self._actor.next_progress.remote()) is not None:
            on_progress(progress)

    async def _answer(self, reference: Any) -> Any:
        return await answer(reference, None)


def node_name(host: str, node_id: str) -> str:
    """Another one for each node, also where several share a machine."""
    return f"{host}-{node_id[:6]}"


def give_room_back(title: str) -> None:
    """Removes the placement group of a life, and with it whatever still runs there."""
    group = group_of(title)
    if group is not None:
        remove_placement_group(group)


def group_of(title: str) -> PlacementGroup | None:
    """The placement group of a life of this fleet, in whose namespace we are."""
    try:
        group: PlacementGroup = get_placement_group(title)
    except ValueError:
        return None
    return group
