"""`python -m tests.factories.code CODE ...` is `python -c CODE ...`, and may be a fork (fork_server.py)."""

import sys

if __name__ == "__main__":
    exec(sys.argv.pop(1), {"__name__": "__main__"})
