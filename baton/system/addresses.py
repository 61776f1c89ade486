"""Where a socket listens, and the address under which peers reach it; knows no plane and no message."""

import asyncio
import errno
import ipaddress
import socket
from typing import Any

import zmq

from baton.errors import ConfigError
from baton.system.hosts import WILDCARDS, host_of, in_url

# Reserved for documentation (RFC 5737, RFC 3849). No packet is sent there; the route to it starts at our own address.
_ELSEWHERE = {socket.AF_INET: "198.51.100.1", socket.AF_INET6: "2001:db8::1"}


def listen(
    listener: "zmq.Socket[Any]", bind_host: str, advertise_host: str | None, port: int = 0, key: str = ""
) -> str:
    """Binds to a port of `bind_host` (an address, an interface or a local name); returns the address for peers.

    Port 0 picks a free port. For any other port, `key` is its configuration key. If the port is taken, the
    ConfigError names the key.

    The result has `advertise_host` or, without it, the address where the socket really listens; for a
    wildcard, this machine's own address. Raises ConfigError if the machine has no such address. If `advertise_host` is
    a name that has only IPv6 addresses, the result has one of them.
    """
    if ":" in bind_host:
        listener.setsockopt(zmq.IPV6, 1)
    try:
        if port:
            listener.bind(f"tcp://{in_url(bind_host)}:{port}")
        else:
            port = listener.bind_to_random_port(f"tcp://{in_url(bind_host)}")
    except zmq.ZMQError as error:
        if error.errno == errno.EADDRINUSE and not port:
            raise ConfigError(
                f"network.bind_host: no port of '{bind_host}' is free; end other processes that use many ports, or "
                "widen net.ipv4.ip_local_port_range"
            ) from error
        if error.errno in (errno.EADDRINUSE, errno.EACCES):
            raise ConfigError(
                f"{key}: cannot listen on port {port} of '{bind_host}' ({error.strerror}); use port 0 for any free one"
            ) from error
        raise ConfigError(
            f"network.bind_host: cannot listen on '{bind_host}' ({error.strerror}); use an address or "
            "interface of this machine, or '0.0.0.0' for all of them"
        ) from error
    host = _host_of(listener, bind_host) if advertise_host is None else _findable(advertise_host)
    return f"tcp://{in_url(host)}:{port}"


def listen_tcp(bind_host: str, advertise_host: str | None, port: int, key: str) -> tuple[socket.socket, str]:
    """Like `listen`, for a plain TCP socket; returns the socket and the `HOST:PORT` to connect to.

    Port 0 picks a free port. If the port is taken, the ConfigError names `key`.
    """
    with zmq.Context() as context, context.socket(zmq.REP) as probe:  # resolves names of interfaces
        advertised = listen(probe, bind_host, advertise_host).removeprefix("tcp://").rpartition(":")[0]
        host = _bound_host(probe)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, dualstack_ipv6=host == "::")
    except OSError as error:
        raise ConfigError(
            f"{key}: cannot listen on {in_url(host)}:{port} ({error.strerror}); use port 0 for any free one"
        ) from error
    return listener, f"{advertised}:{listener.getsockname()[1]}"


def addresses_of(host: str) -> list[str]:
    """The addresses on which a server for `host` listens: those that the name means and that this machine has.

    If there are none, or the name is unknown: `host` itself, so that the caller's own attempt says why.
    """
    try:
        found = {info[4][0]: info[0] for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError:
        return [host]
    return [str(address) for address, family in found.items() if _is_own(str(address), family)] or [host]


def _is_own(address: str, family: int) -> bool:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
    except OSError:  # also if the kernel has no IPv6
        return False
    return True


def connect(dialler: "zmq.Socket[Any]", address: str) -> None:
    """Connects to an address that `listen` returned, IPv4 or IPv6."""
    if "[" in address:
        dialler.setsockopt(zmq.IPV6, 1)
    dialler.connect(address)


async def needs_ipv6(host: str) -> bool | None:
    """Whether a socket needs ZeroMQ's option IPV6 to connect to this name or address; None if it is not found.

    Without the option, ZeroMQ finds only IPv4 addresses. With the option, it prefers IPv6: if a name has addresses of
    both kinds, ZeroMQ finds only the IPv6 addresses.
    """
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return None
    return all(family != socket.AF_INET for family, *_ in found)


def _findable(host: str) -> str:
    """The host as `connect` finds it: the IPv6 address of a name that has no others, since ZeroMQ looks for IPv4
    addresses only (see `needs_ipv6`). Names stay if they are unknown here, or mean this host alone: peers may know them
    otherwise."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return host
    addresses = [str(address) for family, _, _, _, (address, *_) in found if family == socket.AF_INET6]
    public = [address for address in addresses if not _differs_by_host(address)]
    return public[0] if public and len(addresses) == len(found) else host


def _differs_by_host(address: str) -> bool:
    """Whether the IPv6 address means something else on each host."""
    parsed = ipaddress.IPv6Address(address)
    return parsed.is_loopback or parsed.is_link_local


def _host_of(listener: "zmq.Socket[Any]", bind_host: str) -> str:
    host = _bound_host(listener)
    if host not in WILDCARDS:
        return host
    families = (socket.AF_INET6, socket.AF_INET) if ":" in host else (socket.AF_INET,)
    for family in families:
        if own := _own_address(family):
            return own
    raise ConfigError(
        f"network.bind_host: '{bind_host}' listens on all interfaces, but this machine has no route to other "
        "machines, so Baton cannot tell its address; set network.advertise_host"
    )


def _bound_host(listener: "zmq.Socket[Any]") -> str:
    """The host that the socket is bound to, as an address, which may be a wildcard."""
    endpoint = listener.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(endpoint, bytes)
    return host_of(endpoint.rstrip(b"\0").decode().removeprefix("tcp://"))


def _own_address(family: socket.AddressFamily) -> str | None:
    """The source address of this machine's packets to other machines, according to its routes."""
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((_ELSEWHERE[family], 9))
        except OSError:
            return None
        return str(probe.getsockname()[0])
