"""Where a ZeroMQ socket listens, and the address under which others reach it; knows no plane and no message."""

import socket
from typing import Any

import zmq

from baton.errors import ConfigError

WILDCARDS = ("*", "0.0.0.0", "::")
"""Every interface of the machine: good to listen on, and no place that anybody could connect to."""

# Reserved for documentation (RFC 5737, RFC 3849). Nothing is sent there; the route to it begins at our own address.
_ELSEWHERE = {socket.AF_INET: "198.51.100.1", socket.AF_INET6: "2001:db8::1"}


def listen(listener: "zmq.Socket[Any]", bind_host: str, advertise_host: str | None) -> str:
    """Binds to a free port of `bind_host`, an address, an interface or a local name; what others connect to.

    Others are told `advertise_host` or, without it, where the socket really listens: behind a wildcard, this machine's
    own address. ConfigError if there is no such place.
    """
    if ":" in bind_host:
        listener.setsockopt(zmq.IPV6, 1)
    try:
        port = listener.bind_to_random_port(f"tcp://{_in_url(bind_host)}")
    except zmq.ZMQError as error:
        raise ConfigError(
            f"network.bind_host: cannot listen on '{bind_host}' ({error.strerror}); use an address or an interface of "
            "this machine, or '0.0.0.0' for all of them"
        ) from error
    return f"tcp://{_in_url(advertise_host or _host_of(listener, bind_host))}:{port}"


def connect(dialler: "zmq.Socket[Any]", address: str) -> None:
    """Connects to an address that `listen` gave, of either family."""
    if "[" in address:
        dialler.setsockopt(zmq.IPV6, 1)
    dialler.connect(address)


def _host_of(listener: "zmq.Socket[Any]", bind_host: str) -> str:
    endpoint = listener.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(endpoint, bytes)
    host = endpoint.rstrip(b"\0").decode().removeprefix("tcp://").rpartition(":")[0].strip("[]")
    if host not in WILDCARDS:
        return host
    families = (socket.AF_INET6, socket.AF_INET) if ":" in host else (socket.AF_INET,)
    for family in families:
        if own := _own_address(family):
            return own
    raise ConfigError(
        f"network.bind_host: '{bind_host}' listens everywhere, but this machine has no route to others, and so no "
        "address to tell them; set network.advertise_host"
    )


def _own_address(family: socket.AddressFamily) -> str | None:
    """Where this machine's packets to others come from, as its routes have it."""
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((_ELSEWHERE[family], 9))
        except OSError:
            return None
        return str(probe.getsockname()[0])


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host
