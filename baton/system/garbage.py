"""Python's garbage collector, where a process is to answer within milliseconds."""

import atexit
import gc


def settle() -> None:
    """To be called once all that stays for the process' life is loaded, and before it serves.

    A full collection looks at every object that there is. PyTorch and its like make four hundred thousand: a quarter of
    a second each time, several times a second under load, and nothing else happens meanwhile. From here on only what
    comes later is looked at.
    """
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # what an extension module finds alive at the very end, it complains about
