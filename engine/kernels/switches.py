"""KernelSwitches: which ways of saving time are taken; each can be left out, to compare or to be rid of a fault.

Read once from the environment variable BATON_KERNELS, as in BATON_KERNELS=no-pdl,no-fused-silu. With all of them off
a step is launched kernel by kernel, as docs/kernels.md says under "Launches of a decode step".
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace

from baton.errors import ConfigError

VARIABLE = "BATON_KERNELS"


@dataclass(frozen=True, slots=True)
class KernelSwitches:
    """All on unless the environment says otherwise. None changes what is computed, except by rounding."""

    pdl: bool = True
    """A kernel starts, and fetches weights, while the one before it ends (programmatic dependent launch)."""
    fused_merge: bool = True
    """In steps of decodes the last part of a split context to be done puts the parts together."""
    fused_silu: bool = True
    """The product of few rows with gate and up weights gives silu(gate) * up."""
    fused_residual: bool = True
    """The product of few rows that ends a branch adds it to the residual stream."""
    fused_norm: bool = True
    """The product of few rows norms its input itself, where it has all of it in registers."""
    timed_products: bool = True
    """A product of few rows that is fused with nothing is torch's where that was timed to be faster, at start."""

    @classmethod
    def parse(cls, text: str) -> "KernelSwitches":
        """Of `no-NAME,no-NAME`; ConfigError for any other name."""
        names = {f"no-{field.name.replace('_', '-')}": field.name for field in fields(cls)}
        off = {}
        for word in filter(None, (part.strip() for part in text.split(","))):
            if word not in names:
                raise ConfigError(
                    f"{VARIABLE}: got {word!r}; use some of {', '.join(names)}, with commas between"
                )
            off[names[word]] = False
        return cls(**off)

    @property
    def off(self) -> tuple[str, ...]:
        """The names of those that are off, as `parse` takes them."""
        return tuple(f"no-{f.name.replace('_', '-')}" for f in fields(self) if not getattr(self, f.name))


ALL_OFF = KernelSwitches(**{field.name: False for field in fields(KernelSwitches)})

_current: KernelSwitches | None = None


def kernel_switches() -> KernelSwitches:
    """Those of this process. ConfigError if the environment names one that there is not."""
    global _current
    if _current is None:
        _current = KernelSwitches.parse(os.environ.get(VARIABLE, ""))
    return _current


@contextmanager
def switched(switches: KernelSwitches | None = None, **changes: bool) -> Iterator[KernelSwitches]:
    """Within it these hold (None: the present ones) with `changes`: for tests, and for benchmarks that compare."""
    global _current
    before = kernel_switches()
    _current = replace(switches or before, **changes)
    try:
        yield _current
    finally:
        _current = before
