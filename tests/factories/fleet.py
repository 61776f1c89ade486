"""A launcher whose workers are simple objects in this process, and a controller with very short waits."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from baton.clock import SystemClock
from baton.config import BatonConfig
from baton.errors import ClusterError, FleetError
from baton.fleet import FleetView, NodeDescription
from baton.kv import WorkerRef
from baton.messages.control import (
    ControlRequest,
    Done,
    Drain,
    Drained,
    FlushCache,
    SetRole,
    WaitStatus,
    WaitView,
)
from baton.worker import (
    KVBlockCounts,
    RequestCounts,
    StartProgress,
    WorkerEndpoint,
    WorkerRole,
    WorkerState,
    WorkerStatus,
)
from cluster.controller.controller import Controller
from cluster.controller.desired import InMemoryStore, Store
from cluster.controller.launcher import Found, OnStartProgress
from tests.factories.virtual_loop import VirtualLoop

R = TypeVar("R")

QUICK = {
    "start_timeout_s": 2.0,
    "drain_timeout_s": 0.0,
    "unresponsive_timeout_s": 0.2,
    "stable_after_s": 5.0,
    "restart_delay_s": 0.01,
    "restart_delay_max_s": 0.05,
    "crash_loop_deaths": 3,
}


def fleet_config(prefill: int = 1, decode: int = 2, **cluster: Any) -> BatonConfig:
    """A configuration with short times."""
    sections: dict[str, Any] = {"cluster": {"prefill": prefill, "decode": decode, **QUICK, **cluster}}
    return BatonConfig.from_mapping({**sections, "kv_transfer": {"lease_s": 0.1}})


class FakeIncarnation:
    """A worker that a test can kill, freeze and break."""

    _incarnations = itertools.count(1)

    def __init__(
        self, name: str, role: WorkerRole, number: int, is_cut_off: Callable[[], bool], node: str = "here"
    ) -> None:
        self.is_cut_off = is_cut_off
        self.name = name
        self.number = number
        self.node = node
        self.role = role
        self.death: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.is_frozen = False
        self.engine_failure = ""
        """Why its engine has ended, which leaves its process running."""
        self.num_hops = 0
        """How many hops of 0.1 s its status takes to arrive here."""
        self.start_error: Exception | None = None
        self.role_error: FleetError | None = None
        self.flush_error: FleetError | None = None
        self.may_start = asyncio.Event()
        self.may_start.set()
        self.may_drain = asyncio.Event()
        self.may_drain.set()
        self.may_stop = asyncio.Event()
        self.may_stop.set()
        self.commands: list[str] = []
        self.is_draining = False
        """Whether it refuses requests: for good after a drain, for a while during a change of role."""
        self.target: WorkerRole | None = None
        """The role to which it changes."""
        self.running = 0
        self.drains_cleanly = True
        self.num_answers = 0
        """Number of answers to WaitStatus."""
        self.pid = next(self._incarnations)

    def kill(self, reason: str = "killed") -> None:
        if not self.death.done():
            self.death.set_result(reason)

    async def start(self, on_progress: OnStartProgress) -> WorkerEndpoint:
        on_progress(StartProgress("weights", 1, 1))
        await asyncio.sleep(0)
        await self._until(self.may_start)
        if not self.may_start.is_set():
            raise ClusterError(self.death.result())
        if self.start_error is not None:
            raise self.start_error
        return self.endpoint

    @property
    def endpoint(self) -> WorkerEndpoint:
        ref = WorkerRef(self.name, f"incarnation{self.pid}", ("tcp://127.0.0.1:1",), 16)
        return WorkerEndpoint(ref, self.role, "tcp://127.0.0.1:2", self.node, self.pid)

    async def call(self, request: ControlRequest[R]) -> R:
        answer: R = await self._answer(request)
        return answer

    async def _answer(self, request: ControlRequest[Any]) -> Any:
        match request:
            case WaitStatus(after_s):
                return await self._status(after_s)
            case Drain(timeout_s):
                return Drained(await self._drain(timeout_s))
            case SetRole(role, timeout_s):
                await self._set_role(role, timeout_s)
                return Done()
            case FlushCache(force, timeout_s):
                self.commands.append(f"flush {force} {timeout_s:g}")
                if self.flush_error is not None:
                    raise self.flush_error
                return Done()
        raise AssertionError(f"{request} is no call of a worker")

    async def _status(self, after_s: float) -> WorkerStatus:
        assert after_s > 0
        await asyncio.wait([self.death], timeout=0.01)
        if self.death.done():
            raise ClusterError(self.death.result())
        if self.is_frozen:
            await asyncio.Event().wait()
        for _ in range(self.num_hops):
            await asyncio.sleep(0.1)
        self.num_answers += 1
        return self.status

    @property
    def status(self) -> WorkerStatus:
        counts = RequestCounts(self.running, 0, 0)
        state = WorkerState.DRAINING if self.is_draining else WorkerState.READY
        state = WorkerState.DEAD if self.engine_failure else state
        blocks = KVBlockCounts(9, 9, 0, 0)
        return WorkerStatus(self.endpoint.ref, self.role, state, blocks, counts, {}, (), self.engine_failure)

    async def _drain(self, timeout_s: float) -> bool:
        self.commands.append(f"drain {timeout_s:g}")
        if self.target is not None:
            raise FleetError(f"it is changing to a {self.target.value} worker")
        self.is_draining = True
        await self._until(self.may_drain)
        if self.death.done():
            raise ClusterError(self.death.result())
        return self.drains_cleanly

    async def _until(self, event: asyncio.Event) -> None:
        """Returns at the event, or when this worker has died."""
        waiting: asyncio.Future[Any] = asyncio.ensure_future(event.wait())
        await asyncio.wait([waiting, self.death], return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()

    async def _set_role(self, role: WorkerRole, timeout_s: float) -> None:
        self.commands.append(f"{role.value} {timeout_s:g}")
        if self.is_draining and self.target is not role:
            raise FleetError("it is draining")
        self.is_draining, self.target = True, role
        await self._until(self.may_drain)
        if self.death.done():
            raise ClusterError(self.death.result())
        self.is_draining, self.target = False, None
        if self.role_error is not None:
            raise self.role_error
        self.role = role

    async def stop(self, timeout_s: float) -> None:
        if self.is_cut_off():
            return
        self.commands.append(f"stop {timeout_s:g}")
        self.kill("stopped")
        await self.may_stop.wait()


class FakeLauncher:
    """Remembers every incarnation. A test's `prepare` gets each incarnation before it starts."""

    def __init__(self, prepare: Callable[[FakeIncarnation], None] = lambda _: None) -> None:
        self.incarnations: list[FakeIncarnation] = []
        self.room = asyncio.Event()
        self.room.set()
        self.has_spare_room = False
        self.is_cut_off = False
        """Whether no process can be ended."""
        self.addresses = {"here": "127.0.0.1"}
        """The address of each node. A worker gets the first node that it may use."""
        self.head = ""
        """The node of these that is Ray's head."""
        self.lost: set[str] = set()
        """The nodes of these that have died. Ray lists them for a while."""
        self.avoided: tuple[str, ...] = ()
        self.forgotten: list[str] = []
        self.prepare = prepare

    def latest(self, name: str) -> FakeIncarnation:
        return [incarnation for incarnation in self.incarnations if incarnation.name == name][-1]

    @property
    def alive(self) -> list[FakeIncarnation]:
        return [incarnation for incarnation in self.incarnations if not incarnation.death.done()]

    async def place(self, name: str, role: WorkerRole, number: int) -> FakeIncarnation:
        await self.room.wait()
        node = next(node for node in self.addresses if node not in {*self.avoided, *self.lost})
        incarnation = FakeIncarnation(name, role, number, lambda: self.is_cut_off, node)
        self.incarnations.append(incarnation)
        self.prepare(incarnation)
        return incarnation

    async def has_room(self, role: WorkerRole) -> bool:
        assert role in WorkerRole
        return self.has_spare_room

    async def adopt(self, patience_s: float) -> Mapping[str, Found]:
        assert patience_s > 0
        return {one.name: Found(one, one.endpoint, one.status) for one in self.alive}

    def avoid(self, nodes: Sequence[str]) -> None:
        self.avoided = tuple(nodes)

    def forget(self, name: str) -> None:
        assert not any(incarnation.name == name for incarnation in self.alive)
        self.forgotten.append(name)

    async def nodes(self) -> tuple[NodeDescription, ...]:
        return tuple(
            NodeDescription(
                name=node,
                address=address,
                is_alive=node not in self.lost,
                is_head=node == self.head,
                is_draining=node in self.avoided,
                workers=tuple(incarnation.name for incarnation in self.alive if incarnation.node == node),
            )
            for node, address in self.addresses.items()
        )


class FleetUnderTest:
    """A controller, its launcher, and what a gateway would know about the fleet."""

    def __init__(self, config: BatonConfig, launcher: FakeLauncher, store: Store) -> None:
        self.launcher = launcher
        self.store = store
        loop = asyncio.get_running_loop()
        clock = loop if isinstance(loop, VirtualLoop) else SystemClock()
        self.controller = Controller(config, launcher, store, clock)
        self.view = FleetView("", -1, ())

    async def until(
        self, condition: Callable[[dict[str, WorkerEndpoint]], bool]
    ) -> dict[str, WorkerEndpoint]:
        """Follows the view until its endpoints have these names."""
        async with asyncio.timeout(60.0):
            while True:
                known = {endpoint.ref.name: endpoint for endpoint in self.view.endpoints}
                if self.view.version >= 0 and condition(known):
                    return known
                view = self.view
                self.view = await self.controller.wait_view(
                    WaitView(view.controller_incarnation, view.version, 5.0)
                )

    async def all_serve(self, count: int) -> dict[str, WorkerEndpoint]:
        return await self.until(lambda known: len(known) == count)

    async def states(self) -> dict[str, str]:
        return {replica.name: replica.state.value for replica in (await self.controller.describe()).replicas}

    async def state_becomes(self, name: str, state: str) -> None:
        async with asyncio.timeout(60.0):
            while (await self.states())[name] != state:
                await asyncio.sleep(0.005)

    async def cut_off(self) -> None:
        """The controller's process is killed: nothing cleans up, and what it had saved stays."""
        content = self.store.load() or b""
        self.launcher.is_cut_off = True
        await self.controller.shutdown(may_drain=False)
        self.launcher.is_cut_off = False
        self.store.save(content)


@asynccontextmanager
async def fleet(
    config: BatonConfig, launcher: FakeLauncher | None = None, store: Store | None = None
) -> AsyncIterator[FleetUnderTest]:
    """A fleet that starts. At the end nothing of it is left."""
    tested = FleetUnderTest(config, launcher or FakeLauncher(), store or InMemoryStore())
    await tested.controller.start()
    try:
        yield tested
    finally:
        await tested.controller.shutdown(may_drain=False)
        assert tested.launcher.alive == []
