"""The desired fleet: worker names and roles. Stored as JSON, it survives its controller."""

import json
from dataclasses import asdict, dataclass, field
from typing import Protocol

from baton.config import ClusterConfig
from baton.worker import WorkerRole


def worker_names(config: ClusterConfig) -> list[tuple[str, WorkerRole]]:
    """Names and roles of a new fleet: w0, w1, ..., prefill workers first. Names do not show roles, which may change."""
    roles = [WorkerRole.PREFILL] * config.prefill + [WorkerRole.DECODE] * config.decode
    return [(f"w{index}", role) for index, role in enumerate(roles)]


@dataclass(slots=True)
class DesiredReplica:
    """One worker of the desired fleet."""

    name: str
    role: WorkerRole
    num_starts: int = 0
    """How many incarnations have begun; also the number of the latest one."""
    is_draining: bool = False
    """The worker is draining. It is removed when the drain ends."""


@dataclass(slots=True)
class DesiredFleet:
    """Every desired worker, by name. Names are never used twice."""

    replicas: dict[str, DesiredReplica] = field(default_factory=dict)
    num_names: int = 0
    draining_nodes: tuple[str, ...] = ()
    """Nodes on which no worker is placed any more; some are gone."""

    @classmethod
    def of(cls, config: ClusterConfig) -> "DesiredFleet":
        replicas = {name: DesiredReplica(name, role) for name, role in worker_names(config)}
        return cls(replicas, len(replicas))

    def add(self, role: WorkerRole) -> DesiredReplica:
        """Adds a replica with a new name."""
        replica = DesiredReplica(f"w{self.num_names}", role)
        self.num_names += 1
        self.replicas[replica.name] = replica
        return replica

    def is_former(self, name: str) -> bool:
        """Whether this is the name of a former worker."""
        return name not in self.replicas and name in {f"w{index}" for index in range(self.num_names)}

    @property
    def leaving(self) -> frozenset[str]:
        """Names of the replicas that are draining."""
        return frozenset(replica.name for replica in self.replicas.values() if replica.is_draining)

    def with_role(self, role: WorkerRole) -> list[DesiredReplica]:
        """Replicas of this role that are not draining, oldest first."""
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
    """Keeps bytes for the controller's next incarnation. When `save` returns, the bytes are stored."""

    def load(self) -> bytes | None: ...

    def save(self, content: bytes) -> None: ...

    def clear(self) -> None: ...


class InMemoryStore:
    """The store of a controller whose fleet does not outlive it."""

    def __init__(self) -> None:
        self._content: bytes | None = None

    def load(self) -> bytes | None:
        return self._content

    def save(self, content: bytes) -> None:
        self._content = content

    def clear(self) -> None:
        self._content = None
