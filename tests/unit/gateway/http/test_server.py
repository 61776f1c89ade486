"""What HTTP connections inherit from the listening socket."""

import socket

import pytest

from gateway.http.server import SEND_BUFFER_BYTES, _set_up


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_connections_send_small_writes_at_once_and_keep_little(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as listener:
        _set_up(listener, 2.5)
        with socket.create_connection(listener.getsockname()[:2]):
            connection, _ = listener.accept()
    with connection:
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) <= 2 * SEND_BUFFER_BYTES
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 2500
