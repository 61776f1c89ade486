"""Python's garbage collector in a process that must start fast, and then answer within milliseconds."""

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def imports() -> Iterator[None]:
    """Within this context, nothing is collected. Later collections ignore the objects that exist at its end.

    Importing PyTorch and its dependencies creates 400,000 objects. Collections meanwhile would find next to nothing,
    and take a tenth of the import's time.
    """
    with paused():
        try:
            yield
        finally:
            _set_aside()


@contextmanager
def paused() -> Iterator[None]:
    """Within this context, nothing is collected. For a thread that makes 100,000 objects and drops them: collections
    meanwhile would find next to nothing, and stop all threads for tenths of a second."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def settle() -> None:
    """Call it once, before the process serves, when all long-lived objects exist.

    A full collection visits every object. With PyTorch loaded, it stops the process for a quarter of a second, again
    and again under load. After this call, collections visit only later objects.
    """
    gc.collect()
    _set_aside()


def _set_aside() -> None:
    gc.freeze()
    atexit.register(gc.unfreeze)  # else extension modules complain about objects alive at the end
