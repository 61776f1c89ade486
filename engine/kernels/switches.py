"""KernelSwitches: which optimizations kernels use; each can be switched off, to compare or to avoid a fault.

A worker reads the switches from the environment variable BATON_KERNELS, for example
BATON_KERNELS=no-pdl,no-fused-silu. With all switches off, no operations are fused, and a kernel starts only
when the previous kernel has ended (docs/kernels.md, "Launches of a decode step").
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace

from baton.errors import ConfigError

SWITCHES_VARIABLE = "BATON_KERNELS"


@dataclass(frozen=True, slots=True)
class KernelSwitches:
    """All are on by default. No switch changes what is computed, except by rounding."""

    pdl: bool = True
    """A kernel starts, and fetches weights, while the previous kernel ends (programmatic dependent launch)."""
    fused_merge: bool = True
    """In steps of decodes, the program that ends last merges the parts of a split context."""
    fused_silu: bool = True
    """The product of few rows with gate and up weights returns silu(gate) * up."""
    fused_residual: bool = True
    """The product of few rows that ends a branch adds its result to the residual stream. A mixture's last launch does
    so for any number of rows."""
    fused_norm: bool = True
    """The product of few rows norms its input, if a program has the whole input in registers."""
    timed_products: bool = True
    """torch's library computes an unfused product of few rows if it was faster in a test at the worker's start."""

    @classmethod
    def parse(cls, text: str) -> "KernelSwitches":
        """Reads `no-NAME,no-NAME`; ConfigError for any other name."""
        names = {f"no-{field.name.replace('_', '-')}": field.name for field in fields(cls)}
        off = {}
        for word in filter(None, (part.strip() for part in text.split(","))):
            if word not in names:
                raise ConfigError(
                    f"{SWITCHES_VARIABLE}: got {word!r}; use some of {', '.join(names)}, separated by commas"
                )
            off[names[word]] = False
        return cls(**off)

    @property
    def off(self) -> tuple[str, ...]:
        """The names of the switches that are off, as `parse` takes them."""
        return tuple(f"no-{f.name.replace('_', '-')}" for f in fields(self) if not getattr(self, f.name))


ALL_OFF = KernelSwitches(**{field.name: False for field in fields(KernelSwitches)})

_current = KernelSwitches()


def kernel_switches() -> KernelSwitches:
    """The switches of this process."""
    return _current


def set_kernel_switches(switches: KernelSwitches) -> None:
    """Sets this process' switches. Kernels already compiled, and graphs already recorded, do not change."""
    global _current
    _current = switches


@contextmanager
def switched(switches: KernelSwitches | None = None, **changes: bool) -> Iterator[KernelSwitches]:
    """A context with these switches (None: the present ones) and `changes`, for tests and benchmarks."""
    before = kernel_switches()
    set_kernel_switches(replace(switches or before, **changes))
    try:
        yield kernel_switches()
    finally:
        set_kernel_switches(before)
