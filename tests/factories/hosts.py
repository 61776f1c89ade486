"""Addresses of this machine, of every kind on which a worker may listen."""

import socket

import psutil
import pytest


def _own(family: socket.AddressFamily) -> str:
    """An address that is neither loopback nor link-local; empty if there is none."""
    for addresses in psutil.net_if_addrs().values():
        for address in addresses:
            is_local = address.address.startswith(("127.", "::1", "fe80"))
            if address.family is family and not is_local:
                return address.address
    return ""


def _can_listen(family: socket.AddressFamily, host: str) -> bool:
    try:
        with socket.socket(family) as probe:
            probe.bind((host, 0))
    except OSError:
        return False
    return True


OWN_IPV4, OWN_IPV6 = _own(socket.AF_INET), _own(socket.AF_INET6)
HAS_IPV6 = _can_listen(socket.AF_INET6, "::1")
HAS_ALL_OF_127 = _can_listen(socket.AF_INET, "127.0.0.2")

BIND_HOSTS = [
    pytest.param("127.0.0.1", id="loopback"),
    pytest.param("localhost", id="name"),
    pytest.param("lo", id="interface"),
    pytest.param(
        "127.0.0.2",
        id="another loopback address",
        marks=pytest.mark.skipif(not HAS_ALL_OF_127, reason="127.0.0.2 is not ours"),
    ),
    pytest.param(
        "::1", id="IPv6 loopback", marks=pytest.mark.skipif(not HAS_IPV6, reason="there is no IPv6")
    ),
    pytest.param(
        OWN_IPV4,
        id="IPv4",
        marks=pytest.mark.skipif(not OWN_IPV4, reason="there is no IPv4 address but loopback"),
    ),
    pytest.param(
        OWN_IPV6,
        id="IPv6",
        marks=pytest.mark.skipif(not OWN_IPV6, reason="there is no IPv6 address but loopback"),
    ),
    pytest.param(
        "0.0.0.0",
        id="all interfaces",
        marks=pytest.mark.skipif(not OWN_IPV4, reason="there is no IPv4 address but loopback"),
    ),
    pytest.param(
        "::",
        id="all interfaces, IPv6",
        marks=pytest.mark.skipif(not (OWN_IPV6 and OWN_IPV4), reason="there is no address but loopback"),
    ),
]
