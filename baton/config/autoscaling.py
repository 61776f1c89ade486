"""The configuration's section `autoscaling`: bounds for the number of workers, and the targets that change it."""

from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from baton.config.section import Section

MIN_LATENCY_WINDOW_S = 2.0
"""The shortest time that percentiles of latencies cover. A shorter time could lie within a second that has just
begun."""


class AutoscalingConfig(Section):
    """How many workers run, controlled by how long requests wait."""

    mode: Literal["off", "dry_run", "on"] = "off"
    """`dry_run` logs the decisions and their reasons, but changes nothing."""
    min_prefill: int | None = Field(None, ge=0)
    """The fewest prefill workers. If unset: `cluster.prefill`."""
    max_prefill: int | None = Field(None, ge=0)
    """The most prefill workers. If unset: `cluster.prefill`."""
    min_decode: int | None = Field(None, ge=1)
    """The fewest decode workers. If unset: `cluster.decode`."""
    max_decode: int | None = Field(None, ge=1)
    """The most decode workers. If unset: `cluster.decode`."""
    may_change_roles: bool = True
    """A role that must grow gets a spare worker of the other role, if there is one, instead of a new worker. Workers
    with different numbers of ranks keep their roles."""
    target_queue_time_s: float | None = Field(1.0, gt=0.0)
    """Longest acceptable wait of a prompt for its computation, and of a request for a worker with room. `null` turns
    this target off, as it does for the other targets."""
    target_ttft_p99_s: float | None = Field(None, gt=0.0)
    """Target for the 99th percentile of the time to first token."""
    target_itl_p99_s: float | None = Field(None, gt=0.0)
    """Target for the 99th percentile of the time between two tokens of a request."""
    target_block_use: float | None = Field(0.85, gt=0.0, le=1.0)
    """Target for the share of the decode workers' KV blocks in use."""
    interval_s: float = Field(5.0, gt=0.0)
    """Seconds between two evaluations of the fleet."""
    grow_after_s: float = Field(15.0, ge=0.0)
    """How long a target must be missed before the fleet grows. Latency percentiles cover the same period, but at least
    2 s and `interval_s`, and at most 60 s."""
    shrink_after_s: float = Field(300.0, ge=0.0)
    """How long all targets of a role must be met with room to spare before the role loses a worker."""
    grow_cooldown_s: float = Field(30.0, ge=0.0)
    """After a change, once its new workers serve, a role does not grow again for this long, and gives no worker to the
    other role."""
    shrink_cooldown_s: float = Field(120.0, ge=0.0)
    """After a change, once its new workers serve, no worker of the role is removed for this long."""

    @property
    def latency_window_s(self) -> float:
        """The time that percentiles of latencies cover. It is at least the time from one report to the next."""
        return max(self.grow_after_s, self.interval_s, MIN_LATENCY_WINDOW_S)

    @field_validator("mode", mode="before")
    @classmethod
    def _read_yaml(cls, mode: object) -> object:
        """Takes true for `on` and false for `off`, since YAML 1.1 reads the bare words so."""
        return {True: "on", False: "off"}[mode] if isinstance(mode, bool) else mode

    @model_validator(mode="after")
    def _check(self) -> Self:
        for role in ("prefill", "decode"):
            low, high = getattr(self, f"min_{role}"), getattr(self, f"max_{role}")
            if low is not None and high is not None and low > high:
                raise ValueError(f"min_{role} ({low}) must not be above max_{role} ({high})")
        if self.shrink_after_s < self.grow_after_s:
            raise ValueError(
                f"shrink_after_s ({self.shrink_after_s:g}) must not be shorter than grow_after_s "
                f"({self.grow_after_s:g}); otherwise the fleet shrinks faster than it grows"
            )
        targets = (
            self.target_queue_time_s,
            self.target_ttft_p99_s,
            self.target_itl_p99_s,
            self.target_block_use,
        )
        if self.mode != "off" and all(target is None for target in targets):
            raise ValueError(f"mode '{self.mode}' needs a target; set at least one target_... key")
        if self.model_fields_set and "mode" not in self.model_fields_set:
            key = min(self.model_fields_set)
            raise ValueError(
                f"{key} ({getattr(self, key)}) has no effect with mode 'off'; set mode to 'on' or 'dry_run'"
            )
        return self
