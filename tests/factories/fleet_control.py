"""A controller that has no processes: it describes what a test says, and does as it is told or refuses."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

from baton.errors import BatonError, FleetError
from baton.fleet import FleetDescription, NodeDescription, RolloutStep, SlotDescription, SlotState
from baton.worker import WorkerRole


def slot(
    name: str, role: WorkerRole = WorkerRole.DECODE, state: SlotState = SlotState.SERVING, **fields: object
) -> SlotDescription:
    return SlotDescription(name=name, role=role, state=state, **fields)  # type: ignore[arg-type]


def fleet_of(*slots: SlotDescription, nodes: tuple[NodeDescription, ...] = ()) -> FleetDescription:
    return FleetDescription(
        slots=slots, nodes=nodes, controller_incarnation="c-life", decisions=("Nothing to do.",)
    )


class FakeFleetControl:
    """`refuses` is raised by orders, `is_away` by everything; while `answers` is clear, nothing is answered."""

    def __init__(self, fleet: FleetDescription) -> None:
        self.fleet = fleet
        self.orders: list[tuple[str, ...]] = []
        self.refuses: BatonError | None = None
        self.is_away: BatonError | None = None
        self.answers = asyncio.Event()
        self.answers.set()
        self.obeys = asyncio.Event()
        """While it is clear, a drain or a change of role takes its time."""
        self.obeys.set()

    async def describe(self) -> FleetDescription:
        await self.answers.wait()
        if self.is_away:
            raise self.is_away
        return self.fleet

    async def drain(self, worker: str) -> None:
        await self._note("drain", worker)
        self.fleet = replace(self.fleet, slots=tuple(s for s in self.fleet.slots if s.name != worker))

    async def drain_node(self, node: str, timeout_s: float) -> None:
        if self.refuses:
            raise self.refuses
        self.orders.append(("drain_node", node, f"{timeout_s:g}"))

    async def set_role(self, worker: str, role: WorkerRole) -> None:
        await self._note("set_role", worker, role.value)

    async def rollout(self, workers: tuple[str, ...] = ()) -> AsyncIterator[RolloutStep]:
        """Refuses unknown names at once, and if it does refuse, after the first worker."""
        self._check(workers)
        self.orders.append(("rollout", *workers))
        names = workers or tuple(description.name for description in self.fleet.slots)
        for done, name in enumerate(names, start=1):
            yield RolloutStep(name, f"{name}-next-life", done, len(names))
            if self.refuses:
                raise self.refuses

    async def _note(self, *order: str) -> None:
        if self.is_away:
            raise self.is_away
        self._check((order[1],))
        self.orders.append(order)
        await self.obeys.wait()
        if self.refuses:
            raise self.refuses

    def _check(self, workers: tuple[str, ...]) -> None:
        for worker in workers:
            if worker not in {description.name for description in self.fleet.slots}:
                raise FleetError(f"there is no worker {worker!r}")
