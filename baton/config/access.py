"""Keys of the section `gateway` that control access: API keys and TLS."""

import re
from collections.abc import Iterable
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from baton.config.section import Section

_SHA256 = re.compile(r"[0-9a-f]{64}")

ANONYMOUS = "anybody"
"""The name of callers without a key; no API key may use it."""


class ApiKey(Section):
    """One key, as `baton key` prints it: its owner, its hash, and what it grants.

    The hash is plain SHA-256. Salt and repetition would slow down the guessing of a password. A key needs neither,
    since its 256 random bits cannot be guessed at any speed.
    """

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    """The caller's name, for logs, metrics and fair sharing. A caller may have two keys, for example while one replaces
    the other. The entries of both keys must agree in everything but `sha256`."""
    sha256: str = Field(json_schema_extra={"pattern": f"^{_SHA256.pattern}$"})
    """SHA-256 of the key, in hexadecimal digits."""
    scopes: tuple[Literal["generate", "observe", "administer"], ...] = Field(
        ("generate",), strict=False, min_length=1
    )
    """`generate`: send requests. `observe`: read metrics and the state of the fleet. `administer`: drain workers,
    change their roles, restart them, and see addresses; includes `observe`."""
    requests_per_minute: int | None = Field(None, ge=1)
    """Limit at each gateway. After a quiet minute, this many may come at once; further ones are refused with a retry
    hint. A request for `n` answers counts as one."""
    tokens_per_minute: int | None = Field(None, ge=1)
    """Limit at each gateway for the tokens of prompts and of all their `n` answers. After a quiet minute, this many may
    be used at once. A request begins if at least one token is left, and may then use more tokens than are left. Then
    further requests are refused until enough time has passed for the excess."""
    max_concurrent: int | None = Field(None, ge=1)
    """The most requests at once at each gateway, waiting ones included; each of a request's `n` answers counts as
    one."""
    best_priority: int = 0
    """The best priority that the key's requests get; lower values go first. With 10, the requests come behind requests
    of the default priority 0. With -5, a request may ask for -5, but for no lower value."""

    @model_validator(mode="before")
    @classmethod
    def _check_form(cls, entry: Any) -> Any:
        if not isinstance(entry, dict | ApiKey):  # the entry may be the key itself: do not show it
            raise ValueError("must be a mapping with `name` and `sha256`, as `baton key NAME` prints it")
        return entry

    @field_validator("sha256")
    @classmethod
    def _check_hash(cls, digest: str) -> str:
        if not _SHA256.fullmatch(digest):  # this may be the key itself: do not show it
            raise ValueError(
                "must be the hash that `baton key NAME` prints (64 hexadecimal digits in lower case), not the key "
                "itself"
            )
        return digest

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        if name == ANONYMOUS:
            raise ValueError(f"'{name}' is Baton's name for callers without a key; choose another name")
        return name


class Tls(Section):
    """Certificates of the gateway, for HTTP and gRPC alike. They are PEM files, which are loaded again when they
    change."""

    cert_file: str = Field(min_length=1)
    """The gateway's certificate, followed by its intermediate certificates."""
    key_file: str = Field(min_length=1)
    """The certificate's private key, not encrypted."""
    client_ca_file: str | None = Field(None, min_length=1)
    """If set, only clients with a certificate signed by one of these authorities may connect (mTLS)."""


def contradiction_among(keys: Iterable[ApiKey]) -> str | None:
    """Why these keys cannot be used together; None if they can."""
    by_hash: dict[str, ApiKey] = {}
    by_name: dict[str, ApiKey] = {}
    for key in keys:
        if (same := by_hash.setdefault(key.sha256, key)) is not key:
            return f"'{key.name}' and '{same.name}' have the same sha256; list each key once"
        first = by_name.setdefault(key.name, key)
        if key.model_copy(update={"sha256": first.sha256}) != first:
            return (
                f"two keys have the name '{key.name}', but differ in more than their sha256; make their other fields "
                "equal, or rename one key"
            )
    return None
