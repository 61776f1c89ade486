"""foreign_module: finds a module that hides one of Baton's packages, before it is imported."""

import importlib.util
from pathlib import Path

_ROOT = Path(__file__).parents[1]


def foreign_module() -> str | None:
    """What is wrong if a module from elsewhere has the name of one of the packages, and Python would import it instead;
    None if all packages are Baton's own."""
    if (problem := _foreign("baton")) is not None:
        return problem
    from baton.system.logs import PACKAGES

    return next(filter(None, map(_foreign, PACKAGES)), None)


def _foreign(package: str) -> str | None:
    spec = importlib.util.find_spec(package)
    file = None if spec is None else spec.origin  # none: a folder without modules, which hides no package
    if file is None or Path(file).is_relative_to(_ROOT):
        return None
    return f"{file} is imported in place of Baton's own; remove its folder from PYTHONPATH"
