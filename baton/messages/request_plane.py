"""The request plane: every message between a gateway and a worker, as a typed value.

In every version of the plane but the first, the first field of Hello and Heartbeat is the number of the version. So
two ends that cannot understand each other's messages can still say why: `foreign_version`. No other message is sent
before both have arrived.
"""

from dataclasses import dataclass, field

from baton.block_hash import SHORT_HASH_BYTES
from baton.errors import WireError
from baton.messages.wire import Codec, unpack
from baton.request import EngineRequest, RequestOutput
from baton.worker import WorkerStatus

REQUEST_PLANE_VERSION = 12
"""Increases whenever a message changes. The first version had no number; it counts as 1."""


@dataclass(frozen=True, slots=True)
class Hello:
    """Gateway -> worker, first and then at a fixed pace: announces the gateway and asks for outputs and heartbeats.

    A gateway silent for longer than the worker's limit counts as lost, and its requests are aborted.
    """

    version: int = field(default=REQUEST_PLANE_VERSION, kw_only=True)
    incarnation: str
    """The worker's incarnation that this message is for. Another incarnation answers with its own status and
    nothing else."""
    gateway: str
    """The gateway's id, the same on all its connections."""
    connection: int
    """The gateway's number for this connection. It is greater than the numbers of the gateway's former connections,
    whose sessions end."""
    session: int | None
    """The session number the worker last sent; None before the first. See baton/messages/session.py."""
    num_commands: int
    """Commands sent in this session so far; if the worker counted fewer, some were lost."""

    def __post_init__(self) -> None:
        _check_version(self.version)


@dataclass(frozen=True, slots=True)
class SubmitRequest:
    """Gateway -> worker: one attempt's prefill, decode or local request."""

    request: EngineRequest
    session: int | None


@dataclass(frozen=True, slots=True)
class RunSuspect:
    """Gateway -> worker: the gateway has read a heartbeat that names this suspect, so the suspect may run.

    If the worker ends while the suspect runs, the gateway knows which request ran.
    """

    request_id: str
    session: int | None


@dataclass(frozen=True, slots=True)
class AbortRequests:
    """Gateway -> worker: drop these requests. Unknown or finished ids are no error."""

    request_ids: tuple[str, ...]
    session: int | None


@dataclass(frozen=True, slots=True)
class SubscribeKVEvents:
    """Gateway -> worker: asks for a full listing of the prefix cache, and from then on its changes.

    Lasts as long as the session. May be repeated after a gap in the events; then a new listing begins.
    """

    session: int | None


@dataclass(frozen=True, slots=True)
class Outputs:
    """Worker -> gateway: what one step produced for this gateway's requests."""

    outputs: tuple[RequestOutput, ...]


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Worker -> gateway: a sign of life with the worker's status."""

    version: int = field(default=REQUEST_PLANE_VERSION, kw_only=True)
    status: WorkerStatus
    session: int | None
    """Changes whenever the worker has ended everything it did for this gateway; None: there is no session."""
    num_outputs: int
    """Outputs sent in this session so far; if the gateway counted fewer, some were lost."""

    def __post_init__(self) -> None:
        _check_version(self.version)


@dataclass(frozen=True, slots=True)
class KVEvents:
    """Worker -> gateway: changes of the worker's prefix cache.

    Hashes are concatenated, SHORT_HASH_BYTES of each. Apply `removed` before `stored`; both may repeat known
    changes.
    """

    number: int
    """Counts from 0 at each full listing; a reader that misses a number subscribes again."""
    is_anew: bool
    """A full listing begins: forget everything known so far. The rest of it is in later messages."""
    removed: bytes
    """Hashes that can no longer be hit."""
    stored: bytes
    """Hashes that can be hit from now on."""

    def __post_init__(self) -> None:
        for name in ("removed", "stored"):
            if len(getattr(self, name)) % SHORT_HASH_BYTES:
                raise WireError(f"{name}: {len(getattr(self, name))} bytes are not a whole number of hashes")


SessionCommand = SubmitRequest | RunSuspect | AbortRequests | SubscribeKVEvents
"""The messages that a session counts."""
ToWorker = Hello | SessionCommand
ToGateway = Outputs | Heartbeat | KVEvents

TO_WORKER: Codec[ToWorker] = Codec(Hello, SubmitRequest, RunSuspect, AbortRequests, SubscribeKVEvents)
TO_GATEWAY: Codec[ToGateway] = Codec(Outputs, Heartbeat, KVEvents)


def foreign_version(frame: bytes) -> int | None:
    """The peer's version of the request plane, if this undecodable frame is a Hello or Heartbeat of another version."""
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
        raise WireError(
            f"request plane version {version} does not match ours, {REQUEST_PLANE_VERSION}; "
            "run the same version of Baton on both sides"
        )
