"""Programmatic dependent launch: a kernel starts while the previous kernel ends, and waits for its results.

Without it, a finished multiprocessor is idle until all other multiprocessors are done, the kernel has ended, and
the next kernel is launched. This takes about 3 us for each kernel of a step. With it, the next kernel's programs
are already resident, if there is room, and have loaded data that does not depend on earlier kernels.

A kernel that is launched this way must call `wait_for_former` in every program: before it stores anything, and before
it loads anything that the previous kernel may have written. A kernel lets the next kernel start only after it has
itself waited for the previous kernel. So when a kernel starts, all kernels before the previous kernel have ended, and
it may load what the previous kernel does not write. Kernels that are launched normally, such as torch's, begin when all
earlier kernels have ended.

The kernel after attention starts normally: attention calls `wait_for_former` with NEXT_STARTS_EARLY=False. A
multiprocessor divides its memory into L1 cache and shared memory, and changes this division only while it is
idle. Attention uses most of the memory as shared memory. A product that starts early after attention would
read weights through a tiny L1 cache, as measured on an H200 (docs/kernels.md, "Launches of a decode step").
"""

from functools import cache

import triton
import triton.language as tl
from triton import knobs
from triton.runtime import driver

from engine.kernels.switches import kernel_switches

FIRST_ARCHITECTURE = 90


def launch_options() -> dict[str, bool]:
    """Options to launch a kernel that calls `wait_for_former(PDL)`."""
    if not kernel_switches().pdl or knobs.runtime.interpret:
        return {"PDL": False}
    return (
        {"PDL": True, "launch_pdl": True}
        if _is_supported(driver.active.get_current_device())
        else {"PDL": False}
    )


@cache
def _is_supported(_device: int) -> bool:
    """Whether the current device supports dependent launch; the device's number is only the cache's key."""
    target = driver.active.get_current_target()
    return bool(target.backend == "cuda" and target.arch >= FIRST_ARCHITECTURE)


@triton.jit
def wait_for_former(PDL: tl.constexpr, NEXT_STARTS_EARLY: tl.constexpr = True):  # type: ignore[no-untyped-def]
    """Waits until the previous kernel has ended and its writes are visible; then the next kernel may start.

    If NEXT_STARTS_EARLY is False, the next kernel starts when this kernel has ended.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        if NEXT_STARTS_EARLY:
            tl.extra.cuda.gdc_launch_dependents()
