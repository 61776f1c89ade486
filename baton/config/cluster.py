"""The configuration's section `cluster`: which workers run, where, and how patiently they are supervised."""

import re
from typing import Annotated, Self

from pydantic import Field, field_validator, model_validator

from baton.config.section import Section
from baton.system.hosts import is_address

_LABEL_VALUE = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?"
_LABEL_CONDITION = re.compile(rf"!?{_LABEL_VALUE}|!?in\({_LABEL_VALUE}(?:, *{_LABEL_VALUE})*\)")
"""Label conditions as Ray parses them."""


class ClusterConfig(Section):
    """The fleet and its Ray cluster."""

    name: str = Field("baton", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the fleet; two fleets on one Ray cluster need two names. `baton serve` adopts a running fleet of this
    name, and `baton gateway` connects to it."""
    prefill: int = Field(1, ge=0)
    """Number of prefill workers; with 0, decode workers compute every prompt themselves."""
    decode: int = Field(1, ge=1)
    """Number of decode workers."""
    prefill_tensor_parallel: int | None = Field(None, ge=1)
    """Ranks of each prefill worker. If unset: `engine.tensor_parallel`. This must divide `decode_tensor_parallel`, or
    be a multiple of it."""
    decode_tensor_parallel: int | None = Field(None, ge=1)
    """Ranks of each decode worker. If unset: `engine.tensor_parallel`."""
    prefill_enable_expert_parallel: bool | None = None
    """Whether each rank of a prefill worker holds whole experts. If unset: `engine.enable_expert_parallel`. Prefill and
    decode workers may differ."""
    decode_enable_expert_parallel: bool | None = None
    """Whether each rank of a decode worker holds whole experts. If unset: `engine.enable_expert_parallel`."""
    prefill_num_threads: int | None = Field(None, ge=1, le=4096)
    """Threads of each rank of a prefill worker on a CPU. If unset: `engine.num_threads`. The cores of a machine are
    divided among its workers in proportion to their threads. Each worker is pinned to its own cores, unless there are
    more threads than cores, or a container's CPU quota is below its number of CPUs."""
    decode_num_threads: int | None = Field(None, ge=1, le=4096)
    """Threads of each rank of a decode worker on a CPU. If unset: `engine.num_threads`."""
    prefill_max_num_batched_tokens: int | None = Field(None, ge=1)
    """Tokens that one step may compute on a worker that was started as a prefill worker. If unset:
    `scheduler.max_num_batched_tokens`."""
    decode_max_num_batched_tokens: int | None = Field(None, ge=1)
    """Tokens that one step may compute on a worker that was started as a decode worker. If unset:
    `scheduler.max_num_batched_tokens`."""
    lend_cores: bool = True
    """On a CPU, a pinned worker that computes nothing lends its cores to the other workers of the fleet on its
    machine."""
    ray_address: str = "local"
    """`local` starts a private Ray for this command. `none` runs without Ray, on CPUs only: workers are child
    processes on this machine. Any other value is the address of a Ray cluster to join."""
    ray_timeout_s: float = Field(0.0, ge=0.0)
    """How long to wait for an external Ray cluster to start; 0 means it is already up."""
    allow_ray_without_token: bool = False
    """A Ray cluster that other hosts can reach, but that asks for no token, is refused: everyone who can connect to
    such a cluster can run programs on its nodes. If true, Baton uses it nevertheless."""
    fleet_port: int = Field(0, ge=0, le=65535)
    """Port on `network.bind_host` where `baton fleet` serves gateways; 0 picks a free port."""
    fleet_address: str | None = None
    """For `baton gateway`: HOST:PORT of a `baton fleet`. The gateway's machine then needs no Ray, and `ray_address`
    must be unset."""
    cpus_per_worker: float = Field(1.0, gt=0.0)
    """CPUs that each rank of a worker requests from Ray. Ray places workers by these requests. `engine.num_threads`
    says with how many threads a rank computes."""
    prefill_resources: dict[str, Annotated[float, Field(gt=0.0)]] = Field(default_factory=dict)
    """Custom Ray resources that a worker requests from its node if it is started as a prefill worker, e.g.
    `{prefill: 1}`."""
    decode_resources: dict[str, Annotated[float, Field(gt=0.0)]] = Field(default_factory=dict)
    """Custom Ray resources that a worker requests from its node if it is started as a decode worker."""
    prefill_labels: dict[str, str] = Field(default_factory=dict)
    """Ray labels that the node of a worker must have if the worker is started as a prefill worker, e.g.
    `{role: prefill}`. A value may be a condition, such as `!x` or `in(x,y)`."""
    decode_labels: dict[str, str] = Field(default_factory=dict)
    """Ray labels that the node of a worker must have if the worker is started as a decode worker."""
    start_timeout_s: float = Field(300.0, gt=0.0)
    """How long a worker may take to load its model, and the whole fleet to start for the first time. For `baton
    gateway`: how long to wait for its fleet."""
    drain_timeout_s: float = Field(5.0, ge=0.0)
    """How long running requests may continue when their worker is drained or changes its role, or the cluster stops.
    Requests still running then continue on another worker, if there is one."""
    unresponsive_timeout_s: float = Field(10.0, gt=0.0)
    """A worker whose process does not answer for this long is killed and replaced."""
    stable_after_s: float = Field(10.0, gt=0.0)
    """A worker that served for this long before it died is replaced at once; earlier deaths no longer count."""
    restart_delay_s: float = Field(1.0, gt=0.0)
    """Delay before a worker is restarted after its second early death; doubles with each further early death."""
    restart_delay_max_s: float = Field(30.0, gt=0.0)
    """The longest restart delay; a worker in a crash loop always waits this long."""
    crash_loop_deaths: int = Field(5, ge=2)
    """How many early deaths within `crash_loop_window_s` count as a crash loop."""
    crash_loop_window_s: float = Field(120.0, gt=0.0)
    orphan_timeout_s: float = Field(60.0, gt=0.0)
    """On an external Ray cluster, a fleet ends by itself if no gateway and no owner has called for this long."""

    @field_validator("fleet_address")
    @classmethod
    def _check_address(cls, address: str | None) -> str | None:
        if address is not None and not is_address(address):
            raise ValueError(f"got '{address}'; use HOST:PORT, as printed by `baton fleet`")
        return address

    @field_validator("prefill_labels", "decode_labels")
    @classmethod
    def _check_labels(cls, labels: dict[str, str]) -> dict[str, str]:
        for value in labels.values():
            if not _LABEL_CONDITION.fullmatch(value):
                raise ValueError(
                    f"got {value!r}; use a label value, or a condition like !x, in(x,y) or !in(x,y)"
                )
        return labels

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.fleet_address is not None and "ray_address" in self.model_fields_set:
            raise ValueError(
                f"fleet_address ('{self.fleet_address}') and ray_address ('{self.ray_address}') both say where the "
                "fleet is; set only one of the two keys"
            )
        if self.ray_address in ("none", "local") and self.fleet_address is None:
            remedy = (
                f"but ray_address is '{self.ray_address}'; remove the key, or set ray_address to the address of a Ray "
                "cluster"
            )
            needing = ("ray_timeout_s", "orphan_timeout_s", "allow_ray_without_token")
            self.refuse_changed(needing, f"needs an external Ray cluster, {remedy}")
            selecting = ("prefill_resources", "decode_resources", "prefill_labels", "decode_labels")
            self.refuse_changed(selecting, f"selects nodes of an external Ray cluster, {remedy}")
        if self.ray_address == "none":
            self.refuse_changed(
                ("cpus_per_worker",), "is a request to Ray, but ray_address is 'none'; remove the key"
            )
        if "restart_delay_s" in self.model_fields_set and self.restart_delay_s > self.restart_delay_max_s:
            raise ValueError(
                f"restart_delay_s ({self.restart_delay_s:g}) must not be above restart_delay_max_s "
                f"({self.restart_delay_max_s:g})"
            )
        return self
