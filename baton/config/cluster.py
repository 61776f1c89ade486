"""The configuration's section `cluster`: which workers there are, where they run, and how patient their keeper is."""

import re
from typing import Annotated, Self

from pydantic import Field, field_validator, model_validator

from baton.config.section import Section
from baton.system.hosts import is_address

_LABEL_VALUE = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?"
_LABEL_CONDITION = re.compile(rf"!?{_LABEL_VALUE}|!?in\({_LABEL_VALUE}(?:, *{_LABEL_VALUE})*\)")
"""As Ray reads them."""


class ClusterConfig(Section):
    """The fleet and where Ray finds it."""

    name: str = Field("baton", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Of the fleet: two fleets on one Ray cluster need two names, and `baton serve` with the name of a fleet that was
    left alone there takes it over; `baton gateway` finds its fleet by it."""
    prefill: int = Field(1, ge=0)
    """Prefill workers; with 0, decode workers compute every prompt themselves."""
    decode: int = Field(1, ge=1)
    """Decode workers."""
    prefill_tensor_parallel: int | None = Field(None, ge=1)
    """Ranks of each prefill worker; None: `engine.tensor_parallel`. One of this and the next divides the other."""
    decode_tensor_parallel: int | None = Field(None, ge=1)
    """Ranks of each decode worker; None: `engine.tensor_parallel`."""
    ray_address: str = "local"
    """`local` starts a private Ray for this command; `none` does without, for CPUs: workers are child processes on this
    machine. Anything else joins that cluster."""
    ray_timeout_s: float = Field(0.0, ge=0.0)
    """What a Ray cluster that is to be joined gets to come up, where it starts beside us; 0: it is there already."""
    fleet_port: int = Field(0, ge=0, le=65535)
    """Where `baton fleet` answers gateways, on `network.bind_host`. 0: a free port."""
    fleet_address: str | None = None
    """With `baton gateway`, HOST:PORT of a `baton fleet`: the gateway's machine then needs no Ray, and
    `ray_address` stays unset."""
    cpus_per_worker: float = Field(1.0, gt=0.0)
    """What each rank of a worker asks of Ray. The math library's threads are `engine.num_threads`."""
    prefill_resources: dict[str, Annotated[float, Field(gt=0.0)]] = Field(default_factory=dict)
    """Ray's custom resources that a worker started as a prefill worker asks of its node, e.g. `{prefill: 1}`."""
    decode_resources: dict[str, Annotated[float, Field(gt=0.0)]] = Field(default_factory=dict)
    """Likewise of decode workers."""
    prefill_labels: dict[str, str] = Field(default_factory=dict)
    """Ray's labels that the node of a worker started as a prefill worker must have, e.g. `{role: prefill}`; a value may
    be a condition, as `!x` or `in(x,y)`."""
    decode_labels: dict[str, str] = Field(default_factory=dict)
    """Likewise of decode workers."""
    start_timeout_s: float = Field(300.0, gt=0.0)
    """What a worker gets to load its model in, and the whole fleet when it starts for the first time; with
    `baton gateway`, the fleet that it looks for."""
    drain_timeout_s: float = Field(5.0, ge=0.0)
    """What running requests get to end by themselves when their worker is drained or changes its role, or the cluster
    stops. Where there is another worker, what is left then goes on there."""
    unresponsive_timeout_s: float = Field(10.0, gt=0.0)
    """A worker whose process does not answer for so long is killed and replaced."""
    stable_after_s: float = Field(10.0, gt=0.0)
    """A worker that served for so long before it died is replaced at once, whatever was before."""
    restart_delay_s: float = Field(1.0, gt=0.0)
    """What a worker waits for before it is started again, the second time that it dies early; twice as long each time
    after."""
    restart_delay_max_s: float = Field(30.0, gt=0.0)
    """The longest of these waits, and that of a worker in a crash loop."""
    crash_loop_deaths: int = Field(5, ge=2)
    """Early deaths within `crash_loop_window_s` that are called a crash loop."""
    crash_loop_window_s: float = Field(120.0, gt=0.0)
    orphan_timeout_s: float = Field(60.0, gt=0.0)
    """On a cluster that was joined: a fleet that no gateway has asked about for so long ends itself."""

    @field_validator("fleet_address")
    @classmethod
    def _check_address(cls, address: str | None) -> str | None:
        if address is not None and not is_address(address):
            raise ValueError(f"got '{address}'; HOST:PORT, as `baton fleet` says it")
        return address

    @field_validator("prefill_labels", "decode_labels")
    @classmethod
    def _check_labels(cls, labels: dict[str, str]) -> dict[str, str]:
        for value in labels.values():
            if not _LABEL_CONDITION.fullmatch(value):
                raise ValueError(f"got {value!r}; a label's value, or one of !x, in(x,y) and !in(x,y)")
        return labels

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.fleet_address is not None and "ray_address" in self.model_fields_set:
            raise ValueError(
                f"fleet_address ('{self.fleet_address}') and ray_address ('{self.ray_address}') are two ways to one "
                "fleet; set one of them"
            )
        if self.ray_address in ("none", "local") and self.fleet_address is None:
            if self.ray_timeout_s:
                raise ValueError(
                    f"ray_timeout_s ({self.ray_timeout_s:g}) is for a Ray cluster that is joined, and ray_address is "
                    f"'{self.ray_address}'; leave it out, or give that cluster's address"
                )
            for key in ("prefill_resources", "decode_resources", "prefill_labels", "decode_labels"):
                if value := getattr(self, key):
                    raise ValueError(
                        f"{key} ({value}) is for nodes of a Ray cluster that is joined, and ray_address is "
                        f"'{self.ray_address}'"
                    )
        return self
