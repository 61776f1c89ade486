"""Programmatic dependent launch: a kernel starts while the one before it ends, and waits before it touches its results.

Without it a multiprocessor that is done idles until all others are, the kernel has ended and the next one is launched:
some 3 us for each of a step's kernels. With it the next programs are there already, as far as there is room for them,
and have fetched what depends on nobody.

A kernel that is launched so must call `wait_for_former` in every program, before it stores anything, and before it
loads anything that a kernel before it may have written. Dependents are let go only after the wait, hence when a kernel
starts all kernels but the one before it have ended: what that one does not write may be loaded before the wait. Kernels
that are launched as ever, torch's among them, begin when all before them have ended.
"""

from functools import cache

import triton
import triton.language as tl
from triton import knobs
from triton.runtime import driver

from engine.kernels.switches import kernel_switches

FIRST_ARCHITECTURE = 90


def launch_options() -> dict[str, bool]:
    """For a launch of a kernel that calls `wait_for_former(PDL)`."""
    if not kernel_switches().pdl or knobs.runtime.interpret:
        return {"PDL": False}
    return (
        {"PDL": True, "launch_pdl": True}
        if _is_supported(driver.active.get_current_device())
        else {"PDL": False}
    )


@cache
def _is_supported(_device: int) -> bool:
    """By the present device, which is the one of that number."""
    target = driver.active.get_current_target()
    return bool(target.backend == "cuda" and target.arch >= FIRST_ARCHITECTURE)


@triton.jit
def wait_for_former(PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Until the kernel before this one has ended and all see what it wrote; then the next one may start."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
