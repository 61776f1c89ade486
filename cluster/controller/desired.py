"""The desired fleet: worker names and roles. Stored as JSON, it survives its controller."""

import json
from dataclasses import asdict, dataclass, field
from typing import Protocol

from baton.config import BatonConfig, ClusterConfig
from baton.hub_name import is_same_repository, leaves_open
from baton.worker import WorkerRole


def worker_names(config: ClusterConfig) -> list[tuple[str, WorkerRole]]:
    """Names and roles of a new fleet: w0, w1, ..., prefill workers first. Names do not show roles, which may change."""
    roles = [WorkerRole.PREFILL] * config.prefill + [WorkerRole.DECODE] * config.decode
    return [(f"w{index}", role) for index, role in enumerate(roles)]


_OF_ONE_COMMAND = {
    ("cluster", "drain_timeout_s"),
    ("cluster", "start_timeout_s"),
    ("engine", "trace_dir"),
    ("model", "path"),
    ("network", "secret_file"),
}
"""Timeouts of one command, and paths on its machine: each machine may store the model under another path."""


_ADDRESSES = {("cluster", key) for key in ("ray_address", "ray_timeout_s", "fleet_address", "fleet_port")}
"""Keys of addresses: different addresses may lead to the same fleet."""

_COUNTS = {("cluster", role.value) for role in WorkerRole}
"""Keys of the initial numbers of workers, which may change while the fleet runs."""

_CHOSEN = {
    ("model", "dtype"): ("float32", "bfloat16", "float16"),
    ("engine", "kv_cache_dtype"): ("bfloat16",),
}
"""Values that the command which started the fleet may have chosen for `auto`, if `model.dtype` is `auto`. That command
also decided the commit of a model that is named without a commit (`leaves_open`)."""


def differences(
    there: BatonConfig,
    here: BatonConfig,
    *,
    only_set: bool = False,
    is_one_file: bool = False,
    places: tuple[str, str] = ("in the running fleet", "in this configuration"),
) -> list[str]:
    """One line for each key whose two values mean different fleets; `places` say in it where each of the two is.

    The sections `gateway` and `logging` may differ, and so may addresses, unless both are the file of the same command,
    `is_one_file`: then only keys of gateways alone may. `only_set` compares only keys that are set in `here`, and skips
    keys that concern only one command.
    """
    found = []
    may_differ = _COUNTS if is_one_file else _ADDRESSES | _COUNTS
    for section in BatonConfig.model_fields:
        if section in ("gateway", "logging") and not is_one_file:
            continue
        values, others = getattr(there, section), getattr(here, section)
        for key in type(values).model_fields:
            if (section, key) in may_differ or (section == "gateway" and key != "max_in_flight"):
                continue
            if only_set and (key not in others.model_fields_set or (section, key) in _OF_ONE_COMMAND):
                continue
            value, other = getattr(values, key), getattr(others, key)
            if (section, key) == ("model", "path") and leaves_open(other, value):
                continue
            if (section, key) == ("speculation", "draft_model") and is_same_repository(other, value):
                continue  # another commit guesses other drafts; the answer stays the same
            if here.model.dtype == other == "auto" and value in _CHOSEN.get((section, key), ()):
                continue
            if value != other:
                found.append(f"{section}.{key} is {value!r} {places[0]}, {other!r} {places[1]}")
    return found


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
    """Nodes on which no worker is placed any more."""

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

    def was_there(self, name: str) -> bool:
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


class Memory:
    """The store of a controller whose fleet does not outlive it."""

    def __init__(self) -> None:
        self._content: bytes | None = None

    def load(self) -> bytes | None:
        return self._content

    def save(self, content: bytes) -> None:
        self._content = content

    def clear(self) -> None:
        self._content = None
