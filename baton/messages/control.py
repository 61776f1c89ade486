"""The control API's messages: what operators and gateways ask a controller, and what a controller asks a worker.

A request names the type of its answer, so calls are typed over any carrier: `await control.call(DrainWorker("w1"))`.
baton/messages/control_codec.py encodes the messages.
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass, fields
from typing import Any, Generic, Protocol, TypeVar, get_args

from baton.errors import (
    BatonError,
    ClusterError,
    ConfigError,
    FleetEnded,
    FleetError,
    ModelError,
    OtherFleetVersion,
    UnknownWorker,
    WireError,
)
from baton.fleet import CacheFlush, FleetDescription, FleetView, GatewayReport, RolloutStep
from baton.worker import StartProgress, WorkerRole, WorkerStatus

MAY_BE_CARRIED_OUT = "the fleet may still carry out the command; see `baton status`"
"""The end of an error's text if a command was sent, and its answer was lost."""

CONTROL_PLANE_VERSION = 14
"""Increases whenever one of these messages or a frame of control_codec.py changes, or REQUEST_PLANE_VERSION increases.

So a gateway to which a controller answers can talk to the controller's workers. A controller takes over only workers
that its gateways can use, and ends all others.
"""

R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


@dataclass(frozen=True, slots=True)
class ControlRequest(Generic[R_co]):
    """One call. `R_co` is the type of its answer. A field whose name ends in `_s` is a time, and at least 0.

    A subclass with a `__post_init__` of its own calls `ControlRequest.__post_init__(self)`.
    """

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.name.endswith("_s"):
                check_time(field.name, getattr(self, field.name))


def check_time(name: str, seconds: float) -> None:
    """Raises WireError for a time that is negative or not finite."""
    if not 0.0 <= seconds < float("inf"):
        raise WireError(f"{name} must be zero or more, got {seconds:g}")


def answer_type(request: type[ControlRequest[R]]) -> type[R]:
    """The type that a request's class names as its answer."""
    bases: tuple[Any, ...] = request.__orig_bases__  # type: ignore[attr-defined]
    kind: type[R] = get_args(bases[0])[0]
    return kind


class ControlApi(Protocol):
    """A fleet's controller, in this process or behind a carrier.

    A call raises FleetError if the fleet refuses it or cannot carry it out. ClusterError: the controller is
    unreachable, the fleet is starting or ending, or too many calls are running. Two ClusterErrors are lasting.
    FleetEnded: the fleet has ended for good. OtherFleetVersion: it runs another version of Baton.
    """

    async def call(self, request: ControlRequest[R]) -> R: ...


_ERRORS: dict[str, type[BatonError]] = {
    kind.__name__: kind
    for kind in (
        FleetEnded,
        OtherFleetVersion,
        ClusterError,
        UnknownWorker,
        FleetError,
        ConfigError,
        ModelError,
        WireError,
    )
}
"""Errors that keep their type on the way, each before the types it derives from. All others arrive as ClusterErrors."""

_MAX_REASON = 4096
"""The most characters of an error's message."""


@dataclass(frozen=True, slots=True)
class CallFailure:
    """A BatonError, as it is sent to the caller."""

    kind: str
    reason: str

    @classmethod
    def of(cls, error: BatonError) -> "CallFailure":
        kinds = (name for name, kind in _ERRORS.items() if isinstance(error, kind))
        # A path in the message may contain any bytes.
        reason = str(error)[:_MAX_REASON].encode("utf-8", "replace").decode()
        return cls(next(kinds, ClusterError.__name__), reason)

    def to_error(self) -> BatonError:
        return _ERRORS.get(self.kind, ClusterError)(self.reason)


# Answers that several calls share, or that no other module defines.


@dataclass(frozen=True, slots=True)
class Done:
    """The call has been carried out."""


@dataclass(frozen=True, slots=True)
class FleetConfiguration:
    """The configuration that the fleet was started with, without the sections that each process configures for
    itself."""

    sections: str
    """JSON: the keys that were set, by section."""
    model_path: str
    """The model's folder on the machine of the fleet's owner."""
    keys_digest: str
    """A digest of a key that is derived from the cluster secret: equal digests mean equal secrets."""


@dataclass(frozen=True, slots=True)
class RolloutBegun:
    """`rollout_id` names the rollout in WaitRolloutStep."""

    rollout_id: str


@dataclass(frozen=True, slots=True)
class RolloutProgress:
    """The requested step; None after the last one."""

    step: RolloutStep | None


@dataclass(frozen=True, slots=True)
class StartReport:
    """Progress of a fleet's first start, as of `version`."""

    version: int
    progress: tuple[tuple[str, StartProgress], ...]
    """The progress of each worker that is loading its model, by the worker's name."""
    placing: tuple[str, ...]
    """Workers that have found no room yet."""
    unready: tuple[tuple[str, str], ...]
    """Workers that do not serve yet, each with the reason why its last incarnation failed, if it did."""
    lacking: tuple[WorkerRole, ...]
    """Roles that should have workers, but have none that serves."""
    failure: CallFailure | None
    """An error that no further try would change; None if there is none."""


@dataclass(frozen=True, slots=True)
class Drained:
    """The worker has no requests left. `is_clean`: it also has no transfers and leases. Otherwise, other workers may
    have to compute again what they did not read in time."""

    is_clean: bool


@dataclass(frozen=True, slots=True)
class CachesFlushed:
    """The result for each worker's prefix cache."""

    workers: tuple[CacheFlush, ...]


# Calls of a fleet's controller.


@dataclass(frozen=True, slots=True)
class WaitView(ControlRequest[FleetView]):
    """Asks for the workers that serve. Answered once they differ from `version`, or after `wait_s`."""

    controller_incarnation: str
    version: int
    wait_s: float


@dataclass(frozen=True, slots=True)
class ReportLoad(ControlRequest[Done]):
    """Passes a gateway's recent measurements to the autoscaler."""

    report: GatewayReport


@dataclass(frozen=True, slots=True)
class DescribeFleet(ControlRequest[FleetDescription]):
    """Asks for all replicas and nodes of the fleet."""


@dataclass(frozen=True, slots=True)
class GetConfiguration(ControlRequest[FleetConfiguration]):
    """Asks for the configuration that the fleet was started with."""


@dataclass(frozen=True, slots=True)
class DrainWorker(ControlRequest[Done]):
    """Drains and removes a worker. Answered once the worker is removed."""

    worker: str


@dataclass(frozen=True, slots=True)
class DrainNode(ControlRequest[Done]):
    """Drains a node. Answered once the node has no workers and gets no new ones; FleetError after `within_s`."""

    node: str
    """The node's address or name."""
    within_s: float


@dataclass(frozen=True, slots=True)
class SetWorkerRole(ControlRequest[Done]):
    """Changes a worker's role. Answered once it serves in the new role; FleetError if it keeps its old role."""

    worker: str
    role: WorkerRole


@dataclass(frozen=True, slots=True)
class FlushCaches(ControlRequest[CachesFlushed]):
    """Empties these workers' prefix caches (all if none is given). `force`: even while blocks are in use."""

    workers: tuple[str, ...]
    force: bool


@dataclass(frozen=True, slots=True)
class ScaleRole(ControlRequest[Done]):
    """Sets a role's number of workers. Begins to start new workers, or waits until the least busy ones are drained."""

    role: WorkerRole
    count: int


@dataclass(frozen=True, slots=True)
class BeginRollout(ControlRequest[RolloutBegun]):
    """Restarts these workers (all if none is given), one by one, even if the caller disconnects."""

    workers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class WaitRolloutStep(ControlRequest[RolloutProgress]):
    """Asks for the step of this number. Answered once the step is done. If the rollout has failed, raises its error."""

    rollout_id: str
    index: int

    def __post_init__(self) -> None:
        ControlRequest.__post_init__(self)
        if self.index < 0:
            raise WireError(f"index: got {self.index}; steps count from 0")


@dataclass(frozen=True, slots=True)
class WaitStart(ControlRequest[StartReport]):
    """Asks for the first start's progress. Answered once it differs from `version`, or after `wait_s`."""

    version: int
    wait_s: float


@dataclass(frozen=True, slots=True)
class EndFleet(ControlRequest[Done]):
    """Ends all workers, after a drain if `may_drain`."""

    may_drain: bool


async def follow_rollout(control: ControlApi, workers: tuple[str, ...] = ()) -> AsyncIterator[RolloutStep]:
    """Begins a rollout and yields its steps as they are done."""
    rollout_id = (await control.call(BeginRollout(workers))).rollout_id
    index = 0
    while (step := (await control.call(WaitRolloutStep(rollout_id, index))).step) is not None:
        yield step
        index += 1


# Calls of one worker.


@dataclass(frozen=True, slots=True)
class WaitStatus(ControlRequest[WorkerStatus]):
    """Asks for the worker's status. Answered after `after_s`, or as soon as the worker has ended."""

    after_s: float


@dataclass(frozen=True, slots=True)
class Drain(ControlRequest[Drained]):
    """Drains the worker for good; running requests have `timeout_s` to end."""

    timeout_s: float


@dataclass(frozen=True, slots=True)
class SetRole(ControlRequest[Done]):
    """Changes the worker's role. Answered once it serves in this role; FleetError if it keeps its old role."""

    role: WorkerRole
    timeout_s: float


@dataclass(frozen=True, slots=True)
class FlushCache(ControlRequest[Done]):
    """Empties the worker's prefix cache. FleetError if that does not succeed within `timeout_s`."""

    force: bool
    timeout_s: float


WORKER_CALLS: tuple[type[ControlRequest[Any]], ...] = (WaitStatus, Drain, SetRole, FlushCache)
