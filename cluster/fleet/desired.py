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


def differences(there: BatonConfig, here: BatonConfig) -> list[str]:
    """In what two configurations would make different fleets, one line for each key. Gateways may differ."""
    found = []
    for section in BatonConfig.model_fields:
        if section == "gateway":
            continue
        values, others = getattr(there, section), getattr(here, section)
        for key in type(values).model_fields:
            if (section, key) == ("cluster", "ray_address"):  # several lead to the same cluster
                continue
            value, other = getattr(values, key), getattr(others, key)
            if value != other:
                found.append(f"{section}.{key} is {value!r} there, {other!r} here")
    return found


@dataclass(slots=True)
class DesiredSlot:
    """One worker that there is to be."""

    name: str
    role: WorkerRole
    num_starts: int = 0
    """Lives begun so far: the number of the latest."""
    is_leaving: bool = False
    """It is drained, and does not come back."""


@dataclass(slots=True)
class DesiredFleet:
    """Every worker that there is to be, by name. Names are never used twice."""

    slots: dict[str, DesiredSlot] = field(default_factory=dict)
    num_names: int = 0

    @classmethod
    def of(cls, config: BatonConfig) -> "DesiredFleet":
        slots = {name: DesiredSlot(name, role) for name, role in worker_names(config)}
        return cls(slots, len(slots))

    def add(self, role: WorkerRole) -> DesiredSlot:
        """One more, with a name that nobody ever had."""
        slot = DesiredSlot(f"w{self.num_names}", role)
        self.num_names += 1
        self.slots[slot.name] = slot
        return slot

    def was_there(self, name: str) -> bool:
        """Whether this is the name of a worker that left."""
        return name not in self.slots and name in {f"w{index}" for index in range(self.num_names)}

    def with_role(self, role: WorkerRole) -> list[DesiredSlot]:
        """Those that stay, in the order of their making."""
        return [slot for slot in self.slots.values() if slot.role is role and not slot.is_leaving]

    def to_json(self) -> bytes:
        slots = [{**asdict(slot), "role": slot.role.value} for slot in self.slots.values()]
        return json.dumps({"slots": slots, "num_names": self.num_names}).encode()

    @classmethod
    def from_json(cls, text: bytes) -> "DesiredFleet":
        values = json.loads(text)
        slots = [DesiredSlot(**{**slot, "role": WorkerRole(slot["role"])}) for slot in values["slots"]]
        return cls({slot.name: slot for slot in slots}, values["num_names"])


class Store(Protocol):
    """Keeps bytes where the next life of a controller finds them; `save` is done when it returns."""

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
