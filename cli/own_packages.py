"""foreign_module: finds a module that hides one of Baton's packages; imports none of them."""

import importlib.util
from pathlib import Path

PACKAGES = (
    "baton",
    "cli",
    "cluster",
    "decode_worker",
    "engine",
    "gateway",
    "kv_transfer",
    "prefill_worker",
    "scheduler",
    "worker",
)
"""The packages that a command, or a process that it starts, may import."""

_ROOT = Path(__file__).parents[1]


def foreign_module() -> str | None:
    """What is wrong if a module from elsewhere has the name of one of the packages, and Python would import it instead;
    None if all packages are Baton's own."""
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        file = None if spec is None else spec.origin  # none: a folder without modules, which hides no package
        if file is not None and not Path(file).is_relative_to(_ROOT):
            return f"{file} is imported in place of Baton's own; remove its folder from PYTHONPATH"
    return None
