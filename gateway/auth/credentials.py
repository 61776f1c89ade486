"""Credentials: what a client shows to a gateway, and by what it knows the gateway."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """Held in memory; whoever makes them reads the files."""

    api_key: str | None = field(default=None, repr=False)
    uses_tls: bool = False
    """The gateway must prove who it is, by its certificate."""
    ca_pem: bytes | None = None
    """Whose word on that counts; None: the authorities that gRPC knows."""
    cert_pem: bytes | None = None
    """The client's own certificate, where the gateway asks for one (mTLS)."""
    key_pem: bytes | None = field(default=None, repr=False)
    """Its private key; both or neither."""

    def __post_init__(self) -> None:
        assert (self.cert_pem is None) == (self.key_pem is None)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Of every call."""
        return () if self.api_key is None else (("authorization", f"Bearer {self.api_key}"),)

    def channel(self, target: str, options: Sequence[tuple[str, Any]]) -> grpc.aio.Channel:
        """Not connected yet."""
        if not self.uses_tls:
            return grpc.aio.insecure_channel(target, options)
        trust = grpc.ssl_channel_credentials(self.ca_pem, self.key_pem, self.cert_pem)
        return grpc.aio.secure_channel(target, trust, options)


NO_CREDENTIALS = Credentials()
"""Enough for a gateway on loopback that asks nobody for a key."""
