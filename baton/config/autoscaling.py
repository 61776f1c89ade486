"""The configuration's section `autoscaling`: how many workers there may be, and what makes them more or fewer."""

from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from baton.config.section import Section


class AutoscalingConfig(Section):
    """How many workers there are, by what requests have to wait for."""

    mode: Literal["off", "dry_run", "on"] = "off"
    """`dry_run`: says what it would do, and why, but does nothing."""
    min_prefill: int | None = Field(None, ge=0)
    """Never fewer prefill workers than this; None: `cluster.prefill`."""
    max_prefill: int | None = Field(None, ge=0)
    """Never more; None: `cluster.prefill`."""
    min_decode: int | None = Field(None, ge=1)
    """Never fewer decode workers than this; None: `cluster.decode`."""
    max_decode: int | None = Field(None, ge=1)
    """Never more; None: `cluster.decode`."""
    may_change_roles: bool = True
    """A role that is short gets a worker of the other one, if that has one to spare, rather than a new one.
    Workers of unequal numbers of ranks keep their roles."""
    target_queue_time_s: float | None = Field(1.0, gt=0.0)
    """Prompts should not wait longer than this for their computation, nor requests for a worker with room; None: this
    is not watched. The same goes for the other targets."""
    target_ttft_p99_s: float | None = Field(None, gt=0.0)
    """Time to first token of all but one request in a hundred."""
    target_itl_p99_s: float | None = Field(None, gt=0.0)
    """Time from one token of a request to the next, of all but one token in a hundred."""
    target_block_use: float | None = Field(0.85, gt=0.0, le=1.0)
    """Share of the decode workers' KV blocks in use."""
    interval_s: float = Field(5.0, gt=0.0)
    """Time from one look at the fleet to the next."""
    grow_after_s: float = Field(15.0, ge=0.0)
    """A target must be missed for this long before anything is done about it. Latencies are those of this time."""
    shrink_after_s: float = Field(300.0, ge=0.0)
    """All targets of a role must be met with room to spare for this long before it loses a worker."""
    grow_cooldown_s: float = Field(30.0, ge=0.0)
    """After a change, and once the workers that it brings serve, a role is left alone for this long before it grows."""
    shrink_cooldown_s: float = Field(120.0, ge=0.0)
    """Likewise before it shrinks."""

    @field_validator("mode", mode="before")
    @classmethod
    def _read_yaml(cls, mode: object) -> object:
        """YAML 1.1 reads a bare `on` and `off` as true and false."""
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
                f"({self.grow_after_s:g}), or the fleet would forget a load sooner than it heeds it"
            )
        targets = (
            self.target_queue_time_s,
            self.target_ttft_p99_s,
            self.target_itl_p99_s,
            self.target_block_use,
        )
        if self.mode != "off" and all(target is None for target in targets):
            raise ValueError(f"mode '{self.mode}' needs a target: every target_... is None")
        if self.model_fields_set and "mode" not in self.model_fields_set:
            key = min(self.model_fields_set)
            raise ValueError(
                f"{key} ({getattr(self, key)}) needs mode 'on' or 'dry_run'; with 'off' it waits for these"
            )
        return self
