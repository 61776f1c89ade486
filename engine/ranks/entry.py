"""Where a rank's process begins: `python -m engine.ranks.entry FD`. Knows of its rank only the line to rank 0.

What a rank is made of takes seconds to import. Meanwhile it must not hear a terminal's signals, which are rank 0's
matter, nor go on without rank 0.
"""

import os
import select
import signal
import sys
import threading
from collections.abc import Callable

from engine.ranks.exit_codes import EXIT_ALONE


def main(serve: Callable[[], None]) -> None:
    """`serve` is what the rank does for the rest of its life."""
    for number in (
        signal.SIGINT,
        signal.SIGTERM,
    ):  # a terminal or a service's manager sends them to both of us
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(int(sys.argv[1]),), name="rank-0-gone", daemon=True).start()

    serve()


def _end_with(line: int) -> None:
    """Reads nothing: that is for whoever serves."""
    poll = select.poll()
    poll.register(line, 0)  # no more than the end of the line
    poll.poll()
    os._exit(EXIT_ALONE)


def _serve() -> None:
    from engine.ranks.process import main as serve

    serve()


if __name__ == "__main__":
    main(_serve)
