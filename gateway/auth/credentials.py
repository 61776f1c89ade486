"""Credentials: how a client proves its identity to a gateway, and how the client verifies the gateway."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """The contents of keys and certificates. The code that creates the object reads the files."""

    api_key: str | None = field(default=None, repr=False)
    uses_tls: bool = False
    """The gateway must prove its identity with a certificate."""
    ca_pem: bytes | None = None
    """The CAs that may have signed the gateway's certificate; None: those that gRPC trusts by default."""
    cert_pem: bytes | None = None
    """The client's own certificate, if the gateway requires one (mTLS)."""
    key_pem: bytes | None = field(default=None, repr=False)
    """The private key of `cert_pem`; set both or neither."""

    def __post_init__(self) -> None:
        assert (self.cert_pem is None) == (self.key_pem is None)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Metadata for every call."""
        return () if self.api_key is None else (("authorization", f"Bearer {self.api_key}"),)

    def channel(self, target: str, options: Sequence[tuple[str, Any]]) -> grpc.aio.Channel:
        """A channel that is not connected yet."""
        if not self.uses_tls:
            return grpc.aio.insecure_channel(target, options)
        trust = grpc.ssl_channel_credentials(self.ca_pem, self.key_pem, self.cert_pem)
        return grpc.aio.secure_channel(target, trust, options)


NO_CREDENTIALS = Credentials()
"""Enough for a gateway on loopback without API keys."""
