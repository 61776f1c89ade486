"""Target: the gateway that a command calls, and the credentials for it, from flags and environment."""

import argparse
import codecs
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from baton.errors import ConfigError
from baton.system.hosts import host_of, is_loopback
from baton.system.regular_file import open_at_once
from gateway import GatewayClient
from gateway.auth.credentials import NO_CREDENTIALS, Credentials

KEY_VARIABLE = "BATON_API_KEY"
PROXY_VARIABLES = ("grpc_proxy", "https_proxy", "http_proxy")
"""gRPC uses the proxy in the first of these variables that is set."""

_MAX_FILE_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Target:
    """A gateway's address, and the credentials for it."""

    address: str
    """HOST:PORT of its gRPC API."""
    credentials: Credentials = NO_CREDENTIALS

    def client(self) -> GatewayClient:
        return GatewayClient(self.address, credentials=self.credentials)


def target_from(options: argparse.Namespace, environment: Mapping[str, str]) -> Target:
    """Builds the target from the flags of `add_target_flags`.

    ConfigError names the bad flag, and shows no key.
    """
    if not options.target.strip():
        raise ConfigError(f"--target: got {options.target!r}; use HOST:PORT")
    cert, key = options.tls_cert, options.tls_key
    if (cert is None) != (key is None):
        raise ConfigError(
            "--tls-cert and --tls-key must be given together: a certificate and its private key"
        )
    credentials = Credentials(
        api_key=_api_key(options, environment),
        uses_tls=options.tls or options.tls_ca is not None or cert is not None,
        ca_pem=_read("--tls-ca", options.tls_ca, "CERTIFICATE-----"),
        cert_pem=_read("--tls-cert", cert, "CERTIFICATE-----"),
        key_pem=_read("--tls-key", key, "PRIVATE KEY-----"),
    )
    return Target(options.target, credentials)


def advice_on_proxy(address: str, environment: Mapping[str, str]) -> list[str]:
    """Advice if a gateway cannot be reached, perhaps because gRPC calls it through a proxy."""
    if is_loopback(host_of(address)):
        return []
    set_ones = [name for name in PROXY_VARIABLES if environment.get(name)]
    return [
        f"{name} is set; add the gateway's host to no_proxy to call it without a proxy"
        for name in set_ones[:1]
    ]


def _api_key(options: argparse.Namespace, environment: Mapping[str, str]) -> str | None:
    if options.api_key is not None:
        return _checked(options.api_key, "--api-key")
    content = _read("--api-key-file", options.api_key_file)
    if content is not None:
        return _checked(content.decode("utf-8", "replace"), f"--api-key-file {options.api_key_file}")
    if KEY_VARIABLE in environment:
        return _checked(environment[KEY_VARIABLE], KEY_VARIABLE)
    return None


def _checked(text: str, source: str) -> str:
    key = text.strip()
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(f"{source}: no valid API key; expected one word, as `baton key` prints it")
    return key


def _read(flag: str, path: Path | None, mark: str = "") -> bytes | None:
    """The content of the file without a byte order mark. It must contain `mark`. For other files, gRPC would only say
    that the gateway does not answer."""
    if path is None:
        return None
    try:
        with open_at_once(path) as file:
            content = file.read(_MAX_FILE_BYTES)
    except OSError as error:
        raise ConfigError(f"{flag} {path}: cannot be read: {error.strerror}") from error
    if mark.encode() not in content:
        raise ConfigError(f"{flag} {path}: contains no {mark.rstrip('-').lower()} in PEM")
    return content.removeprefix(codecs.BOM_UTF8)
