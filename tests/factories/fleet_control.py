"""A controller without processes. It describes the fleet of a test, and carries out or refuses commands."""

import asyncio
from dataclasses import replace
from typing import Any, TypeVar

from baton.errors import BatonError, UnknownWorker
from baton.fleet import (
    CacheFlush,
    FleetDescription,
    NodeDescription,
    ReplicaDescription,
    ReplicaState,
    RolloutStep,
)
from baton.messages.control import (
    BeginRollout,
    CachesFlushed,
    ControlRequest,
    DescribeFleet,
    Done,
    DrainNode,
    DrainWorker,
    FlushCaches,
    RolloutBegun,
    RolloutProgress,
    SetWorkerRole,
    WaitRolloutStep,
)
from baton.worker import WorkerRole
from gateway.workers.fleet_view import name_key

R = TypeVar("R")


def replica(
    name: str,
    role: WorkerRole = WorkerRole.DECODE,
    state: ReplicaState = ReplicaState.SERVING,
    **fields: object,
) -> ReplicaDescription:
    return ReplicaDescription(name=name, role=role, state=state, **fields)  # type: ignore[arg-type]


def fleet_of(*replicas: ReplicaDescription, nodes: tuple[NodeDescription, ...] = ()) -> FleetDescription:
    return FleetDescription(
        replicas=replicas, nodes=nodes, controller_incarnation="c-incarnation", decisions=("Nothing to do.",)
    )


class FakeFleetControl:
    """Raises `refuses` for commands, and `is_away` for all calls.

    While `answers` is clear, it does not answer.
    """

    def __init__(self, fleet: FleetDescription) -> None:
        self.fleet = fleet
        self.commands: list[tuple[str, ...]] = []
        self.num_descriptions = 0
        self.refuses: BatonError | None = None
        self.is_away: BatonError | None = None
        self.in_use: dict[str, str] = {}
        """Workers that keep their prefix caches, with the reason."""
        self.answers = asyncio.Event()
        self.answers.set()
        self.obeys = asyncio.Event()
        """While this is clear, a drain or a change of role does not complete."""
        self.obeys.set()
        self._rolled: tuple[str, ...] = ()

    async def call(self, request: ControlRequest[R]) -> R:
        answer: R = await self._answer(request)
        return answer

    async def _answer(self, request: ControlRequest[Any]) -> Any:
        match request:
            case DescribeFleet():
                return await self._describe()
            case DrainWorker(worker):
                await self._note("drain", worker)
                left = tuple(each for each in self.fleet.replicas if each.name != worker)
                self.fleet = replace(self.fleet, replicas=left)
                return Done()
            case DrainNode(node, within_s):
                if self.refuses:
                    raise self.refuses
                self.commands.append(("drain_node", node, f"{within_s:g}"))
                return Done()
            case SetWorkerRole(worker, role):
                await self._note("set_role", worker, role.value)
                return Done()
            case FlushCaches(workers, force):
                self._check(workers)
                self.commands.append(("flush", *workers, f"{force}"))
                flushed = workers or tuple(each.name for each in self.fleet.replicas)
                return CachesFlushed(tuple(CacheFlush(name, self.in_use.get(name, "")) for name in flushed))
            case BeginRollout(workers):
                self._check(workers)
                self.commands.append(("rollout", *workers))
                self._rolled = workers or tuple(each.name for each in self.fleet.replicas)
                return RolloutBegun("r")
            case WaitRolloutStep("r", index):
                return RolloutProgress(self._step(index))
        raise AssertionError(f"{request} is not for this fake")

    async def _describe(self) -> FleetDescription:
        self.num_descriptions += 1
        await self.answers.wait()
        if self.is_away:
            raise self.is_away
        return self.fleet

    def _step(self, index: int) -> RolloutStep | None:
        """One step of a rollout. A refusal is raised after the first worker."""
        if index > 0 and self.refuses:
            raise self.refuses
        if index == len(self._rolled):
            return None
        name = self._rolled[index]
        return RolloutStep(name, f"{name}-next-incarnation", index + 1, len(self._rolled))

    async def _note(self, *command: str) -> None:
        if self.is_away:
            raise self.is_away
        self._check((command[1],))
        self.commands.append(command)
        await self.obeys.wait()
        if self.refuses:
            raise self.refuses

    def _check(self, workers: tuple[str, ...]) -> None:
        names = [description.name for description in self.fleet.replicas]
        for worker in workers:
            if worker not in names:
                there = ", ".join(sorted(names, key=name_key)) or "none"
                raise UnknownWorker(f"there is no worker {worker!r}; the fleet has {there}")
