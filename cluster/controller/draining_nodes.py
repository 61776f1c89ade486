"""Draining nodes: they get no new workers, and their workers move to other nodes; knows no process."""

import asyncio
from collections.abc import Callable, Iterable, Sequence

from baton.errors import FleetError
from baton.fleet import NodeDescription
from cluster.controller.launcher import Launcher
from cluster.controller.supervisor import Supervisor


class DrainingNodes:
    """Belongs to a controller's event loop. A node stays draining for as long as it lives."""

    def __init__(self, launcher: Launcher, supervisors: Callable[[], Iterable[Supervisor]]) -> None:
        self.names: tuple[str, ...] = ()
        """The names of draining nodes; names of nodes are unique."""
        self._launcher = launcher
        self._supervisors = supervisors
        self._moving: set[asyncio.Task[None]] = set()

    def resume(self, names: Iterable[str]) -> None:
        """Continues the draining that a former controller began, without waiting for it."""
        self._mark(names)
        self._move_away()

    async def mark(self, node: str) -> tuple[str, ...]:
        """Marks the nodes of this address or name as draining, and returns their names.

        Raises FleetError if no node has this address or name, or if the fleet has no other node.
        """
        alive = [known for known in await self._launcher.nodes() if known.is_alive]
        here = [known.name for known in alive if node in (known.name, known.address)]
        if not here:
            raise FleetError(
                f"no node of the fleet has the address or name {node!r}; there are: {_text(alive)}"
            )
        if len(here) == len(alive):
            raise FleetError(f"node {node} is the fleet's only node; end the fleet instead")
        still_draining = [known.name for known in alive if known.name in self.names]
        self._mark(dict.fromkeys([*still_draining, *here]))
        return tuple(here)

    async def empty(self, here: Sequence[str], timeout_s: float) -> None:
        """Returns once these nodes have no workers. FleetError after `timeout_s`; the moves continue."""
        moving = self._move_away()
        if moving:
            await asyncio.wait(moving, timeout=timeout_s)
        if left := [supervisor.replica.name for supervisor in self._supervisors() if supervisor.is_on(here)]:
            raise FleetError(
                f"{', '.join(left)} did not leave {', '.join(here)} within {timeout_s:g} s; their move continues"
            )

    async def stop(self) -> None:
        """Cancels all moves."""
        for task in self._moving:
            task.cancel()
        await asyncio.gather(*self._moving, return_exceptions=True)

    def _mark(self, names: Iterable[str]) -> None:
        self.names = tuple(names)
        self._launcher.avoid(self.names)

    def _move_away(self) -> list[asyncio.Task[None]]:
        """Begins to move every worker that is on a draining node; a worker that already moves is not drained twice."""
        tasks = [
            asyncio.create_task(supervisor.move_away(self.names), name=f"move {supervisor.replica.name}")
            for supervisor in self._supervisors()
            if supervisor.is_on(self.names)
        ]
        for task in tasks:
            self._moving.add(task)
            task.add_done_callback(self._moving.discard)
        return tasks


def _text(nodes: Iterable[NodeDescription]) -> str:
    return ", ".join(f"{node.name} ({node.address})" for node in nodes) or "none"
