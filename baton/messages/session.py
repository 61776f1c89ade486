"""Sessions on the request plane: both ends notice lost messages; knows no socket.

A connection may break and reconnect by itself, and the messages in transit are lost. So each end counts what it sends,
and the other end compares. The gateway's Hello carries the number of its commands, the worker's Heartbeat the number of
its outputs. A worker that lost a gateway, or a command from it, ends all its work for that gateway and opens a new
session. A gateway that sees a new session, or misses outputs, gives up everything it had at that worker. A gateway may
connect again to a worker that it had given up. Each connection has a session of its own. The gateway numbers its
connections. At the first Hello of a newer connection, the worker ends the session of the former connection, since the
worker may not yet know that it is closed.

    gateway                                        worker
      Hello(session None) ------------------------>  opens session 1
      <------------------------- Heartbeat(session 1)
      SubmitRequest(session 1) -------------------->  served
      Hello(session 1, 1 command) ----------------->  one command arrived: all is well
             x <----------------- Outputs             the gateway is out of reach: its requests end
      Hello(session 1, 1 command) ----------------->  opens session 2
      <------------------------- Heartbeat(session 2)
      tries its requests elsewhere
"""

from dataclasses import dataclass
from typing import NamedTuple

from baton.errors import WireError
from baton.messages.request_plane import (
    AbortRequests,
    Heartbeat,
    Hello,
    RunSuspect,
    SessionCommand,
    SubmitRequest,
    SubscribeKVEvents,
)
from baton.request import EngineRequest
from baton.worker import WorkerStatus


class GatewaySession:
    """A gateway's end of its session with one incarnation of a worker."""

    def __init__(self, incarnation: str, gateway: str, connection: int) -> None:
        """`connection` is greater than those of all former sessions of this gateway."""
        self._incarnation = incarnation
        self._gateway = gateway
        self._connection = connection
        self._number: int | None = None
        self._num_commands = 0
        self._num_outputs = 0
        self._unnamed: set[str] = set()
        """Suspects that no heartbeat has named yet, so the worker does not run them."""

    @property
    def number(self) -> int | None:
        """The session's number; None until the worker has opened a session."""
        return self._number

    def hello(self) -> Hello:
        return Hello(self._incarnation, self._gateway, self._connection, self._number, self._num_commands)

    def submit(self, request: EngineRequest) -> SubmitRequest:
        if request.is_suspect:
            self._unnamed.add(request.request_id)
        return SubmitRequest(request, self._number)

    def run_named(self, status: WorkerStatus) -> list[RunSuspect]:
        """Commands to run the suspects that this status is the first to name."""
        named = self._unnamed.intersection(status.suspects)
        self._unnamed -= named
        return [RunSuspect(request_id, self._number) for request_id in sorted(named)]

    def abort(self, request_ids: tuple[str, ...]) -> AbortRequests:
        self._unnamed.difference_update(request_ids)
        return AbortRequests(request_ids, self._number)

    def subscribe_kv_events(self) -> SubscribeKVEvents:
        return SubscribeKVEvents(self._number)

    def count_command(self) -> None:
        """Counts a command before it is sent, even if sending then fails, since the worker should have received it."""
        self._num_commands += 1

    def note_outputs(self) -> None:
        """Counts a message of outputs that arrived."""
        self._num_outputs += 1

    def note_heartbeat(self, heartbeat: Heartbeat) -> str | None:
        """Why all requests sent so far are lost, if this heartbeat shows that they are; else None."""
        num_missing = heartbeat.num_outputs - self._num_outputs
        self._num_outputs = heartbeat.num_outputs
        if heartbeat.session == self._number:
            return f"{num_missing} of its messages did not arrive" if num_missing else None
        is_first = self._number is None and not self._num_commands
        self._number, self._num_commands = heartbeat.session, 0
        self._unnamed.clear()
        return None if is_first else "it had lost this gateway and ended its requests"


@dataclass(slots=True)
class _Session:
    gateway: str
    connection: int
    number: int
    last_message_at: float
    num_commands: int = 0
    num_outputs: int = 0
    next_kv_number: int | None = None
    """The number of the session's next KVEvents; None before the first listing."""


class EndedSession(NamedTuple):
    """A session that a Hello has ended."""

    peer: bytes
    """The identity of its connection, which may be another one than that of the Hello."""
    reason: str


class WorkerSessions:
    """A worker's end of its sessions, by the identity of the gateway's connection. The caller passes all times, in
    seconds."""

    def __init__(self, incarnation: str) -> None:
        self._incarnation = incarnation
        self._sessions: dict[bytes, _Session] = {}
        self._num_opened = 0

    def on_hello(self, peer: bytes, hello: Hello, now: float) -> EndedSession | None:
        """Opens or continues a session. Returns the session that had to end; the caller then ends its requests."""
        if hello.incarnation != self._incarnation:
            return None  # addressed to another incarnation
        ended: EndedSession | None = None
        if (session := self._sessions.get(peer)) is not None:
            session.last_message_at = now
            if (reason := _gap(session, hello)) is None:
                return None
            ended = EndedSession(peer, reason)
        elif (other := self._peer_of(hello.gateway)) is not None:
            if hello.connection < self._sessions[other].connection:
                return None  # the gateway had closed this connection; its last messages arrive late
            self.end(other)
            ended = EndedSession(other, "the gateway has connected anew")
        self._num_opened += 1
        self._sessions[peer] = _Session(hello.gateway, hello.connection, self._num_opened, now)
        return ended

    def count_command(self, peer: bytes, command: SessionCommand) -> None:
        """Counts a command; WireError if it belongs to no session, or to one that has ended."""
        session = self._sessions.get(peer)
        if session is None:
            raise WireError(f"{type(command).__name__} on a connection without a session")
        if command.session != session.number:
            raise WireError(
                f"{type(command).__name__} belongs to session {command.session}, but the current "
                f"session is {session.number}"
            )
        session.num_commands += 1

    def count_outputs(self, peer: bytes) -> bool:
        """Counts a message of outputs that is about to be sent; False if there is no session for it."""
        session = self._sessions.get(peer)
        if session is None:
            return False
        session.num_outputs += 1
        return True

    def number_kv_events(self, peer: bytes, is_anew: bool) -> int | None:
        """Number of the next KVEvents message; None if it must not be sent, since no listing preceded it."""
        session = self._sessions.get(peer)
        if session is None:
            return None
        number = 0 if is_anew else session.next_kv_number
        session.next_kv_number = None if number is None else number + 1
        return number

    def heartbeat(self, peer: bytes, status: WorkerStatus) -> Heartbeat:
        """A heartbeat for any peer, in a session or not."""
        session = self._sessions.get(peer)
        if session is None:
            return Heartbeat(status, None, 0)
        return Heartbeat(status, session.number, session.num_outputs)

    def end(self, peer: bytes) -> bool:
        """Ends the connection's session; False if there was none."""
        return self._sessions.pop(peer, None) is not None

    def silent_for(self, timeout_s: float, now: float) -> list[bytes]:
        """Connections whose gateways have been silent for longer than this."""
        return [peer for peer, session in self._sessions.items() if now - session.last_message_at > timeout_s]

    @property
    def peers(self) -> list[bytes]:
        """Connections with a session."""
        return list(self._sessions)

    def _peer_of(self, gateway: str) -> bytes | None:
        """The connection with this gateway's session, if there is one."""
        return next((peer for peer, session in self._sessions.items() if session.gateway == gateway), None)


def _gap(session: _Session, hello: Hello) -> str | None:
    """Why a session ends at this Hello; None if the session continues."""
    if hello.session in (session.number, None) and hello.num_commands != session.num_commands:
        return f"{session.num_commands} of {hello.num_commands} commands arrived"
    return None
