"""The entry of the `baton` command: Ctrl-C ends it without a traceback, even while it imports its modules."""

import atexit
import os
import signal
import sys

REFUSED, INTERRUPTED = 1, 130
SERVICES = ("serve", "fleet", "gateway")
"""Commands that end in order after SIGTERM, too."""


def main() -> int:
    """Runs the command of sys.argv and returns its exit code. The process must then end with this code."""
    code: int | None = None

    def end_at_once() -> None:
        """Ends the process before Python takes its modules apart: for a gateway, this takes half a CPU second."""
        if code is not None:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    atexit.register(end_at_once)  # registered before all other hooks, so it runs after them
    # Under `nohup`, and in the background of a script, SIGINT stays ignored.
    is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_default:
        # A KeyboardInterrupt within an import may be lost, or become another error.
        signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
    if sys.argv[1:2] and sys.argv[1] in SERVICES:
        # A service replaces this handler when it has something to end.
        signal.signal(signal.SIGTERM, lambda *_: os._exit(INTERRUPTED))
    try:
        from cli.main import main as run

        if is_default:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        code = run()
    except KeyboardInterrupt:  # within the first or last lines of `run`
        code = INTERRUPTED
    except ImportError:
        from cli.own_packages import foreign_module

        if (problem := foreign_module()) is None:
            raise
        sys.stderr.write(f"baton: {problem}\n")
        code = REFUSED
    return code


if __name__ == "__main__":
    sys.exit(main())
