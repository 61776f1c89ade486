"""Authenticator: identifies the caller of each call and checks its rights, for gRPC and HTTP alike."""

import asyncio
import logging
import os
import stat
from collections.abc import Sequence
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field, ValidationError

from baton.clock import Clock
from baton.config import ANONYMOUS, ApiKey, GatewayConfig, Section, describe
from baton.errors import ConfigError, KeysUnavailable, PermissionDenied, Unauthenticated
from baton.system.garbage import paused
from baton.system.home import expanded
from baton.system.regular_file import open_regular
from baton.system.watched import Lost, Watched
from gateway.auth.callers import ANYBODY, Caller, Right
from gateway.auth.key_store import KeyStore
from gateway.auth.limits import CallerRates

logger = logging.getLogger(__name__)

_FASTEST_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The C loader if available. The Python loader takes seconds for thousands of keys."""
_MERGE = "tag:yaml.org,2002:merge"
_MAX_FILE_BYTES = 16 * 2**20
READ_TIMEOUT_S = 5.0
"""A call waits at most this long for a key file that is read again; then the previous keys count."""
_HOW = "send the header `Authorization: Bearer KEY` (in gRPC: as metadata; for /v1/messages also `x-api-key: KEY`)"


class KeyUse(Enum):
    """Whether callers need API keys."""

    NONE = "none"
    OPTIONAL = "optional"
    REQUIRED = "required"


class Authenticator:
    """One instance serves both frontends of a gateway. Neither its errors nor its logs contain a key."""

    def __init__(self, config: GatewayConfig, clock: Clock) -> None:
        """Raises ConfigError if the keys cannot be used."""
        self._clock = clock
        self._asks_for_keys = config.has_keys
        self._anonymous = _anonymous(config)
        self._rates = CallerRates("requests")
        self._key_store: Watched[KeyStore] | None = None
        self._reading: asyncio.Future[None] | None = None
        self._fixed = KeyStore(config.api_keys)
        if config.api_keys_file is not None:
            path = expanded(config.api_keys_file)
            self._key_store = Watched([path], partial(_read_key_store, path, config.api_keys), clock)

    @property
    def key_use(self) -> KeyUse:
        """Whether callers need keys. A caller without a key may have fewer rights."""
        if not self._asks_for_keys:
            return KeyUse.NONE
        return KeyUse.REQUIRED if self._anonymous is None else KeyUse.OPTIONAL

    def admit(self, caller: Caller, right: Right | None) -> None:
        """Checks that the caller has `right`, and may make another call now. Raises PermissionDenied or RateLimited.

        If `right` is None, every caller may make the call. Only calls with Right.GENERATE count against the rate.
        """
        if right is not None and not caller.may(right):
            raise _denied(caller, right)
        if right is Right.GENERATE:
            now = self._clock.now()
            if error := self._rates.check(caller, now):
                raise error
            self._rates.count(caller, 1, now)

    async def caller_of(self, authorizations: Sequence[str]) -> Caller:
        """Finds the caller by the values of the call's `Authorization` headers; there should be exactly one.
        Raises Unauthenticated or KeysUnavailable.

        If the key file has changed, waits until it is read, for at most READ_TIMEOUT_S.
        """
        if not self._asks_for_keys and self._anonymous is not None:
            return self._anonymous  # the header is ignored: OpenAI's clients always send a key
        if not authorizations and self._anonymous is not None:
            return self._anonymous
        if not authorizations:
            raise Unauthenticated(f"this gateway needs an API key; {_HOW}")
        scheme, _, key = authorizations[0].strip().partition(" ")
        key = key.strip()
        if len(authorizations) > 1 or scheme.lower() != "bearer" or not key:
            raise Unauthenticated(f"the call's headers do not contain exactly one API key; {_HOW}")
        if self._key_store is not None:
            await self._read_changes(self._key_store)
        return self._owner_of(key)

    async def _read_changes(self, key_store: Watched[KeyStore]) -> None:
        """Reads a changed key file on a thread, since thousands of keys would hold up the event loop."""
        if self._reading is None:
            if not key_store.is_due():
                return
            self._reading = asyncio.ensure_future(asyncio.to_thread(key_store.reload))
            self._reading.add_done_callback(self._on_read)
        await asyncio.wait([self._reading], timeout=READ_TIMEOUT_S)

    def _on_read(self, reading: asyncio.Future[None]) -> None:
        self._reading = None
        if not reading.cancelled() and (error := reading.exception()) is not None:
            logger.error("the key file was not read", exc_info=error)

    def _owner_of(self, key: str) -> Caller:
        """The caller to whom the key belongs. While the key file cannot be used, only keys in the configuration itself
        are accepted."""
        unknown: Exception = Unauthenticated(
            "unknown or revoked API key; ask the operator of this gateway for a valid one"
        )
        key_store = self._fixed
        if self._key_store is not None:
            try:
                key_store = self._key_store.latest()
            except Lost:
                unknown = KeysUnavailable(
                    "this gateway cannot use its file of API keys at present; its log says why"
                )
        if (caller := key_store.caller(key)) is None:
            raise unknown
        return caller


def _anonymous(config: GatewayConfig) -> Caller | None:
    """The caller to which requests without a key belong; None if such requests are refused."""
    if config.has_keys and not config.allow_anonymous:
        return None
    if config.is_open_to_its_machine:
        return ANYBODY
    return Caller(ANONYMOUS, best_priority=0, is_stranger=config.has_keys)


def _denied(caller: Caller, right: Right) -> PermissionDenied:
    if caller.name == ANONYMOUS:
        return PermissionDenied(f"this call needs an API key with the scope '{right.value}'; {_HOW}")
    return PermissionDenied(
        f"this call needs the scope '{right.value}', which the key of '{caller.name}' lacks"
    )


class _RepeatedKeyError(yaml.YAMLError):
    """A mapping has a key twice. Quotes no key, since it may be a secret in the wrong place."""


class _Loader(_FASTEST_LOADER):  # type: ignore[misc]  # the base class depends on the installation
    """Refuses a mapping that has a key twice: PyYAML would ignore all but the last. A merged mapping (`<<`) may have
    the same keys."""

    def get_single_node(self) -> Any:
        root = super().get_single_node()
        waiting, seen = [root], set()
        while waiting:
            node = waiting.pop()
            if not isinstance(node, yaml.CollectionNode) or id(node) in seen:
                continue
            seen.add(id(node))
            if isinstance(node, yaml.MappingNode):
                _check_keys(node)
                waiting += [each for pair in node.value for each in pair]
            else:
                waiting += node.value
        return root


def _check_keys(node: yaml.MappingNode) -> None:
    names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.tag != _MERGE]
    if len(set(names)) < len(names):
        raise _RepeatedKeyError(f"has a key twice in the mapping in line {node.start_mark.line + 1}")


class _KeyFile(Section):
    api_keys: tuple[ApiKey, ...] = Field(strict=False)


def _read_key_store(path: Path, others: tuple[ApiKey, ...]) -> KeyStore:
    source = f"gateway.api_keys_file {path}"
    try:
        with open_regular(path) as file:
            mode = os.fstat(file.fileno()).st_mode
            content = file.read(_MAX_FILE_BYTES + 1)
        if stat.S_IMODE(mode) & (stat.S_IWGRP | stat.S_IWOTH):
            raise Lost(f"{source}: other users may write this file, and so add keys; run `chmod go-w {path}`")
        if len(content) > _MAX_FILE_BYTES:
            raise ConfigError(f"{source}: is larger than {_MAX_FILE_BYTES} bytes")
    except OSError as error:
        raise Lost(f"{source}: cannot be read: {error.strerror}") from error
    return _parsed(content, source, others)


@paused()
def _parsed(content: bytes, source: str, others: tuple[ApiKey, ...]) -> KeyStore:
    try:
        keys = yaml.load(content, _Loader)
    except _RepeatedKeyError as error:
        raise ConfigError(f"{source}: {error}") from None
    except Exception:  # YAMLError, or what PyYAML raises for an impossible value; some quote the file
        raise ConfigError(f"{source}: is neither YAML nor JSON") from None
    try:
        return KeyStore(
            (*others, *_KeyFile.model_validate({"api_keys": [] if keys is None else keys}).api_keys)
        )
    except ValidationError as error:
        raise ConfigError(describe(error, source, is_confidential=True)) from None
