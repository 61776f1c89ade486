"""Makes the store that the configuration names. Only this module imports redis_store.py."""

from baton.clock import Clock
from baton.config import GatewayConfig
from baton.errors import ConfigError
from gateway.http.responses.store import MemoryStore, ResponseStore, StoreBounds


def store_for(config: GatewayConfig, clock: Clock) -> ResponseStore | None:
    """The store; None if responses are not stored. Raises ConfigError if a package is missing or the URL is
    invalid."""
    bounds = StoreBounds(config.response_store_caller_mib * 2**20, config.response_store_ttl_s)
    if config.response_store == "none":
        return None
    if config.response_store == "memory":
        return MemoryStore(bounds, config.response_store_mib * 2**20, clock)
    try:
        from gateway.http.responses.redis_store import RedisStore  # an optional extra
    except ImportError as error:
        raise ConfigError(
            f"gateway.response_store needs Redis' client, but {error.name} is not installed; install Baton with its "
            "extra: pip install 'baton[redis]'"
        ) from None
    try:
        return RedisStore(config.response_store, bounds)
    except ValueError:  # its text may quote a part of the password
        raise ConfigError(
            "gateway.response_store: is no valid URL of a Redis, as redis://:PASSWORD@HOST:6379/0; write reserved "
            "characters of a password as %XX"
        ) from None
