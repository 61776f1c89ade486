"""CURVE on the ZeroMQ planes: only processes that know the cluster's secret can connect, listen in or alter a byte.

Every key is derived from one ClusterSecret, so that no key has to be distributed. A plane has one key pair for its
servers and one for their clients. Its servers admit only that client key (ZAP, ZeroMQ RFC 27). Knows neither files
nor the environment, nor the messages of a plane.
"""

import hashlib
import logging
from collections.abc import AsyncIterator, Container
from dataclasses import dataclass, field
from typing import Any

import zmq
import zmq.asyncio
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message, recv_monitor_message

from baton.errors import ConfigError

logger = logging.getLogger(__name__)

MIN_SECRET_CHARACTERS = 16

MESSAGE_OVERHEAD_BYTES = 33
"""The number of bytes that encryption adds to a frame (RFC 26, MESSAGE): command name, nonce, authenticator, flags.
ZeroMQ's limit MAXMSGSIZE includes these bytes."""

FAILED_HANDSHAKES: int = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)

REFUSED = (
    "it refused the connection in the handshake; check that both processes use the same cluster secret and the same "
    "network.security"
)
"""What a client reports about a server with which its handshake failed."""

HANDSHAKE_TIMEOUT_S = 10.0
"""A connection that has not proved knowledge of the secret is closed after this time. libzmq would allow 30 s."""

_ZAP_ENDPOINT = "inproc://zeromq.zap.01"  # fixed by RFC 27; one for each zmq.Context
_ZAP_VERSION = b"1.0"

_PREFIX_KEY_WITHOUT_SECRET = b"baton: a cluster without secret"


@dataclass(frozen=True, slots=True, repr=False)
class PlaneKeys:
    """Both key pairs of one plane, as Z85 text."""

    server_public: bytes
    server_secret: bytes
    client_public: bytes
    client_secret: bytes


@dataclass(frozen=True, slots=True)
class ClusterKeys:
    """The keys of the request plane and the KV plane; None if a plane is unencrypted. The keys do not reveal the
    secret."""

    request: PlaneKeys | None
    kv: PlaneKeys | None
    prefix: bytes = field(repr=False)
    """The key for hashes of KV blocks. All workers and gateways of a cluster compute equal hashes for a prefix. If the
    cluster has a secret, outsiders cannot tell what a hash stands for."""


@dataclass(frozen=True, slots=True, repr=False)
class ClusterSecret:
    """Text shared by every process of a cluster and known to no other; no representation contains it.

    Raises ConfigError if the text is too short, or has a zero byte: workers may get it in their environment. Security
    depends on the text alone, so it should be random: `openssl rand -hex 32`.
    """

    text: str

    def __post_init__(self) -> None:
        if len(self.text) < MIN_SECRET_CHARACTERS:
            raise ConfigError(
                f"a cluster secret needs at least {MIN_SECRET_CHARACTERS} characters, this one has "
                f"{len(self.text)}; make one with `openssl rand -hex 32`"
            )
        if "\0" in self.text:
            raise ConfigError(
                "a cluster secret is a text, but this one has a zero byte; make one with `openssl rand -hex 32`"
            )


def derive_keys(secret: ClusterSecret | None) -> ClusterKeys:
    """A cluster's keys. Equal secrets give equal keys in every process. Without a secret, the planes have no keys."""
    if secret is None:
        return ClusterKeys(request=None, kv=None, prefix=_PREFIX_KEY_WITHOUT_SECRET)
    _check_curve()
    return ClusterKeys(
        request=_plane_keys(secret, "request"),
        kv=_plane_keys(secret, "kv"),
        prefix=_derive(secret, "prefix"),
    )


def derive_fleet_keys(secret: ClusterSecret | None) -> PlaneKeys | None:
    """The keys of the plane between a fleet's control server and its gateways; workers never get them."""
    if secret is None:
        return None
    _check_curve()
    return _plane_keys(secret, "fleet")


def secure_client(socket: "zmq.Socket[Any]", keys: PlaneKeys | None) -> None:
    """Lets a socket connect only to servers with this plane's keys; without keys, does nothing.

    Call this before `connect`, but after MAXMSGSIZE is set.
    """
    if keys is not None:
        socket.setsockopt(zmq.CURVE_SERVERKEY, keys.server_public)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.client_public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, keys.client_secret)
        _make_room_for_overhead(socket)


class PeerAuthenticator:
    """Admits only this plane's clients to a server socket, and counts refused clients. Without keys, admits all
    clients.

    Create it before `bind`, but after MAXMSGSIZE is set, and at most once per zmq.Context. It belongs to the thread
    that polls the socket: handshakes wait until that thread calls `attend`, and need no thread of their own.
    """

    def __init__(self, name: str, socket: "zmq.Socket[bytes]", keys: PlaneKeys | None) -> None:
        self.num_denied = 0
        """Number of connections that ended before they proved knowledge of the secret; port scans count, too."""
        self.num_disconnections = 0
        """Number of connections that have ended, whichever side ended them. libzmq ends a connection that sends a frame
        larger than MAXMSGSIZE."""
        self._name = name
        self._socket = socket
        socket.setsockopt(zmq.HANDSHAKE_IVL, round(HANDSHAKE_TIMEOUT_S * 1000))
        self._client_key = b""
        self._zap: zmq.Socket[bytes] | None = None
        failures = 0 if keys is None else FAILED_HANDSHAKES
        self._monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | failures)
        self._sockets = [self._monitor]
        if keys is not None:
            self._client_key = z85.decode(keys.client_public)
            self._zap = socket.context.socket(zmq.REP)
            self._zap.setsockopt(zmq.LINGER, 0)
            self._zap.bind(_ZAP_ENDPOINT)
            self._sockets.append(self._zap)
            self._secure_server(keys)

    def register(self, poller: zmq.Poller) -> None:
        """Makes `poller` wake for handshakes."""
        for socket in self._sockets:
            poller.register(socket, zmq.POLLIN)

    def attend(self, ready: Container[object]) -> None:
        """Answers pending handshakes. `ready`: the sockets that the poller returned."""
        if self._zap is not None and self._zap in ready:
            self._answer_all(self._zap)
        if self._monitor in ready:
            self._count_all()

    def close(self) -> None:
        """Closes the sockets for handshakes. Call this before the server socket itself is closed."""
        self._socket.disable_monitor()
        for socket in self._sockets:
            socket.close()

    def _secure_server(self, keys: PlaneKeys) -> None:
        self._socket.setsockopt(zmq.CURVE_SERVER, 1)
        self._socket.setsockopt(zmq.CURVE_SECRETKEY, keys.server_secret)
        # With an enforced domain, libzmq refuses every client while the ZAP endpoint does not answer; otherwise it
        # would admit every client.
        self._socket.setsockopt(zmq.ZAP_DOMAIN, b"baton")
        self._socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        _make_room_for_overhead(self._socket)

    def _answer_all(self, zap: "zmq.Socket[bytes]") -> None:
        while (frames := _receive(zap)) is not None:
            # version, request id, domain, address, identity, mechanism, credentials
            is_known = frames[5:] == [b"CURVE", self._client_key]
            status = (b"200", b"OK") if is_known else (b"400", b"not a client of this plane")
            zap.send_multipart([_ZAP_VERSION, frames[1], *status, b"", b""])

    def _count_all(self) -> None:
        while (frames := _receive(self._monitor)) is not None:
            event = parse_monitor_message(frames)["event"]
            if event == zmq.EVENT_DISCONNECTED:
                self.num_disconnections += 1
                continue
            self.num_denied += 1
            if self.num_denied.bit_count() == 1:  # 1, 2, 4, 8, ...: endless retries must not fill the log
                logger.warning(
                    "%s denied %d connection(s) so far, the last one with the event %s; clients need this cluster's "
                    "secret and network.security 'curve'",
                    self._name,
                    self.num_denied,
                    zmq.Event(event).name,
                )


async def connection_events(monitor: "zmq.asyncio.Socket") -> AsyncIterator[int]:
    """Events of a client's connection, as its monitor reports them. The first handshake that fails without an
    explanation is left out: a server that ends during a handshake causes one such event, but a wrong secret causes one
    after another.
    """
    num_unexplained = 0
    while True:
        event: int = (await recv_monitor_message(monitor))["event"]
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            num_unexplained = 0
        elif event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
            num_unexplained += 1
            if num_unexplained == 1:
                continue
        yield event


def _check_curve() -> None:
    if not zmq.has("curve"):
        raise ConfigError(
            f"network.security is 'curve', but libzmq {zmq.zmq_version()} was built without it; install "
            "pyzmq from its wheel, or use 'none' on loopback"
        )


def _plane_keys(secret: ClusterSecret, plane: str) -> PlaneKeys:
    server, client = _secret_key(secret, f"{plane}/server"), _secret_key(secret, f"{plane}/client")
    return PlaneKeys(zmq.curve_public(server), server, zmq.curve_public(client), client)


def _secret_key(secret: ClusterSecret, purpose: str) -> bytes:
    """A secret key as Z85 text. Any 32 bytes are a Curve25519 secret key (RFC 7748, section 5)."""
    return z85.encode(_derive(secret, purpose))


def _derive(secret: ClusterSecret, purpose: str) -> bytes:
    """32 bytes of keyed BLAKE2b, different for every purpose."""
    text = secret.text.encode("utf-8", "surrogateescape")  # the environment may hold any bytes
    key = hashlib.blake2b(text, person=b"baton-secret").digest()
    return hashlib.blake2b(purpose.encode(), key=key, digest_size=32, person=b"baton-curve-1").digest()


def _make_room_for_overhead(socket: "zmq.Socket[Any]") -> None:
    limit = socket.getsockopt(zmq.MAXMSGSIZE)
    assert isinstance(limit, int)
    if limit >= 0:  # -1: unlimited
        socket.setsockopt(zmq.MAXMSGSIZE, limit + MESSAGE_OVERHEAD_BYTES)


def _receive(socket: "zmq.Socket[bytes]") -> list[bytes] | None:
    try:
        return socket.recv_multipart(zmq.NOBLOCK)
    except zmq.Again:
        return None
