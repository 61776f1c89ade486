"""module_command: the command that runs a module with this Python interpreter."""

import sys


def module_command(module: str, *arguments: str) -> list[str]:
    """`python -P -m MODULE ...`.

    Without `-P`, Python would first import from the current folder. Its files may come from strangers: a downloaded
    model may have a `torch.py`."""
    return [sys.executable, "-P", "-m", module, *arguments]
