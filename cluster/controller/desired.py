"""What there is to be: worker names and roles, as asked for last; as JSON it survives its controller."""

import json
from dataclasses import asdict, dataclass, field
from typing import Protocol

from baton.config import BatonConfig
from baton.worker import WorkerRole


def worker_names(config: BatonConfig) -> list[tuple[str, WorkerRole]]:
    """The fleet by name: w0, w1, ..., prefill workers first. A name says nothing of a role: roles may change."""
    prefill, decode = config.cluster.prefill, config.cluster.decode
    roles = [WorkerRole.PREFILL] * prefill + [WorkerRole.DECODE] * decode
    return [(f"w{index}", role) for index, role in enumerate(roles)]


_OF_ONE_COMMAND = {
    ("cluster", "drain_timeout_s"),
    ("cluster", "start_timeout_s"),
    ("engine", "trace_dir"),
    ("model", "path"),
    ("network", "secret_file"),
}
"""How patient a gateway is, and where something is as seen from its machine: several places hold the same model."""


_WAYS = {("cluster", key) for key in ("ray_address", "ray_timeout_s", "fleet_address", "fleet_port")}
"""Several lead to the same fleet."""

_COUNTS = {("cluster", role.value) for role in WorkerRole}
"""A fleet begins with so many workers, and stays the same when it has others."""


def differences(there: BatonConfig, here: BatonConfig, *, only_set: bool = False) -> list[str]:
    """In what two configurations would make different fleets, one line for each key. Gateways may differ, and
    what processes log.

    With `only_set`: what was set here contradicts what is there; what was not set, or is each command's own, does not.
    """
    found = []
    for section in BatonConfig.model_fields:
        if section in ("gateway", "logging"):
            continue
        values, others = getattr(there, section), getattr(here, section)
        for key in type(values).model_fields:
            if (section, key) in _WAYS | _COUNTS:
                continue
            if only_set and (key not in others.model_fields_set or (section, key) in _OF_ONE_COMMAND):
                continue
            value, other = getattr(values, key), getattr(others, key)
            if value != other:
                found.append(f"{section}.{key} is {value!r} there, {other!r} here")
    return found


@dataclass(slots=True)
class DesiredReplica:
    """One worker that there is to be."""

    name: str
    role: WorkerRole
    num_starts: int = 0
    """Lives begun so far: the number of the latest."""
    is_draining: bool = False
    """It is drained, and does not come back."""


@dataclass(slots=True)
class DesiredFleet:
    """Every worker that there is to be, by name. Names are never used twice."""

    replicas: dict[str, DesiredReplica] = field(default_factory=dict)
    num_names: int = 0
    draining_nodes: tuple[str, ...] = ()
    """Where nothing is placed any more."""

    @classmethod
    def of(cls, config: BatonConfig) -> "DesiredFleet":
        replicas = {name: DesiredReplica(name, role) for name, role in worker_names(config)}
        return cls(replicas, len(replicas))

    def add(self, role: WorkerRole) -> DesiredReplica:
        """One more, with a name that nobody ever had."""
        replica = DesiredReplica(f"w{self.num_names}", role)
        self.num_names += 1
        self.replicas[replica.name] = replica
        return replica

    def was_there(self, name: str) -> bool:
        """Whether this is the name of a worker that left."""
        return name not in self.replicas and name in {f"w{index}" for index in range(self.num_names)}

    def with_role(self, role: WorkerRole) -> list[DesiredReplica]:
        """Those that stay, in the order of their making."""
        return [
            replica for replica in self.replicas.values() if replica.role is role and not replica.is_draining
        ]

    def to_json(self) -> bytes:
        replicas = [{**asdict(replica), "role": replica.role.value} for replica in self.replicas.values()]
        nodes = list(self.draining_nodes)
        return json.dumps(
            {"replicas": replicas, "num_names": self.num_names, "draining_nodes": nodes}
        ).encode()

    @classmethod
    def from_json(cls, text: bytes) -> "DesiredFleet":
        values = json.loads(text)
        replicas = [
            DesiredReplica(**{**replica, "role": WorkerRole(replica["role"])})
            for replica in values["replicas"]
        ]
        nodes = tuple(values["draining_nodes"])
        return cls({replica.name: replica for replica in replicas}, values["num_names"], nodes)


class Store(Protocol):
    """Keeps bytes where the next incarnation of a controller finds them; `save` is done when it returns."""

    def load(self) -> bytes | None: ...

    def save(self, content: bytes) -> None: ...

    def clear(self) -> None: ...


class Memory:
    """For a controller whose fleet does not outlive it."""

    def __init__(self) -> None:
        self._content: bytes | None = None

    def load(self) -> bytes | None:
        return self._content

    def save(self, content: bytes) -> None:
        self._content = content

    def clear(self) -> None:
        self._content = None
