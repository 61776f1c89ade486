"""The calls of a controller: their table, their answers in the controller's process, and a client over a carrier."""

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from baton.errors import ClusterError, FleetEnded
from baton.messages.control import (
    MAY_BE_CARRIED_OUT,
    BeginRollout,
    ControlRequest,
    DescribeFleet,
    Done,
    DrainNode,
    DrainWorker,
    EndFleet,
    FleetConfiguration,
    FlushCaches,
    GetConfiguration,
    ReportLoad,
    ScaleRole,
    SetWorkerRole,
    WaitRolloutStep,
    WaitStart,
    WaitView,
)
from baton.messages.control_codec import CallFrame, ControlCodec, Reply
from cluster.control_api.configuration import differences, unpack_configuration
from cluster.controller.controller import Controller
from cluster.controller.supervisor import Patience

logger = logging.getLogger(__name__)

R = TypeVar("R")

MAX_COMMANDS = 256
"""The most commands that may run at the same time, with or without a waiting caller."""

_IS_ENDING = "the fleet is ending; try again when it has ended"


class InProcessControl:
    """The control API of a controller in this process."""

    def __init__(self, controller: Controller, configuration: FleetConfiguration) -> None:
        self.controller = controller
        self.configuration = configuration
        self._commands: set[asyncio.Future[Any]] = set()
        self._num_ends = 0
        """How many calls of EndFleet are running."""
        self._has_ended = False

    async def call(self, request: ControlRequest[R]) -> R:
        """See ControlApi. A command continues if this call is cancelled.

        Raises ClusterError if MAX_COMMANDS commands run, even for the owner's ScaleRole. While the fleet ends, commands
        and rollouts are refused: they could start a worker when all others have ended.
        """
        row = CALLS[type(request)]
        if self._has_ended and not isinstance(request, EndFleet):
            raise FleetEnded("the fleet was ended by its owner")
        if self.is_ending and (row.is_command or row.is_of_rollout):
            raise ClusterError(_IS_ENDING)
        answer: R = await (self._command(row, request) if row.is_command else row.answer(self, request))
        return answer

    @property
    def num_commands(self) -> int:
        """How many commands run now, with or without a waiting caller."""
        return len(self._commands)

    @property
    def is_ending(self) -> bool:
        return self._num_ends > 0

    async def end(self, *, may_drain: bool) -> None:
        """Ends the fleet. Later calls raise FleetEnded."""
        self._num_ends += 1
        try:
            await self.controller.shutdown(may_drain=may_drain)
            self._has_ended = True
        finally:
            self._num_ends -= 1

    async def _command(self, row: "CallRow", request: ControlRequest[Any]) -> Any:
        if self.num_commands >= MAX_COMMANDS:
            raise ClusterError(f"{MAX_COMMANDS} commands are running; wait for one of them to end")
        command = asyncio.ensure_future(row.answer(self, request))
        self._commands.add(command)
        command.add_done_callback(self._on_command_done)
        try:
            return await asyncio.shield(command)
        except asyncio.CancelledError:
            command.add_done_callback(_warn_of_failure)
            raise

    def _on_command_done(self, command: asyncio.Future[Any]) -> None:
        self._commands.discard(command)
        if (error := _error_of(command)) is not None:
            logger.info("a command was refused or failed: %s", error)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRow:
    """The properties of one call."""

    answer: Callable[[InProcessControl, Any], Awaitable[Any]]
    wait_s: Callable[[Any, Patience], float] = lambda request, patience: 0.0  # noqa: ARG005
    """How long the answer may take in this fleet, in addition to the time that any answer takes."""
    is_command: bool = False
    """A command that has begun is completed even if its caller disconnects."""
    is_of_rollout: bool = False
    """The call begins or follows a rollout. A rollout, like a command, continues even if its caller disconnects."""
    is_for_owner: bool = False
    """Only the process that owns the fleet may make this call. Over the network, the call is refused."""


def _warn_of_failure(command: asyncio.Future[Any]) -> None:
    """Logs the error of a command whose caller does not wait any more."""
    if (error := _error_of(command)) is not None:
        logger.warning("a command was refused or failed, and its caller had left: %s", error)


def _error_of(command: asyncio.Future[Any]) -> BaseException | None:
    return None if command.cancelled() else command.exception()


async def _done(work: Awaitable[None]) -> Done:
    await work
    return Done()


def _two_drains_s(_: object, patience: Patience) -> float:
    """Time for a drain or a change of role, which may first wait for the end of another one on the same worker."""
    return 2 * patience.whole_drain_s


def _renew_s(_: object, patience: Patience) -> float:
    """Time for one step of a rollout."""
    return 2 * (patience.whole_drain_s + patience.start_s)


async def _configuration(fleet: InProcessControl) -> FleetConfiguration:
    if fleet.is_ending:  # the owner that began the end may have died since
        raise ClusterError(_IS_ENDING)
    return fleet.configuration


CALLS: dict[type[ControlRequest[Any]], CallRow] = {
    # calls of gateways
    WaitView: CallRow(
        answer=lambda fleet, request: fleet.controller.wait_view(request),
        wait_s=lambda request, _: request.wait_s,
    ),
    ReportLoad: CallRow(answer=lambda fleet, request: _done(fleet.controller.report(request.report))),
    GetConfiguration: CallRow(answer=lambda fleet, _: _configuration(fleet)),
    # calls of operators
    DescribeFleet: CallRow(answer=lambda fleet, _: fleet.controller.describe()),
    DrainWorker: CallRow(
        answer=lambda fleet, request: _done(fleet.controller.drain(request.worker)),
        wait_s=_two_drains_s,
        is_command=True,
    ),
    DrainNode: CallRow(
        answer=lambda fleet, request: _done(fleet.controller.drain_node(request.node, request.within_s)),
        wait_s=lambda request, _: request.within_s,
        is_command=True,
    ),
    SetWorkerRole: CallRow(
        answer=lambda fleet, request: _done(fleet.controller.set_role(request.worker, request.role)),
        wait_s=_two_drains_s,
        is_command=True,
    ),
    FlushCaches: CallRow(
        answer=lambda fleet, request: fleet.controller.flush_caches(request.workers, force=request.force),
        wait_s=lambda _, patience: patience.unresponsive_s,
        is_command=True,
    ),
    ScaleRole: CallRow(
        answer=lambda fleet, request: _done(fleet.controller.scale(request.role, request.count)),
        wait_s=_two_drains_s,
        is_command=True,
    ),
    BeginRollout: CallRow(
        answer=lambda fleet, request: fleet.controller.rollouts.begin_rollout(request.workers),
        is_of_rollout=True,
    ),
    WaitRolloutStep: CallRow(
        answer=lambda fleet, request: fleet.controller.rollouts.wait_step(request.rollout_id, request.index),
        wait_s=_renew_s,
        is_of_rollout=True,
    ),
    # calls of the fleet's owner
    WaitStart: CallRow(
        answer=lambda fleet, request: fleet.controller.wait_start(request),
        wait_s=lambda request, _: request.wait_s,
        is_for_owner=True,
    ),
    EndFleet: CallRow(
        answer=lambda fleet, request: _done(fleet.end(may_drain=request.may_drain)),
        wait_s=_two_drains_s,
        is_for_owner=True,
    ),
}

CONTROL_CODEC = ControlCodec(CALLS)


class CallNotSent(ClusterError):
    """A carrier could not send the call. After any other error of a carrier, the controller may have the call."""


def lost_reply(error: ClusterError, request: ControlRequest[Any]) -> ClusterError:
    """The error of a call that was sent and got no reply. For a command, the error says that the fleet may
    still carry it out."""
    row = CALLS[type(request)]
    if not (row.is_command or row.is_of_rollout):
        return error
    return ClusterError(f"{error}; {MAY_BE_CARRIED_OUT}")


class Carrier(Protocol):
    """Carries a call to a controller and the reply back; knows no message. Raises ClusterError on failure:
    CallNotSent if the controller has surely not got the call."""

    @property
    def address(self) -> str:
        """Where the controller is, for error messages."""
        ...

    @property
    def connection(self) -> int:
        """The number of the current connection. It changes with each new connection, which may lead to another
        fleet."""
        ...

    @property
    def refusal(self) -> str | None:
        """Why one end refuses the other, e.g. because the secrets differ; None if neither does. Only a restart of the
        other end can change this."""
        ...

    async def exchange(self, frame: CallFrame, hangs_after_s: float | None = None) -> Reply:
        """Sends the call; returns the reply. A controller that takes `hangs_after_s` longer than `frame.timeout_s`
        counts as hanging."""
        ...


class ControlClient:
    """See baton.messages.control.ControlApi. The client repeats no call, but a carrier may. If the carrier does not, a
    broken connection ends running calls."""

    def __init__(self, carrier: Carrier, patience: Patience) -> None:
        """`patience` applies until GetConfiguration has returned the fleet's configuration."""
        self.carrier = carrier
        self.patience = patience
        self._numbers = itertools.count(1)
        self._fleet: FleetConfiguration | None = None
        self._checked_connection = 0

    async def call(self, request: ControlRequest[R]) -> R:
        """Raises the controller's error. WaitView raises FleetEnded if another fleet now answers at this address."""
        hangs_after_s = None
        if isinstance(request, WaitView):
            hangs_after_s = self.patience.unresponsive_s
            await self._check_fleet()
        wait_s = CALLS[type(request)].wait_s(request, self.patience)
        frame = CONTROL_CODEC.frame(next(self._numbers), wait_s, request)
        try:
            reply = await self.carrier.exchange(frame, hangs_after_s)
        except CallNotSent:
            raise
        except ClusterError as error:
            raise lost_reply(error, request) from None
        value = CONTROL_CODEC.value_in(reply, request)
        if isinstance(value, FleetConfiguration):
            self._note_fleet(value)
        return value

    def _note_fleet(self, fleet: FleetConfiguration) -> None:
        self._fleet, self._checked_connection = fleet, self.carrier.connection
        self.patience = Patience.of(unpack_configuration(fleet)[0])

    async def _check_fleet(self) -> None:
        """After a new connection, checks that the same fleet answers. Raises FleetEnded if it is another fleet."""
        if self._checked_connection == self.carrier.connection:
            return
        former = self._fleet
        now = await self.call(GetConfiguration())
        if former is None or not (found := _differences(former, now)):
            return
        self._fleet, self._checked_connection = former, -1
        raise FleetEnded(f"another fleet now answers at {self.carrier.address}: {'; '.join(found)}")


def _differences(former: FleetConfiguration, now: FleetConfiguration) -> list[str]:
    (config, model_path), (other, other_path) = unpack_configuration(former), unpack_configuration(now)
    found = differences(config, other, places=("in the former fleet", "in this one"))
    if model_path != other_path:
        found.append(f"its model is {other_path}, not {model_path}")
    return found
