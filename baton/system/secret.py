"""Where a cluster's secret comes from: the environment, else a file, which the first `baton serve` creates."""

import os
import secrets
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from baton.config import NetworkConfig
from baton.errors import ConfigError
from baton.system.curve import ClusterSecret
from baton.system.home import expanded
from baton.system.regular_file import open_at_once

SECRET_VARIABLE = "BATON_CLUSTER_SECRET"

_MAX_FILE_BYTES = 4096


def default_secret_path(environment: Mapping[str, str]) -> Path:
    """`$XDG_CONFIG_HOME/baton/cluster.secret`, or below `~/.config` (XDG base directory specification)."""
    root = environment.get("XDG_CONFIG_HOME", "")
    return (Path(root) if root else Path.home() / ".config") / "baton" / "cluster.secret"


def load_secret(
    network: NetworkConfig, environment: Mapping[str, str], *, may_create: bool
) -> ClusterSecret | None:
    """The secret of the cluster that this process starts or belongs to; None if `network.security` needs none.

    BATON_CLUSTER_SECRET overrides the file. If neither is usable, the ConfigError says what to do.
    """
    if network.security == "none":
        return None
    if SECRET_VARIABLE in environment:
        return _checked(environment[SECRET_VARIABLE], SECRET_VARIABLE)
    given = network.secret_file
    path = default_secret_path(environment) if given is None else expanded(given)
    try:
        if may_create and not path.exists():
            _create(path)
        return _checked(_read(path), f"network.secret_file {path}")
    except FileNotFoundError:
        raise ConfigError(
            f"network.secret_file: {path} does not exist; copy it from where `baton serve` created it "
            f"(mode 0600), or set {SECRET_VARIABLE}"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"network.secret_file: cannot use {path}: {error.strerror}; name another file, or set {SECRET_VARIABLE}"
        ) from error


def _create(path: Path) -> None:
    """Creates the file atomically and only once: two concurrent processes use the same file."""
    for folder in [folder for folder in (path.parent, *path.parent.parents) if not folder.exists()][::-1]:
        folder.mkdir(mode=0o700, exist_ok=True)
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with open(descriptor, "w") as file:
            os.fchmod(descriptor, 0o600)  # regardless of the umask
            file.write(secrets.token_hex(32) + "\n")
            file.flush()
            os.fsync(descriptor)
        with suppress(FileExistsError):  # another process was faster: use its file
            os.link(draft, path)
    finally:
        draft.unlink()


def _read(path: Path) -> str:
    with open_at_once(path) as file:
        status = os.fstat(file.fileno())  # of the opened file: the path may name another one by now
        mode = stat.S_IMODE(status.st_mode)
        if status.st_uid != os.geteuid():
            raise ConfigError(
                f"network.secret_file: {path} (mode {mode:04o}) belongs to user {status.st_uid}, but this "
                f"process runs as {os.geteuid()}; change its owner with `chown`, or set {SECRET_VARIABLE}"
            )
        if mode & 0o077:
            raise ConfigError(
                f"network.secret_file: {path} has mode {mode:04o}, so other users can access it; run "
                f"`chmod 600 {path}`. If they may have read it, delete it and restart the cluster, which "
                "creates a new one"
            )
        content = file.read(_MAX_FILE_BYTES + 1)
    if len(content) > _MAX_FILE_BYTES:
        raise ConfigError(
            f"network.secret_file: {path} (mode {mode:04o}) holds more than {_MAX_FILE_BYTES} bytes; use "
            "the file that `baton serve` created"
        )
    return content.decode("utf-8", "surrogateescape")


def _checked(text: str, source: str) -> ClusterSecret:
    try:
        return ClusterSecret(text.strip())
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None
