"""The table of a controller's calls: the method that answers, how long that takes, and who may call."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from baton.messages.control import (
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
    Ownership,
    ReportLoad,
    ScaleRole,
    SetWorkerRole,
    WaitOwner,
    WaitRolloutStep,
    WaitStart,
    WaitView,
)
from baton.messages.control_codec import ControlCodec
from cluster.controller.controller import Controller
from cluster.controller.supervisor import Patience

R = TypeVar("R")


class InProcessControl:
    """The control API of a controller in this process."""

    def __init__(self, controller: Controller, configuration: FleetConfiguration) -> None:
        self.controller = controller
        self.configuration = configuration

    async def call(self, request: ControlRequest[R]) -> R:
        answer: R = await CALLS[type(request)].answer(self, request)
        return answer


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRow:
    """The properties of one call."""

    answer: Callable[[InProcessControl, Any], Awaitable[Any]]
    wait_s: Callable[[Any, Patience], float] = lambda request, patience: 0.0  # noqa: ARG005
    """How long the answer may take in this fleet, in addition to the time that any answer takes."""
    is_command: bool = False
    """A command that has begun is completed even if its caller disconnects."""
    is_for_owner: bool = False
    """Only the process that owns the fleet may make this call. Over the network, the call is refused."""


async def _done(work: Awaitable[None]) -> Done:
    await work
    return Done()


def _leave_s(_: object, patience: Patience) -> float:
    """Time for a drain or a change of role, which may first wait for another one of the same worker."""
    return 2 * patience.leave_s


def _renew_s(_: object, patience: Patience) -> float:
    """Time for one step of a rollout."""
    return 2 * (patience.leave_s + patience.start_s)


async def _configuration(fleet: InProcessControl) -> FleetConfiguration:
    return fleet.configuration


async def _ownership(fleet: InProcessControl, request: WaitOwner) -> Ownership:
    return Ownership(await fleet.controller.is_owned(request.within_s))


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
        wait_s=_leave_s,
        is_command=True,
    ),
    DrainNode: CallRow(
        answer=lambda fleet, request: _done(fleet.controller.drain_node(request.node, request.within_s)),
        wait_s=lambda request, _: request.within_s,
        is_command=True,
    ),
    SetWorkerRole: CallRow(
        answer=lambda fleet, request: _done(fleet.controller.set_role(request.worker, request.role)),
        wait_s=_leave_s,
        is_command=True,
    ),
    FlushCaches: CallRow(
        answer=lambda fleet, request: fleet.controller.flush_caches(request.workers, force=request.force),
        wait_s=lambda _, patience: patience.unresponsive_s,
        is_command=True,
    ),
    ScaleRole: CallRow(
        answer=lambda fleet, request: _done(fleet.controller.scale(request.role, request.count)),
        wait_s=_leave_s,
        is_command=True,
    ),
    BeginRollout: CallRow(
        answer=lambda fleet, request: fleet.controller.rollouts.begin_rollout(request.workers)
    ),
    WaitRolloutStep: CallRow(
        answer=lambda fleet, request: fleet.controller.rollouts.wait_step(request.rollout_id, request.index),
        wait_s=_renew_s,
    ),
    # calls of the fleet's owner
    WaitStart: CallRow(
        answer=lambda fleet, request: fleet.controller.wait_start(request),
        wait_s=lambda request, _: request.wait_s,
        is_for_owner=True,
    ),
    WaitOwner: CallRow(answer=_ownership, wait_s=lambda request, _: request.within_s, is_for_owner=True),
    EndFleet: CallRow(
        answer=lambda fleet, request: _done(fleet.controller.shutdown(may_drain=request.may_drain)),
        wait_s=_leave_s,
        is_for_owner=True,
    ),
}

CONTROL_CODEC = ControlCodec(CALLS)
