"""Python's garbage collector in a process that must answer within milliseconds."""

import atexit
import gc


def settle() -> None:
    """Call once, after everything that lives as long as the process is loaded, and before it serves.

    A full collection visits every object. PyTorch and its dependencies create 400,000 objects, so a
    collection stops the process for a quarter of a second. Under load, that happens several times a second.
    After this call, collections visit only later objects.
    """
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # else extension modules complain about objects alive at the end
