"""Certificates: the TLS files for gRPC and HTTP, read and checked against each other."""

import codecs
import ssl
from dataclasses import dataclass
from functools import partial

from baton.clock import Clock
from baton.config import Tls
from baton.errors import ConfigError
from baton.system.home import expanded
from baton.system.regular_file import open_regular
from baton.system.watched import UnreadableFiles, Watched


@dataclass(frozen=True, slots=True)
class Certificates:
    """One consistent version of the files."""

    cert_pem: bytes
    key_pem: bytes
    client_ca_pem: bytes | None
    context: ssl.SSLContext
    """The same files as a context for Python's TLS, for connections that begin while this version is current.

    Each version has its own context with its own sessions and ticket keys, so a session ends with its
    version. This is necessary, since the CA that verified the session's client may have been removed.
    """


def watched_certificates(tls: Tls, clock: Clock) -> Watched[Certificates]:
    """Watches the files. Raises ConfigError if they cannot be used now. If they cannot be used later, the last usable
    version stays in use."""
    names = (tls.cert_file, tls.key_file, tls.client_ca_file)
    paths = [expanded(name) for name in names if name is not None]
    return Watched(paths, partial(_read_all, tls), clock)


def _read_all(tls: Tls) -> Certificates:
    cert_pem = _read("cert_file", tls.cert_file, b"CERTIFICATE-----")
    key_pem = _read("key_file", tls.key_file, b"PRIVATE KEY-----")
    if b"ENCRYPTED" in key_pem:
        raise ConfigError(
            f"gateway.tls.key_file {tls.key_file}: is encrypted, and its passphrase cannot be entered "
            "here; decrypt it with `openssl pkey`, and let only the gateway read the result"
        )
    client_ca_pem = None
    if tls.client_ca_file is not None:
        client_ca_pem = _read("client_ca_file", tls.client_ca_file, b"CERTIFICATE-----")
    return Certificates(cert_pem, key_pem, client_ca_pem, _context(tls, client_ca_pem))


def _read(field: str, name: str, mark: bytes) -> bytes:
    try:
        with open_regular(expanded(name)) as file:
            content = file.read()
    except OSError as error:
        raise UnreadableFiles(f"gateway.tls.{field} {name}: cannot be read: {error.strerror}") from error
    if mark not in content:
        raise ConfigError(
            f"gateway.tls.{field} {name}: contains no {mark.decode().rstrip('-').lower()} in PEM"
        )
    return content.removeprefix(codecs.BOM_UTF8)  # gRPC does not find a certificate or key after this mark


def _context(tls: Tls, client_ca_pem: bytes | None) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(expanded(tls.cert_file), expanded(tls.key_file))
    except OSError as error:
        kind = ConfigError if isinstance(error, ssl.SSLError) else UnreadableFiles
        raise kind(f"gateway.tls: {_why(error, tls)}") from error
    if client_ca_pem is not None:
        try:
            context.load_verify_locations(cadata=_as_ascii(client_ca_pem))
        except ssl.SSLError as error:
            raise ConfigError(
                f"gateway.tls.client_ca_file {tls.client_ca_file}: {error.reason or error}"
            ) from error
        context.verify_mode = ssl.CERT_REQUIRED
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # a CA without its root is enough, as in gRPC
        context.options |= ssl.OP_NO_TICKET
        context.num_tickets = 0  # in a resumed session, the client does not send its certificate again
    return context


def _as_ascii(pem: bytes) -> str:
    """The text with `?` for each byte that is not ASCII. OpenSSL ignores text between certificates, such as comments in
    other languages, but Python refuses it unless it is ASCII."""
    return pem.decode("ascii", "replace").replace("\ufffd", "?")


def _why(error: OSError, tls: Tls) -> str:
    if isinstance(error, ssl.SSLError) and error.reason == "KEY_VALUES_MISMATCH":
        return (
            f"the key in key_file {tls.key_file} does not match the certificate in cert_file {tls.cert_file}"
        )
    reason = getattr(error, "reason", None) or error.strerror or str(error)
    return f"cannot use cert_file {tls.cert_file} and key_file {tls.key_file}: {reason}"
