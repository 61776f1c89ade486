"""KeyStore: finds the owner of an API key; stores only hashes of keys."""

import hashlib
import hmac
import secrets
from collections.abc import Iterable

from baton.config import ApiKey, contradiction_among
from baton.errors import ConfigError
from gateway.auth.callers import Caller, Right

PREFIX = "baton-"
"""The beginning of every key, by which people and scanners recognize a leaked key."""


def new_key() -> str:
    """256 random bits, in characters that a header may contain."""
    return PREFIX + secrets.token_urlsafe(32)


def hash_of(key: str) -> str:
    """The hash under which a key is stored."""
    return _digest(key).hex()


class KeyStore:
    """Finds a key's owner. The time that a lookup takes reveals nothing about other keys. A lookup hashes the key with
    a secret of this process. So an attacker cannot make a key whose hash resembles the hash of another key."""

    def __init__(self, keys: Iterable[ApiKey]) -> None:
        """Raises ConfigError if two keys contradict each other."""
        self._blinding = secrets.token_bytes(32)
        keys = tuple(keys)
        if reason := contradiction_among(keys):
            raise ConfigError(f"gateway.api_keys: {reason}")
        self._callers = {self._blind(bytes.fromhex(key.sha256)): _caller(key) for key in keys}

    def caller(self, key: str) -> Caller | None:
        """The owner of the key; None if the key is unknown."""
        return self._callers.get(self._blind(_digest(key)))

    def _blind(self, digest: bytes) -> bytes:
        return hmac.digest(self._blinding, digest, "sha256")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _caller(key: ApiKey) -> Caller:
    return Caller(
        key.name,
        frozenset(map(Right, key.scopes)),
        requests_per_minute=key.requests_per_minute,
        tokens_per_minute=key.tokens_per_minute,
        max_concurrent=key.max_concurrent,
        best_priority=key.best_priority,
    )
