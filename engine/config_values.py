"""Reads values of a config.json, and checks their types and ranges; knows no key."""

from collections.abc import Mapping
from typing import Any

from baton.errors import ModelError

MAX_SIZE = 2**18
"""The largest size of a layer, as for GGUF files. A loader lists the dimensions of heads before it compares sizes with
those of the tensors."""
MAX_TOKENS = 2**31 - 1
"""The most tokens of a vocabulary, and the most positions."""


def count_of(config: Mapping[str, Any], key: str, default: int | None = None, *, most: int = MAX_SIZE) -> int:
    """The positive integer of this key; ModelError names the key and its value if the value is anything else, or if it
    is greater than `most`."""
    value = default if config.get(key) is None else config[key]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"{key} must be a positive integer, got {value!r:.80}")
    if value > most:
        raise ModelError(f"{key} must be at most {most:,}, got {value!r:.80}")
    return value


def positive_of(config: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """The positive number of this key, neither tiny nor huge, which is safe to divide by; ModelError names the key and
    its value if the value is anything else."""
    value = default if config.get(key) is None else config[key]
    if not isinstance(value, int | float) or isinstance(value, bool) or not 1e-30 < value < 1e30:
        raise ModelError(f"{key} must be a positive number, got {value!r:.80}")
    return float(value)


def positive_or_zero_of(config: Mapping[str, Any], key: str) -> float | None:
    """The number of this key, at least 0; None if the key is null or missing. ModelError as in `positive_of`."""
    value = config.get(key)
    if value is None:
        return None
    return 0.0 if value == 0 and not isinstance(value, bool) else positive_of(config, key)


def flag_of(config: Mapping[str, Any], key: str, default: bool = False) -> bool:
    """The truth value of this key; null and a missing key mean `default`."""
    value = default if config.get(key) is None else config[key]
    if value not in (True, False):
        raise ModelError(f"{key} must be true or false, got {value!r:.80}")
    return bool(value)


def object_of(config: Mapping[str, Any], key: str) -> dict[str, Any]:
    """A copy of the object of this key; empty if the key is missing or null."""
    value = config.get(key)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ModelError(f"{key} must be an object, got {value!r:.80}")
    return dict(value)


def refuse_other(config: Mapping[str, Any], key: str, *supported: object) -> None:
    """ModelError if this key has a value other than these; null counts as absent."""
    value = config.get(key)
    if value is not None and value not in supported:
        raise ModelError(f"{key} {value!r:.80} is not supported; only {', '.join(map(repr, supported))} is")
