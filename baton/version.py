"""Baton's own version, for metrics, traces and the API."""

from importlib.metadata import PackageNotFoundError, version

UNINSTALLED = "0+source"
"""The version of a source tree that is not installed, for example of a copy on a GPU machine."""


def baton_version() -> str:
    """The version of the installed package, or UNINSTALLED."""
    try:
        return version("baton")
    except PackageNotFoundError:
        return UNINSTALLED
