"""`baton probe`: checks the health of one process of a cluster, for images without other tools."""

import asyncio
import http.client
import os
import socket
import ssl
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

from baton.config import NetworkConfig
from baton.errors import ClusterError, ConfigError
from baton.system.hosts import in_url, is_address

_MAX_BODY_BYTES = 300


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """TLS settings for https.

    Without a CA, the probe does not check the server's certificate: a probe tests health, not trust.
    """

    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None


def run(url: str, timeout_s: float, tls: TlsFiles, network: NetworkConfig) -> int:
    """Returns if the process is healthy. Raises ClusterError with the reason if it is not.

    ConfigError means that the URL cannot be probed. `timeout_s` applies to each step. A `fleet` URL is probed
    with the cluster secret, as `network` configures it.
    """
    parts = _parts_of(url)
    if parts.scheme != "https" and tls != TlsFiles():
        raise ConfigError(
            f"--tls-ca, --tls-cert and --tls-key need an https URL, but this one is {parts.scheme}"
        )
    if parts.scheme != "fleet" and network.secret_file is not None:
        raise ConfigError(f"--secret-file needs a fleet URL, but this one is {parts.scheme}")
    if parts.scheme == "fleet":
        asyncio.run(_ask_control_server(parts.netloc, timeout_s, network))
        return 0
    try:
        if parts.scheme == "tcp":
            socket.create_connection((parts.hostname, parts.port), timeout_s).close()
        else:
            _get(parts, timeout_s, tls)
    except (OSError, http.client.HTTPException) as error:
        raise ClusterError(f"{url}: {str(error) or type(error).__name__}") from None
    return 0


def _parts_of(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        url.encode("ascii")
    except ValueError:
        parts = urlsplit("")
    if parts.scheme not in ("http", "https", "tcp", "fleet") or not is_address(parts.netloc):
        raise ConfigError(
            f"URL: got '{url}'; use SCHEME://HOST:PORT, where the scheme is http, https, tcp or fleet"
        )
    if parts.scheme in ("tcp", "fleet") and (parts.path.strip("/") or parts.query or parts.fragment):
        raise ConfigError(
            f"URL: got '{url}'; tcp and fleet take no path, only {parts.scheme}://{parts.netloc}"
        )
    return parts


def _get(parts: SplitResult, timeout_s: float, tls: TlsFiles) -> None:
    host = parts.hostname or ""
    if parts.scheme == "http":
        connection = http.client.HTTPConnection(host, parts.port, timeout=timeout_s)
    else:
        connection = http.client.HTTPSConnection(host, parts.port, timeout=timeout_s, context=_context(tls))
    try:
        path = parts.path + (f"?{parts.query}" if parts.query else "")
        connection.request("GET", path or "/", headers={"Host": f"{in_url(host)}:{parts.port}"})
        answer = connection.getresponse()
        if answer.status != http.HTTPStatus.OK:
            body = answer.read(_MAX_BODY_BYTES).decode("utf-8", "replace")
            raise ClusterError(f"{parts.geturl()}: {answer.status} {answer.reason}: {body}")
    finally:
        connection.close()


def _context(tls: TlsFiles) -> ssl.SSLContext:
    if tls.key is not None and tls.cert is None:
        raise ConfigError("--tls-key needs --tls-cert: the certificate of this private key")
    for flag, path in (("--tls-ca", tls.ca), ("--tls-cert", tls.cert), ("--tls-key", tls.key)):
        try:
            if path is not None:
                path.open("rb").close()
        except OSError as error:  # ssl would name no file
            raise ConfigError(f"{flag} {path}: cannot be read: {error.strerror}") from error
    try:
        context = ssl.create_default_context(cafile=tls.ca)
        # As in gRPC: a CA without its root is enough, and so is one that lacks extensions of RFC 5280.
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
        if tls.ca is None:
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        if tls.cert is not None:
            context.load_cert_chain(tls.cert, tls.key)
    except OSError as error:
        raise ConfigError(f"cannot use --tls-ca, --tls-cert or --tls-key: {error}") from error
    return context


async def _ask_control_server(address: str, timeout_s: float, network: NetworkConfig) -> None:
    """A control server is healthy if its fleet serves."""
    # Imported here, since other probes need none of these modules: the imports would be a fifth of their CPU time.
    from baton.messages.control import GetConfiguration
    from baton.system.curve import derive_fleet_keys
    from baton.system.secret import load_secret
    from cluster.control_api.zmq_carrier import control_client

    keys = derive_fleet_keys(load_secret(network, os.environ, may_create=False))
    try:
        async with asyncio.timeout(timeout_s), control_client(address, keys, network) as client:
            await client.call(GetConfiguration())
    except TimeoutError:
        raise ClusterError(f"fleet://{address}: no answer within {timeout_s:g} s") from None
