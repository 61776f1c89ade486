"""Values of a config.json that must be of a kind; knows no key."""

from collections.abc import Mapping
from typing import Any

from baton.errors import ModelError


def count_of(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """A positive integer; ModelError names the key and what it has."""
    value = default if config.get(key) is None else config[key]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"{key} must be a positive integer, got {value!r}")
    return value


def positive_of(config: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """A positive number; ModelError names the key and what it has."""
    value = default if config.get(key) is None else config[key]
    if not isinstance(value, int | float) or not 0.0 < value < 1e30:
        raise ModelError(f"{key} must be a positive number, got {value!r}")
    return float(value)
