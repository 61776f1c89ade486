"""Where a rank's process begins: `python -m engine.ranks.entry FD`. Knows little but the connection to rank 0.

Importing the engine takes seconds. Meanwhile the process must ignore a terminal's signals, which only rank 0 handles,
and must end if rank 0 ends.
"""

import os
import select
import signal
import sys
import threading
from collections.abc import Callable

from baton.system.garbage import imports
from engine.ranks.exit_codes import EXIT_ALONE


def main(serve: Callable[[], None]) -> None:
    """Runs `serve` until the process ends."""
    for number in (signal.SIGINT, signal.SIGTERM):  # a terminal or a service manager sends them to rank 0 too
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(int(sys.argv[1]),), name="rank-0-gone", daemon=True).start()

    serve()


def _end_with(connection: int) -> None:
    """Ends this process when the connection closes. Only `serve` reads from the connection."""
    poll = select.poll()
    poll.register(connection, 0)  # waits only for the end of the connection
    poll.poll()
    os._exit(EXIT_ALONE)


def _serve() -> None:
    with imports():
        from engine.ranks.process import main as serve

    serve()


if __name__ == "__main__":
    main(_serve)
