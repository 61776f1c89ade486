"""The entry of the `baton` command: Ctrl-C ends it without a traceback, even while it imports its modules."""

import os
import signal
import sys

INTERRUPTED = 130


def main() -> int:
    """Runs the command of sys.argv and returns its exit code."""
    # Under `nohup`, and in the background of a script, SIGINT stays ignored.
    is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_default:
        # A KeyboardInterrupt within an import may be lost, or become another error.
        signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
    from cli.main import main as run

    if is_default:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return run()
    except KeyboardInterrupt:  # within the first or last lines of `run`
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
