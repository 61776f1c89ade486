"""GrpcServer: the gRPC services on their own port, with health, reflection, and limits for each client."""

import asyncio
import logging
from collections.abc import Callable, Mapping

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from baton.config import GatewayConfig
from baton.errors import ConfigError
from baton.system.addresses import addresses_of
from baton.system.hosts import in_url
from baton.system.watched import Watched
from gateway.auth.authenticator import Authenticator
from gateway.auth.certificates import Certificates
from gateway.grpc import health
from gateway.grpc.guard import Guard, OnCallEnded
from gateway.telemetry.call_log import OnCallError

KEEPALIVE_TIMEOUT_S = 20.0
"""A client that does not answer a ping for this time counts as lost."""

HANDSHAKE_TIMEOUT_S = 10.0
"""Limit for the start of a connection, including TLS. gRPC's default is two minutes, and an unfinished
connection counts against the limit of connections."""

CONNECTION_IDLE_S = 60.0
"""A connection without calls is closed after this time. The client opens another one for its next call. gRPC
does not tell who opened a connection before its first call, and cannot close a single connection. So this
time applies to all connections."""

MAX_METADATA_BYTES = 32 * 1024
"""Limit for the size of all headers of a call together."""

_OR_KIND_OF_KEY = ", or does gRPC not support the key of gateway.tls (use RSA, or EC with P-256 or P-384)"

AddTo = Callable[[grpc.aio.Server], None]


class GrpcServer:
    """Used once: `start`, then `stop`."""

    def __init__(
        self,
        config: GatewayConfig,
        services: Mapping[str, AddTo],
        on_call_ended: OnCallEnded,
        on_call_error: OnCallError,
        authenticator: Authenticator,
        certificates: Watched[Certificates] | None,
    ) -> None:
        """`services` maps full names to the functions that add the services to a server.

        With `certificates`, the server accepts only TLS.
        """
        self._host = config.host
        self._port = config.grpc_port
        names = (*services, health.SERVICE_NAME, reflection.SERVICE_NAME)
        self._is_closing = asyncio.Event()
        guard = Guard(
            names, authenticator, config.write_timeout_s, self._is_closing, on_call_error, on_call_ended
        )
        self._server = grpc.aio.server(interceptors=[guard], options=list(options_of(config).items()))
        for add_to in services.values():
            add_to(self._server)
        self._health = health.Health(services)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection(names, self._server)
        self._certificates = certificates
        self.port = 0
        logging.getLogger("grpc._cython.cygrpc").addFilter(_shows_no_header)

    async def start(self) -> None:
        """Binds the port and serves; ConfigError if the port is in use.

        If a host name has several addresses, gRPC binds it even if the port is in use on one of them. A client that
        uses this name could then reach the other program. So each address is bound on its own.
        """
        for host in addresses_of(self._host):
            address = f"{in_url(host)}:{self.port or self._port}"
            try:
                self.port = self._listen(address)
            except RuntimeError as error:
                await self._close_ports()
                or_why = "" if self._certificates is None else _OR_KIND_OF_KEY
                raise ConfigError(
                    f"gateway.grpc_port: cannot listen on {address}; is it in use{or_why}?"
                ) from error
        await self._server.start()

    async def stop(self, grace_s: float) -> None:
        """Refuses new calls at once, gives running calls `grace_s` to end, then cancels them."""
        self._health.report_not_serving()
        self._is_closing.set()
        await self._server.stop(grace_s)

    async def _close_ports(self) -> None:
        """gRPC closes the ports only of a server that was started. Otherwise, clients could connect until this process
        ends, and its end would print an error."""
        await self._server.start()
        await self._server.stop(None)

    def _listen(self, address: str) -> int:
        if self._certificates is None:
            return self._server.add_insecure_port(address)
        return self._server.add_secure_port(address, _credentials(self._certificates))


def _shows_no_header(record: logging.LogRecord) -> bool:
    """Filters gRPC's log: it would show each header that is not UTF-8, and so an API key with a wrong character."""
    return not str(record.msg).startswith("Invalid encoding")


def _credentials(certificates: Watched[Certificates]) -> grpc.ServerCredentials:
    """Credentials of the server's port. Each connection uses the certificates that are current when the connection
    begins.

    TLS 1.2 or newer is required (gRPC's default).
    """
    served = first = certificates.current()

    def renewed() -> grpc.ServerCertificateConfiguration | None:
        """The certificates, if they have changed since the last connection.

        While gRPC takes a configuration, handshakes on its other threads may use the freed one, and the process dies
        (grpc/grpc#36693). So gRPC gets one only after a change.
        """
        nonlocal served
        if (current := certificates.current()) is served:
            return None
        served = current
        return _configuration(current)

    return grpc.dynamic_ssl_server_credentials(
        _configuration(first),
        renewed,  # type: ignore[arg-type]  # gRPC's stub lacks the None, which means no change
        require_client_authentication=first.client_ca_pem is not None,
    )


def _configuration(certificates: Certificates) -> grpc.ServerCertificateConfiguration:
    pair = (certificates.key_pem, certificates.cert_pem)
    return grpc.ssl_server_certificate_configuration([pair], certificates.client_ca_pem)


def options_of(config: GatewayConfig) -> dict[str, int]:
    """The gRPC options for this configuration. All other options keep gRPC's defaults."""
    options = {
        "grpc.so_reuseport": 0,  # an occupied port must be an error, not shared by two servers
        "grpc.max_receive_message_length": config.max_message_mib * 2**20,
        # No limit for answers: an answer that was computed must be sent. `choices.MAX_VALUES` bounds whole answers.
        "grpc.max_send_message_length": -1,
        "grpc.max_metadata_size": MAX_METADATA_BYTES,
        "grpc.absolute_max_metadata_size": MAX_METADATA_BYTES,
        "grpc.max_allowed_incoming_connections": config.max_connections,
        "grpc.max_concurrent_streams": config.grpc_max_streams,
        "grpc.server_handshake_timeout_ms": _ms(HANDSHAKE_TIMEOUT_S),
        "grpc.max_connection_idle_ms": _ms(CONNECTION_IDLE_S),
        "grpc.keepalive_time_ms": _ms(config.grpc_keepalive_s),
        "grpc.keepalive_timeout_ms": _ms(KEEPALIVE_TIMEOUT_S),
        # In practice, gRPC waits this long for the answer to a ping, not as long as the option above says.
        "grpc.http2.ping_timeout_ms": _ms(KEEPALIVE_TIMEOUT_S),
        "grpc.keepalive_permit_without_calls": 1,
        "grpc.http2.max_pings_without_data": 0,  # else a quiet client is pinged only twice
        "grpc.http2.min_ping_interval_without_data_ms": _ms(config.grpc_min_client_ping_s),
    }
    if config.grpc_max_connection_age_s is not None:
        options["grpc.max_connection_age_ms"] = _ms(config.grpc_max_connection_age_s)
        options["grpc.max_connection_age_grace_ms"] = _ms(config.grpc_connection_grace_s)
    return options


def _ms(seconds: float) -> int:
    return round(seconds * 1000)
