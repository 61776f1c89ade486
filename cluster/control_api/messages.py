"""The fleet plane: what gateways and operators say to a fleet's door and what it answers, as typed values.

A call has a number, which its answer bears, and a time, after which nobody waits for that. Call and Refusal begin with
the version of the plane and the number, in every version of it, so that two ends that would not understand each other's
messages can still say why.
"""

from dataclasses import dataclass, field
from enum import Enum

from baton.errors import BatonError, ClusterError, FleetEnded, FleetError, WireError
from baton.fleet import FleetDescription, FleetView, GatewayReport, RolloutStep
from baton.messages.wire import Codec, unpack
from baton.worker import WorkerRole

FLEET_PLANE_VERSION = 1
"""Counts up whenever a message changes."""

MAX_MESSAGE_BYTES = 4 * 1024 * 1024
"""A description or a report of a thousand workers has some hundred kilobytes to a few megabytes."""


@dataclass(frozen=True, slots=True)
class NextView:
    """Who serves, as soon as that is news to somebody who knows this version, or after the time."""

    controller_incarnation: str
    version: int
    wait_s: float

    def __post_init__(self) -> None:
        if not 0.0 <= self.wait_s < float("inf"):
            raise WireError(f"wait_s: got {self.wait_s:g}; a time of zero or more")


@dataclass(frozen=True, slots=True)
class TakeReport:
    """What a gateway saw lately."""

    report: GatewayReport


@dataclass(frozen=True, slots=True)
class Describe:
    """How the fleet stands."""


@dataclass(frozen=True, slots=True)
class TellConfiguration:
    """As whose owner the fleet's command started it."""


@dataclass(frozen=True, slots=True)
class Drain:
    """Take a worker out for good."""

    worker: str


@dataclass(frozen=True, slots=True)
class DrainNode:
    """Let a node have no workers, and get none."""

    node: str
    """Its address or name."""
    within_s: float

    def __post_init__(self) -> None:
        if not 0.0 <= self.within_s < float("inf"):
            raise WireError(f"within_s: got {self.within_s:g}; a time of zero or more")


@dataclass(frozen=True, slots=True)
class SetRole:
    """Give a worker another role."""

    worker: str
    role: WorkerRole


@dataclass(frozen=True, slots=True)
class Scale:
    """Let there be so many workers of a role."""

    role: WorkerRole
    count: int


@dataclass(frozen=True, slots=True)
class BeginRollout:
    """Restart these workers, or all, one after the other."""

    workers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class NextStep:
    """The step of this number of a rollout, once it is done."""

    rollout_id: str
    index: int

    def __post_init__(self) -> None:
        if self.index < 0:
            raise WireError(f"index: got {self.index}; steps count from 0")


Order = Drain | DrainNode | SetRole | Scale
"""The controller's own as soon as it is given: it is carried out, whoever still waits for that."""
Question = NextView | TakeReport | Describe | TellConfiguration | BeginRollout | NextStep | Order


@dataclass(frozen=True, slots=True)
class Done:
    """What was asked for is done."""


@dataclass(frozen=True, slots=True)
class FleetConfiguration:
    """The fleet's own, but for its gateway's and its logs' sections: those are each process's own."""

    sections: str
    """JSON: of each section the keys that were set."""
    model_path: str
    """The model's folder, as its owner's machine knows it."""


@dataclass(frozen=True, slots=True)
class RolloutBegun:
    """Its steps are to be asked for by this id."""

    rollout_id: str


@dataclass(frozen=True, slots=True)
class RolloutOver:
    """There is no such step: the rollout is done."""


Value = FleetView | FleetDescription | FleetConfiguration | Done | RolloutBegun | RolloutStep | RolloutOver


@dataclass(frozen=True, slots=True)
class Call:
    """To the door."""

    version: int = field(default=FLEET_PLANE_VERSION, kw_only=True)
    number: int
    """Another one for each call over one connection."""
    timeout_s: float
    question: Question

    def __post_init__(self) -> None:
        _check_version(self.version)
        if not 0.0 < self.timeout_s < float("inf"):
            raise WireError(f"timeout_s: got {self.timeout_s:g}; a time above zero")


@dataclass(frozen=True, slots=True)
class Answer:
    """What the controller said."""

    number: int
    value: Value


class RefusalKind(Enum):
    """What the controller raised, or the door itself."""

    CLUSTER_ERROR = "cluster_error"
    FLEET_ERROR = "fleet_error"
    FLEET_ENDED = "fleet_ended"


ERROR_KINDS: dict[RefusalKind, type[BatonError]] = {
    RefusalKind.FLEET_ENDED: FleetEnded,
    RefusalKind.FLEET_ERROR: FleetError,
    RefusalKind.CLUSTER_ERROR: ClusterError,
}
"""The first that fits counts: a FleetEnded is a ClusterError, too."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """An answer in place of another: why there is none."""

    version: int = field(default=FLEET_PLANE_VERSION, kw_only=True)
    number: int
    kind: RefusalKind
    message: str

    def __post_init__(self) -> None:
        _check_version(self.version)


TO_DOOR: Codec[Call] = Codec(Call, max_bytes=MAX_MESSAGE_BYTES)
FROM_DOOR: Codec[Answer | Refusal] = Codec(Answer, Refusal, max_bytes=MAX_MESSAGE_BYTES)


def foreign_version(frame: bytes) -> tuple[int, int] | None:
    """Version and number of a Call or Refusal that could not be decoded, if it is of another version than ours."""
    try:
        parts = unpack(frame)
    except WireError:
        return None
    if not isinstance(parts, list) or len(parts) < 3 or parts[0] not in (Call.__name__, Refusal.__name__):
        return None
    version, number = parts[1:3]
    is_foreign = type(version) is int and type(number) is int and version != FLEET_PLANE_VERSION
    return (version, number) if is_foreign else None


def _check_version(version: int) -> None:
    if version != FLEET_PLANE_VERSION:
        raise WireError(f"version {version} of the fleet plane, ours is {FLEET_PLANE_VERSION}")
