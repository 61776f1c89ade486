"""Keys of the section `gateway` that say who may come in: API keys, and what TLS needs."""

import re
from collections.abc import Iterable
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from baton.config.section import Section

_SHA256 = re.compile(r"[0-9a-f]{64}")

ANONYMOUS = "anybody"
"""What those are called who show no key; nobody else may be called so."""


class ApiKey(Section):
    """One key, as `baton key` prints it: whose it is, its hash, and what it grants.

    The hash is a plain SHA-256, without salt or repetition: those slow the guessing of passwords down, and a key of 256
    random bits is beyond guessing at any speed.
    """

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    """Of the caller, for logs and metrics, and to share fairly by. Two keys of one name are one caller with two keys,
    as while one replaces the other; they must agree in all the rest."""
    sha256: str
    """Of the key, in hexadecimal digits."""
    scopes: tuple[Literal["generate", "observe", "administer"], ...] = Field(
        ("generate",), strict=False, min_length=1
    )
    """`generate`: send requests. `observe`: metrics, and how the fleet stands. `administer`: drain workers, change
    their roles, restart them, and see addresses; includes `observe`."""
    requests_per_minute: int | None = Field(None, ge=1)
    """At each gateway. As many may come at once after a quiet minute; one more is refused with a retry hint."""
    max_concurrent: int | None = Field(None, ge=1)
    """Requests at once at each gateway, those that wait included; each of a request's `n` answers is one."""

    best_priority: int = 0
    """Lower ones go first. Its requests may not ask for one that is better than this and 0, and get none that is better
    than this: with 10, they come behind those that ask for nothing."""

    @model_validator(mode="before")
    @classmethod
    def _check_form(cls, entry: Any) -> Any:
        if not isinstance(entry, dict | ApiKey):  # it may be the key itself, so it is not shown
            raise ValueError("must be a mapping with `name` and `sha256`, as `baton key NAME` prints it")
        return entry

    @field_validator("sha256")
    @classmethod
    def _check_hash(cls, digest: str) -> str:
        if not _SHA256.fullmatch(digest):  # likewise
            raise ValueError(
                "must be 64 hexadecimal digits in lower case, as `baton key NAME` prints them: the hash of the key, "
                "not the key itself"
            )
        return digest

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        if name == ANONYMOUS:
            raise ValueError(f"'{name}' is what callers without a key are called; choose another name")
        return name


class Tls(Section):
    """Certificates of the gateway, for HTTP and gRPC alike; PEM files, taken up again when they change on disk."""

    cert_file: str = Field(min_length=1)
    """The gateway's certificate, and those that lead from it to its authority's."""
    key_file: str = Field(min_length=1)
    """The certificate's private key, not encrypted."""
    client_ca_file: str | None = Field(None, min_length=1)
    """Where it is set, only clients with a certificate of one of these authorities may connect (mTLS)."""


def contradiction_among(keys: Iterable[ApiKey]) -> str | None:
    """What keeps these keys from standing side by side; None if nothing does."""
    by_hash: dict[str, ApiKey] = {}
    by_name: dict[str, ApiKey] = {}
    for key in keys:
        if (same := by_hash.setdefault(key.sha256, key)) is not key:
            return f"'{key.name}' and '{same.name}' have the same sha256; each key stands there once"
        first = by_name.setdefault(key.name, key)
        if key.model_copy(update={"sha256": first.sha256}) != first:
            return f"two keys of '{key.name}' differ in more than their sha256; let them agree, or rename one"
    return None
