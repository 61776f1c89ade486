"""Where a rank's process begins: `python -m engine.ranks.entry FD`. Knows little but the connection to rank 0.

Importing the engine takes seconds. Meanwhile the process must ignore a terminal's signals, which only rank 0 handles,
and must end if rank 0 ends.
"""

import os
import signal
import sys
from collections.abc import Callable
from functools import partial

from baton.system.garbage import imports
from baton.system.parent import when_closed
from engine.ranks.exit_codes import EXIT_ALONE


def main(serve: Callable[[], None]) -> None:
    """Runs `serve` until the process ends."""
    for number in (signal.SIGINT, signal.SIGTERM):  # a terminal or a service manager sends them to rank 0 too
        signal.signal(number, signal.SIG_IGN)
    when_closed(int(sys.argv[1]), partial(os._exit, EXIT_ALONE))

    serve()


def _serve() -> None:
    with imports():
        from engine.ranks.process import main as serve

    serve()


if __name__ == "__main__":
    main(_serve)
