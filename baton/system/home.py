"""Home folders: `~` in a path that a user wrote, and a home for users that have none."""

from collections.abc import MutableMapping
from pathlib import Path

from baton.errors import ConfigError


def expanded(path: str) -> Path:
    """The path with a home folder for its `~` or `~USER`. ConfigError if there is no such user."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise ConfigError(f"{path}: there is no user of this name; write the whole path") from None


def ensure_home(environment: MutableMapping[str, str]) -> None:
    """Sets HOME to `/`, as containers do, if nothing says where the home of this user is."""
    try:
        Path.home()
    except RuntimeError:
        environment["HOME"] = "/"
