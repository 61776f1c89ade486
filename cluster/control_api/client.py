"""FleetClient: a fleet's controller from another machine, over the fleet plane; needs no Ray."""

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from baton.config import BatonConfig, NetworkConfig
from baton.errors import BatonError, ClusterError, FleetEnded, WireError
from baton.fleet import FleetDescription, FleetView, GatewayReport, RolloutStep
from baton.system.addresses import connect
from baton.system.awake_timer import awake_timeout
from baton.system.curve import FAILED_HANDSHAKES, ClusterKeys, PlaneKeys, secure_client
from baton.worker import WorkerRole
from cluster.control_api.desk import MAX_CALLS_OF_ONE, read_reply, unpack_configuration
from cluster.control_api.messages import (
    MAX_MESSAGE_BYTES,
    TO_DOOR,
    BeginRollout,
    Call,
    Describe,
    Done,
    Drain,
    DrainNode,
    FleetConfiguration,
    NextStep,
    NextView,
    Question,
    RolloutBegun,
    RolloutOver,
    Scale,
    SetRole,
    TakeReport,
    TellConfiguration,
    Value,
)
from cluster.control_api.port import set_heartbeats
from cluster.controller.control import CallTimes
from cluster.controller.desired import differences
from cluster.controller.rollout import follow_rollout

logger = logging.getLogger(__name__)

V = TypeVar("V")

CONNECT_S = 5.0
"""What a call waits for a connection; a name has to be looked up, and a door that restarts comes back."""
ANSWER_S = 40.0
"""What the door gets to answer a question that asks for no waiting: a controller that is restarted takes up to 30 s."""
_TRANSIT_S = 5.0
"""Beyond what the door gets: for both ways."""

REFUSED = "it refused the connection in the handshake; are its cluster secret and its network.security ours?"

_RECONNECT_MS, _RECONNECT_MAX_MS = 100, 2000


class FleetClient:
    """An async context manager around one connection, which comes back by itself. See ControllerCalls.

    A call raises what the controller raised, and ClusterError if nobody answers at the door, the connection breaks, or
    the time is over. Nothing is asked twice: what was on its way when the connection broke is for the caller to repeat.
    """

    def __init__(self, address: str, keys: PlaneKeys | None, network: NetworkConfig) -> None:
        """`address` is HOST:PORT. Of `network`, the signs of life count."""
        self.address = address
        self.refusal: str | None = None
        """Why one of us refuses the other: another secret. Nothing but a new life of the door can heal that."""
        self._keys = keys
        self._network = network
        self._times = CallTimes.of(BatonConfig())
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Value]] = {}
        self._fleet: tuple[BatonConfig, Path] | None = None
        self._is_checked = False
        """Over this connection: it is the fleet that we mean."""
        self._is_connected = False
        self._is_known = asyncio.Event()
        """Whether there is a connection, or why there can be none."""

    async def __aenter__(self) -> Self:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.IMMEDIATE, 1)  # nothing queues for a door that is not there
        self._socket.setsockopt(zmq.SNDHWM, MAX_CALLS_OF_ONE)
        self._socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        set_heartbeats(self._socket, self._network)
        secure_client(self._socket, self._keys)
        self._connection = self._socket.get_monitor_socket(
            FAILED_HANDSHAKES | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        )
        connect(self._socket, f"tcp://{self.address}")
        self._tasks = [
            asyncio.create_task(self._listen(), name="fleet door answers"),
            asyncio.create_task(self._watch_connection(), name="fleet door connection"),
        ]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._fail_all(f"the connection to the fleet's door at {self.address} was closed")
        self._socket.disable_monitor()
        self._connection.close()
        self._socket.close()
        self._context.term()

    def with_config(self, config: BatonConfig) -> "FleetClient":
        """The same, once the fleet's configuration is known: how long orders may take stands there."""
        self._times = CallTimes.of(config)
        return self

    async def has_keys(self, keys: ClusterKeys) -> bool:  # noqa: ARG002
        """Whoever answers here has shown in the handshake that its secret is ours."""
        return True

    async def configuration(self) -> tuple[BatonConfig, Path]:
        """The fleet's: from now on, it is this one that we mean."""
        theirs = unpack_configuration(await self._ask(TellConfiguration(), ANSWER_S, FleetConfiguration))
        self._fleet, self._is_checked = theirs, True
        return theirs

    async def next_view(self, controller_incarnation: str, version: int, timeout_s: float) -> FleetView:
        """FleetEnded if another fleet answers there by now."""
        if not self._is_checked:
            await self._check()
        question = NextView(controller_incarnation, version, timeout_s)
        return await self._ask(question, timeout_s + ANSWER_S, FleetView)

    async def report(self, report: GatewayReport) -> None:
        await self._ask(TakeReport(report), ANSWER_S, Done)

    async def describe(self) -> FleetDescription:
        return await self._ask(Describe(), ANSWER_S, FleetDescription)

    async def drain(self, worker: str) -> None:
        await self._ask(Drain(worker), self._times.order_s + ANSWER_S, Done)

    async def drain_node(self, node: str, timeout_s: float) -> None:
        await self._ask(DrainNode(node, timeout_s), timeout_s + ANSWER_S, Done)

    async def set_role(self, worker: str, role: WorkerRole) -> None:
        await self._ask(SetRole(worker, role), self._times.order_s + ANSWER_S, Done)

    async def scale(self, role: WorkerRole, count: int) -> None:
        await self._ask(Scale(role, count), self._times.order_s + ANSWER_S, Done)

    def rollout(self, workers: tuple[str, ...] = ()) -> AsyncIterator[RolloutStep]:
        return follow_rollout(self, workers)

    async def begin_rollout(self, workers: tuple[str, ...]) -> str:
        return (await self._ask(BeginRollout(workers), ANSWER_S, RolloutBegun)).rollout_id

    async def rollout_step(self, rollout_id: str, index: int) -> RolloutStep | None:
        timeout_s = self._times.renew_s + ANSWER_S
        step = await self._ask(NextStep(rollout_id, index), timeout_s, RolloutStep, RolloutOver)
        return step if isinstance(step, RolloutStep) else None

    async def _check(self) -> None:
        former = self._fleet
        config, model_path = await self.configuration()
        if former is None:
            return
        found = differences(former[0], config)
        if model_path != former[1]:
            found.append(f"its model is {model_path}, not {former[1]}")
        if found:
            self._fleet, self._is_checked = former, False
            raise FleetEnded(f"another fleet answers at {self.address} by now: {'; '.join(found)}")

    async def _ask(self, question: Question, timeout_s: float, *kinds: type[V]) -> V:
        await self._until_connected()
        value = await self._call(question, timeout_s)
        if not isinstance(value, kinds):
            raise ClusterError(
                f"the fleet's door answered {type(question).__name__} with {type(value).__name__}"
            )
        return value

    async def _call(self, question: Question, timeout_s: float) -> Value:
        number = next(self._numbers)
        frame = TO_DOOR.encode(Call(number, timeout_s, question))
        answer: asyncio.Future[Value] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            async with awake_timeout(timeout_s + _TRANSIT_S):
                await self._send(frame)
                value = await answer
        except TimeoutError:
            raise ClusterError(
                f"the fleet's door at {self.address} did not answer for {timeout_s + _TRANSIT_S:g} s"
            ) from None
        finally:
            del self._waiting[number]
            answer.cancel()
        return value

    async def _send(self, frame: bytes) -> None:
        try:
            await self._socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            raise ClusterError(
                f"the fleet's door at {self.address} takes nothing more at present; ask again later"
            ) from None

    async def _until_connected(self) -> None:
        with suppress(TimeoutError):
            async with awake_timeout(CONNECT_S):
                await self._is_known.wait()
        if not self._is_connected:
            why = self.refusal or f"nobody has answered there for {CONNECT_S:g} s"
            raise ClusterError(f"no connection to the fleet's door at {self.address}: {why}")

    async def _listen(self) -> None:
        while True:
            frames = await self._socket.recv_multipart()
            try:
                if len(frames) != 1:
                    raise WireError(f"expected one frame, got {len(frames)}")
                number, value = read_reply(frames[0])
            except WireError as error:
                logger.warning("dropped a message of the fleet's door: %s", error)
                continue
            waiting = self._waiting.get(number)
            if waiting is None or waiting.done():
                continue  # nobody waits for it any more
            if isinstance(value, BatonError):
                waiting.set_exception(value)
            else:
                waiting.set_result(value)

    async def _watch_connection(self) -> None:
        num_unexplained = 0
        while True:
            match (await recv_monitor_message(self._connection))["event"]:
                case zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    num_unexplained = 0
                    self.refusal = None
                    self._is_connected = True
                    self._is_known.set()
                    continue
                case zmq.EVENT_DISCONNECTED:
                    self._is_connected = self._is_checked = False
                    if self.refusal is None:
                        self._is_known.clear()
                    self._fail_all(f"the connection to the fleet's door at {self.address} broke")
                    continue
                case zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
                    # The usual answer to a wrong secret is none, but a door that closes in mid-handshake does it once.
                    num_unexplained += 1
                    if num_unexplained == 1:
                        continue
            self.refusal = REFUSED
            self._is_known.set()

    def _fail_all(self, reason: str) -> None:
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(ClusterError(reason))
