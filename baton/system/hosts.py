"""Names and addresses of hosts as a configuration may give them; opens no socket."""

import ipaddress

WILDCARDS = ("*", "0.0.0.0", "::")
"""All interfaces of the machine: addresses to listen on, not to connect to."""


def is_host(host: str) -> bool:
    """Whether the text has the form of a host's name or address. Only a connection shows whether the host exists."""
    if ":" not in host:
        return not set(host) & set("[]/ ") and _has_labels(host)
    try:
        return ipaddress.ip_address(host).version == 6
    except ValueError:
        return False


def _has_labels(name: str) -> bool:
    """Whether the parts between the dots have valid lengths. If not, a look-up of the name raises UnicodeError."""
    try:
        name.encode("idna")
    except UnicodeError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Whether only this machine can connect. A name may mean any address: false for all names but `localhost`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def in_url(host: str) -> str:
    """The host as it is written before a port: an IPv6 address gets brackets."""
    return f"[{host}]" if ":" in host else host


def host_of(address: str) -> str:
    """The host of HOST:PORT, without the brackets of an IPv6 address."""
    return address.rpartition(":")[0].strip("[]")


def is_address(text: str) -> bool:
    """Whether the text is HOST:PORT, with a host as in `is_host`; an IPv6 address needs brackets."""
    host, colon, port = text.rpartition(":")
    if not colon or not port.isascii() or not port.isdigit() or not 0 < int(port) <= 65_535:
        return False
    if host.startswith("[") and host.endswith("]"):
        return ":" in host and is_host(host[1:-1])
    return bool(host) and ":" not in host and is_host(host)
