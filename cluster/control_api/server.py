"""FleetDoor: answers gateways and operators over the fleet plane, by asking the fleet's controller."""

import asyncio
import logging
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from baton.config import BatonConfig
from baton.errors import BatonError, ClusterError
from baton.fleet import FleetView
from baton.system.awake_timer import awake_timeout
from baton.system.curve import PlaneKeys
from cluster.control_api.desk import Desk, pack_configuration
from cluster.control_api.messages import (
    BeginRollout,
    Call,
    Describe,
    Done,
    Drain,
    DrainNode,
    FleetConfiguration,
    NextStep,
    NextView,
    Order,
    Question,
    RolloutBegun,
    RolloutOver,
    Scale,
    SetRole,
    TakeReport,
    TellConfiguration,
    Value,
)
from cluster.control_api.port import DoorPort
from cluster.control_api.view_board import ViewBoard
from cluster.controller.control import ControllerCalls

logger = logging.getLogger(__name__)

MAX_ORDERS = 256
"""Under way, whether or not somebody still waits for them."""

FIRST_VIEW_S = 60.0
"""What a controller that has just started, or was just found, gets to say who serves."""

_NOT_YET = "the fleet is still starting"


class FleetDoor:
    """Bound when it is made, so that a port that is taken is known before workers take minutes to start.

    What has begun to be carried out goes on when its caller leaves, or no longer waits.
    """

    def __init__(self, config: BatonConfig, model_path: Path, keys: PlaneKeys | None) -> None:
        """ConfigError if it cannot listen there."""
        self._configuration: FleetConfiguration = pack_configuration(config, model_path)
        self._desk = Desk()
        self._port = DoorPort(config.network, config.cluster.fleet_port, keys)
        self._control: ControllerCalls | None = None
        self._board: ViewBoard | None = None
        self._following: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._orders: set[asyncio.Task[None]] = set()

    @property
    def address(self) -> str:
        """HOST:PORT, as others reach it."""
        return self._port.address

    @property
    def num_denied(self) -> int:
        """Connections that were turned away."""
        return self._port.num_denied

    def open(self) -> None:
        """Whoever asks hears that the fleet is still starting, until `serve`."""
        self._port.open(self._take)

    async def serve(self, control: ControllerCalls) -> FleetView:
        """From now on answers for this controller; who serves at present."""
        self._control, self._board = control, ViewBoard(control)
        self._following = asyncio.create_task(self._board.run(), name="follow the fleet")
        return await self._board.next_view("", -1, FIRST_VIEW_S)

    async def until_ended(self) -> None:
        """Once it serves: until the fleet ends by itself, which raises FleetEnded."""
        assert self._following is not None
        await asyncio.shield(self._following)

    async def close(self, farewell_s: float) -> None:
        """For so long whoever waits for news, or asks for it, hears that the fleet has ended. Right at any moment."""
        if self._board is not None:
            self._board.end("the fleet was ended by its owner")
            await asyncio.sleep(farewell_s)
        tasks = {*self._tasks, *self._orders, *({self._following} if self._following else ())}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._port.close()

    def _take(self, peer: bytes, frames: list[bytes]) -> None:
        call = self._desk.take(peer, frames)
        if isinstance(call, bytes):
            self._port.send(peer, call)
        elif call is not None:
            task = asyncio.create_task(self._carry_out(peer, call))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _carry_out(self, peer: bytes, call: Call) -> None:
        try:
            async with awake_timeout(call.timeout_s):
                frame = self._desk.answer(peer, call.number, await self._ask(call.question))
        except TimeoutError:
            late = ClusterError(f"the fleet's controller did not answer within {call.timeout_s:g} s")
            frame = self._desk.refuse(peer, call.number, late)
        except BatonError as error:
            frame = self._desk.refuse(peer, call.number, error)
        except asyncio.CancelledError:
            frame = self._desk.refuse(peer, call.number, ClusterError("the fleet's door was closed"))
        except Exception as error:  # the edge: who asks must not wait in vain
            logger.exception("a call failed in a way that nobody foresaw")
            failure = ClusterError(f"the fleet's door failed: {type(error).__name__}")
            frame = self._desk.refuse(peer, call.number, failure)
        self._port.send(peer, frame)

    async def _ask(self, question: Question) -> Value:
        control, board = self._control, self._board
        if control is None or board is None:
            raise ClusterError(_NOT_YET)
        match question:
            case NextView(incarnation, version, wait_s):
                return await board.next_view(incarnation, version, wait_s)
            case TellConfiguration():
                return self._configuration
            case Describe():
                return await control.describe()
            case TakeReport(report):
                await control.report(report)
                return Done()
            case BeginRollout(workers):
                return RolloutBegun(await control.begin_rollout(workers))
            case NextStep(rollout_id, index):
                return await control.rollout_step(rollout_id, index) or RolloutOver()
        await self._give(_order_of(control, question))
        return Done()

    async def _give(self, order: Coroutine[Any, Any, None]) -> None:
        """Waits for an order, which goes on when that is cut off."""
        if len(self._orders) >= MAX_ORDERS:
            order.close()
            raise ClusterError(f"{MAX_ORDERS} orders are under way; wait for one of them")
        task = asyncio.create_task(order)
        self._orders.add(task)
        task.add_done_callback(self._note_end)
        await asyncio.shield(task)

    def _note_end(self, task: asyncio.Task[None]) -> None:
        self._orders.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.info("an order was refused or came to nothing: %s", error)


def _order_of(control: ControllerCalls, order: Order) -> Coroutine[Any, Any, None]:
    match order:
        case Drain(worker):
            return control.drain(worker)
        case DrainNode(node, within_s):
            return control.drain_node(node, within_s)
        case SetRole(worker, role):
            return control.set_role(worker, role)
        case Scale(role, count):
            return control.scale(role, count)
