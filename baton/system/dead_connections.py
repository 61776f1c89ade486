"""Ends TCP connections of ZeroMQ sockets whose other end is out of reach; knows no plane and no message."""

import math
from typing import Any

import zmq

KEEPALIVE_S = 10
"""A connection without traffic for this long is probed. NAT gateways and firewalls forget connections that are silent
for longer, many after half a minute."""


def end_dead_connections(socket: "zmq.Socket[Any]", timeout_s: float) -> None:
    """Ends each connection whose other end acknowledges nothing for `timeout_s`, and each attempt to connect that takes
    longer. ZeroMQ then connects again.

    TCP by itself repeats unacknowledged packets at pauses that double, up to two minutes, and gives up after a quarter
    of an hour. So a link that works again would remain unused for about as long as it was broken. The other end of a
    lost host's connection would stay open for ever, if nothing is sent over it. Large messages on a slow link are no
    silence, since TCP acknowledges their parts.

    Call this before `bind` or `connect`.
    """
    timeout_ms = math.ceil(timeout_s * 1000)
    socket.setsockopt(
        zmq.TCP_MAXRT, timeout_ms
    )  # TCP_USER_TIMEOUT, see RFC 5482; keepalive probes obey it, too
    socket.setsockopt(zmq.CONNECT_TIMEOUT, timeout_ms)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, KEEPALIVE_S)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, KEEPALIVE_S)
