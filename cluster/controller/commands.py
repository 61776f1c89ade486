"""Commands of the controller that outlive their callers: rollouts, changes of roles, and the draining of nodes.

Knows no process: supervisors carry out what happens to a worker.
"""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Iterable, Sequence

from baton.errors import FleetError
from baton.fleet import NodeDescription, RolloutStep
from baton.messages.control import RolloutBegun, RolloutProgress
from baton.system.tasks import end_tasks
from baton.worker import WorkerRole
from cluster.controller.desired import DesiredReplica
from cluster.controller.launcher import Launcher
from cluster.controller.supervisor import Supervisor

logger = logging.getLogger(__name__)

_NUM_ENDED = 8
"""How many ended rollouts are kept, for callers that still request the last steps."""

_NUM_GONE = 100
"""How many nodes that drained and are gone are remembered."""


class Rollouts:
    """Begins rollouts and returns their steps; a caller may ask for the same step more than once."""

    def __init__(self, begin: Callable[[tuple[str, ...]], AsyncIterator[RolloutStep]]) -> None:
        self._begin = begin
        self._rollouts: dict[str, _Rollout] = {}

    async def begin_rollout(self, workers: tuple[str, ...]) -> RolloutBegun:
        """Begins a rollout, which continues even if its caller disconnects."""
        rollout_id = secrets.token_hex(4)
        ended = [known for known, rollout in self._rollouts.items() if rollout.is_over]
        for known in ended[:-_NUM_ENDED]:
            del self._rollouts[known]
        self._rollouts[rollout_id] = _Rollout(self._begin(workers))
        return RolloutBegun(rollout_id)

    async def wait_step(self, rollout_id: str, index: int) -> RolloutProgress:
        """The step of this number once it is done; None after the last. Raises the error that ended the rollout."""
        if (rollout := self._rollouts.get(rollout_id)) is None:
            raise FleetError("the controller restarted, which ended the rollout; start the rollout again")
        return RolloutProgress(await rollout.step(index))

    async def stop(self) -> None:
        """Ends all running rollouts."""
        await asyncio.gather(*[rollout.stop() for rollout in self._rollouts.values()])


class _Rollout:
    """A rollout and its finished steps."""

    def __init__(self, steps: AsyncIterator[RolloutStep]) -> None:
        self._steps: list[RolloutStep] = []
        self._changed = asyncio.Event()
        self._task = asyncio.create_task(self._run(steps))

    @property
    def is_over(self) -> bool:
        return self._task.done()

    async def step(self, index: int) -> RolloutStep | None:
        while index >= len(self._steps):
            if self._task.done():
                self._task.result()  # raises the rollout's error
                return None
            self._changed.clear()
            waiting = asyncio.ensure_future(self._changed.wait())
            await asyncio.wait([waiting, self._task], return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
        return self._steps[index]

    async def stop(self) -> None:
        await end_tasks(self._task)

    async def _run(self, steps: AsyncIterator[RolloutStep]) -> None:
        async for step in steps:
            self._steps.append(step)
            self._changed.set()


class RoleChanges:
    """The running changes of roles, on a controller's event loop. A change continues if its callers disconnect."""

    def __init__(self, save: Callable[[], None]) -> None:
        """`save` stores the desired fleet."""
        self._save = save
        self._running: dict[str, asyncio.Task[None]] = {}

    def __contains__(self, worker: str) -> bool:
        return worker in self._running

    def begin(self, replica: DesiredReplica, supervisor: Supervisor, role: WorkerRole) -> None:
        """Begins to change a worker's role. The new role is the desired one from now on, unless the change fails."""
        replica.role = role
        self._save()
        change = self._change(replica, supervisor, role)
        self._running[replica.name] = asyncio.create_task(change, name=f"change the role of {replica.name}")

    def resume(self, replica: DesiredReplica, supervisor: Supervisor) -> None:
        """Continues a change that a former controller began. Logs its error, since the change may have no caller."""
        self.begin(replica, supervisor, replica.role)
        self._running[replica.name].add_done_callback(_log_error)

    async def join(self, worker: str) -> None:
        """Returns when the worker's running change has ended. Raises FleetError if the worker keeps its old role."""
        await asyncio.shield(self._running[worker])

    async def stop(self) -> None:
        """Cancels all running changes."""
        await end_tasks(*self._running.values())

    async def _change(self, replica: DesiredReplica, supervisor: Supervisor, role: WorkerRole) -> None:
        try:
            await supervisor.set_role(role)
        finally:
            replica.role = supervisor.replica.role
            del self._running[replica.name]
            self._save()


def _log_error(change: asyncio.Task[None]) -> None:
    if not change.cancelled() and (error := change.exception()) is not None:
        logger.warning("%s", error)


class DrainingNodes:
    """Remembers which nodes drain, and the last of those that are gone, since their commands may be repeated.

    Belongs to a controller's event loop.
    """

    def __init__(self, launcher: Launcher, supervisors: Callable[[], Iterable[Supervisor]]) -> None:
        self.names: tuple[str, ...] = ()
        """The names of draining nodes; names of nodes are unique. A node that has died stays until the next command."""
        self._gone: tuple[str, ...] = ()
        """The names of nodes that drained before and are gone, and of earlier nodes with the addresses of commands."""
        self._launcher = launcher
        self._supervisors = supervisors
        self._moving: set[asyncio.Task[None]] = set()

    @property
    def remembered(self) -> tuple[str, ...]:
        """What the next controller needs to `resume`."""
        return (*self._gone, *self.names)

    def resume(self, names: Iterable[str]) -> None:
        """Continues the draining that a former controller began, without waiting for it."""
        self._mark(names)
        self._move_away(self.names)

    async def mark(self, node: str) -> tuple[str, ...]:
        """Marks the nodes of this address or name as draining, and returns the names of the nodes to empty.

        If one of these nodes is Ray's head, the result contains all draining nodes: they must all be empty before the
        head may end, since no worker can drain without the head. The command may be repeated after the node is gone,
        unless another node has had its address since. Raises FleetError if no node has this address or name, or if the
        fleet has no other node.
        """
        listed = await self._launcher.nodes()
        alive = {known.name: known for known in listed if known.is_alive}
        named = [known.name for known in listed if node in (known.name, known.address)]
        here = [name for name in named if name in alive]
        gone = named or [node]
        if not here and set(self.remembered).issuperset(gone):
            return tuple(gone)
        if not here:
            raise FleetError(
                f"no node of the fleet has the address or name {node!r}; its nodes are: {_text(alive.values())}"
            )
        if len(here) == len(alive):
            raise FleetError(f"node {node} is the fleet's only node; end the fleet instead")
        known_names = dict.fromkeys([*self.remembered, *named])
        self._gone = tuple(name for name in known_names if name not in alive)[-_NUM_GONE:]
        self._mark(name for name in known_names if name in alive)
        if any(alive[name].is_head for name in here):
            return self.names
        return tuple(here)

    async def empty(self, here: Sequence[str], timeout_s: float) -> None:
        """Returns once these nodes have no workers.

        Raises FleetError if a move fails, and after `timeout_s`; the moves that have not ended continue.
        """
        moves = self._move_away(here)
        if moves:
            await asyncio.wait(moves.values(), timeout=timeout_s)
        remaining = [supervisor.replica.name for supervisor in self._supervisors() if supervisor.is_on(here)]
        failures = {name: why for name in remaining if name in moves and (why := _failure(moves[name]))}
        nodes, late = ", ".join(here), ", ".join(name for name in remaining if name not in failures)
        problems = [f"{name} did not leave {nodes}: {why}" for name, why in failures.items()]
        if late:
            problems.append(f"{late} did not leave {nodes} within {timeout_s:g} s; their move continues")
        if problems:
            raise FleetError("; ".join(problems))

    async def stop(self) -> None:
        """Cancels all moves."""
        await end_tasks(*self._moving)

    def _mark(self, names: Iterable[str]) -> None:
        self.names = tuple(names)
        self._launcher.avoid(self.names)

    def _move_away(self, here: Sequence[str]) -> dict[str, asyncio.Task[None]]:
        """Begins to move every worker that is on these nodes; a worker that already moves is not drained twice.

        Returns the moves by the workers' names.
        """
        moves = {
            supervisor.replica.name: asyncio.create_task(
                supervisor.move_away(self.names), name=f"move {supervisor.replica.name}"
            )
            for supervisor in self._supervisors()
            if supervisor.is_on(here)
        }
        for move in moves.values():
            self._moving.add(move)
            move.add_done_callback(self._moving.discard)
        return moves


def _failure(move: asyncio.Task[None]) -> str | None:
    """Why a move has failed; None if it runs, or has succeeded."""
    if not move.done():
        return None
    if move.cancelled():
        return "the fleet is ending"
    error = move.exception()
    return None if error is None else f"{type(error).__name__}: {error}"


def _text(nodes: Iterable[NodeDescription]) -> str:
    return ", ".join(f"{node.name} ({node.address})" for node in nodes) or "none"
