"""Reads values of a config.json, and checks their types and ranges; knows no key."""

from collections.abc import Mapping
from typing import Any

from baton.errors import ModelError


def count_of(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """The positive integer of this key; ModelError names the key and its value if it is another value."""
    value = default if config.get(key) is None else config[key]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"{key} must be a positive integer, got {value!r}")
    return value


def positive_of(config: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """The positive number of this key; ModelError names the key and its value if it is another value."""
    value = default if config.get(key) is None else config[key]
    if not isinstance(value, int | float) or not 0.0 < value < 1e30:
        raise ModelError(f"{key} must be a positive number, got {value!r}")
    return float(value)
