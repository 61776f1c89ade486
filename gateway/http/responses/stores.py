"""Makes the store that the configuration names. Only this module imports redis_store.py."""

import re
from contextlib import suppress

from baton.clock import Clock
from baton.config import GatewayConfig
from baton.errors import ConfigError
from baton.system.home import expanded
from baton.system.regular_file import open_at_once
from gateway.http.responses.store import MemoryStore, ResponseStore, StoreBounds

_URL = re.compile(r"rediss?://\S+")


def store_for(config: GatewayConfig, clock: Clock) -> ResponseStore | None:
    """The store; None if responses are not stored. Raises ConfigError if a package or the file is missing, or the URL
    is invalid. Opens no connection."""
    bounds = StoreBounds(config.response_store_caller_mib * 2**20, config.response_store_ttl_s)
    key, url = "gateway.response_store", config.response_store
    if config.response_store_file is not None:
        key = f"gateway.response_store_file {config.response_store_file}"
        url = _read(key, config.response_store_file)
    elif url == "none":
        return None
    elif url == "memory":
        return MemoryStore(bounds, config.response_store_mib * 2**20, clock)
    try:
        from gateway.http.responses.redis_store import RedisStore  # an optional extra
    except ImportError as error:
        raise ConfigError(
            f"{key} needs Redis' client, but {error.name} is not installed; install Baton with its "
            "extra: pip install 'baton[redis]'"
        ) from None
    with suppress(ValueError):  # the text of the error may quote a part of the password
        if _URL.fullmatch(url):
            return RedisStore(url, bounds)
    raise ConfigError(
        f"{key}: must be a Redis URL like redis://:PASSWORD@HOST:6379/0; write reserved characters of a password as %XX"
    )


def _read(key: str, path: str) -> str:
    try:
        with open_at_once(expanded(path)) as file:
            return file.read().decode().strip()
    except OSError as error:
        raise ConfigError(f"{key}: cannot be read: {error.strerror}") from None
    except (ValueError, ConfigError) as error:  # text that is not UTF-8, an unknown ~user
        raise ConfigError(f"{key}: cannot be read: {error}") from None
