"""Baton's own version, for metrics, traces and the API."""

from importlib.metadata import PackageNotFoundError, version

UNINSTALLED = "0+source"
"""Where the tree runs without having been installed, as on a GPU machine that it was carried to."""


def baton_version() -> str:
    """As installed."""
    try:
        return version("baton")
    except PackageNotFoundError:
        return UNINSTALLED
