"""Certificates for gRPC's listening port."""

import grpc

from baton.system.watched import Watched
from gateway.auth.certificates import Certificates


def server_credentials(certificates: Watched[Certificates]) -> grpc.ServerCredentials:
    """Every connection uses the certificates that are current when it begins; TLS 1.2 or newer, gRPC's default."""
    first = certificates.current()
    return grpc.dynamic_ssl_server_credentials(
        _configuration(first),
        lambda: _configuration(certificates.current()),
        require_client_authentication=first.client_ca_pem is not None,
    )


def _configuration(certificates: Certificates) -> grpc.ServerCertificateConfiguration:
    pair = (certificates.key_pem, certificates.cert_pem)
    return grpc.ssl_server_certificate_configuration([pair], certificates.client_ca_pem)
