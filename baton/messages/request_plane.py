"""The request plane: every message between a gateway and a worker, as a typed value.

Hello and Heartbeat begin with the version of the plane, in every version of it. So two ends that would not understand
each other's messages can still say why: `foreign_version`. Nothing else is exchanged before both were heard.
"""

from dataclasses import dataclass, field

from baton.block_hash import SHORT_HASH_BYTES
from baton.errors import WireError
from baton.messages.wire import Codec, unpack
from baton.request import EngineRequest, RequestOutput
from baton.worker import WorkerStatus

REQUEST_PLANE_VERSION = 3
"""Counts up whenever a message changes. The first version named none; it counts as 1."""


@dataclass(frozen=True, slots=True)
class Hello:
    """Gateway -> worker, first and then at a fixed pace: I am here; send me outputs and heartbeats.

    A gateway silent for longer than the worker's limit is gone, and its requests are aborted.
    """

    version: int = field(default=REQUEST_PLANE_VERSION, kw_only=True)
    incarnation: str
    """The life of the worker that the gateway means; another life answers with its own status and nothing else."""
    session: int | None
    """The worker's last word on it; None before the first. See baton/messages/session.py."""
    num_orders: int
    """Orders in this session so far: if the worker has another number, some were lost."""

    def __post_init__(self) -> None:
        _check_version(self.version)


@dataclass(frozen=True, slots=True)
class SubmitRequest:
    """Gateway -> worker: one leg of a request."""

    request: EngineRequest
    session: int | None


@dataclass(frozen=True, slots=True)
class AbortRequests:
    """Gateway -> worker: forget these. Unknown or finished ids are no error."""

    request_ids: tuple[str, ...]
    session: int | None


@dataclass(frozen=True, slots=True)
class SubscribeKVEvents:
    """Gateway -> worker: send me an account of your prefix cache, and from then on what changes.

    Lasts as long as the session. May be repeated, after a gap in what came: then a new account begins.
    """

    session: int | None


@dataclass(frozen=True, slots=True)
class Outputs:
    """Worker -> gateway: what one step brought for this gateway's requests."""

    outputs: tuple[RequestOutput, ...]


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Worker -> gateway: alive, and this is how it stands."""

    version: int = field(default=REQUEST_PLANE_VERSION, kw_only=True)
    status: WorkerStatus
    session: int | None
    """A new number whenever the worker has ended everything that it did for this gateway; None: they have none."""
    num_outputs: int
    """Outputs in this session so far: if the gateway has another number, some were lost."""

    def __post_init__(self) -> None:
        _check_version(self.version)


@dataclass(frozen=True, slots=True)
class KVEvents:
    """Worker -> gateway: what changed in its prefix cache. Hashes are the first SHORT_HASH_BYTES of each, one after the
    other; first `removed` is to be taken out, then `stored` put in. Either may name what is known already.
    """

    number: int
    """Counts from 0 at each account; a reader that misses one subscribes anew."""
    is_anew: bool
    """An account begins: forget everything known so far. Its rest comes in the messages that follow."""
    removed: bytes
    """Can be hit no more."""
    stored: bytes
    """Can be hit from now on."""

    def __post_init__(self) -> None:
        for name in ("removed", "stored"):
            if len(getattr(self, name)) % SHORT_HASH_BYTES:
                raise WireError(f"{name}: {len(getattr(self, name))} bytes are no whole number of hashes")


Order = SubmitRequest | AbortRequests | SubscribeKVEvents
"""What a session counts."""
ToWorker = Hello | Order
ToGateway = Outputs | Heartbeat | KVEvents

TO_WORKER: Codec[ToWorker] = Codec(Hello, SubmitRequest, AbortRequests, SubscribeKVEvents)
TO_GATEWAY: Codec[ToGateway] = Codec(Outputs, Heartbeat, KVEvents)


def foreign_version(frame: bytes) -> int | None:
    """The version of the request plane in a frame that could not be decoded, if it is a Hello or Heartbeat of another
    one than ours."""
    try:
        parts = unpack(frame)
    except WireError:
        return None
    if not isinstance(parts, list) or len(parts) < 2 or parts[0] not in (Hello.__name__, Heartbeat.__name__):
        return None
    version = parts[1] if type(parts[1]) is int else 1
    return None if version == REQUEST_PLANE_VERSION else version


def _check_version(version: int) -> None:
    if version != REQUEST_PLANE_VERSION:
        raise WireError(f"version {version} of the request plane, ours is {REQUEST_PLANE_VERSION}")
