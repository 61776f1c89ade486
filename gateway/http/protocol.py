"""BoundedH11: HTTP/1.1 on one connection, with deadlines for sending a request and for reading an answer."""

import asyncio
import json
import logging
import sys
from collections.abc import Callable
from typing import Any, cast

import h11
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from gateway.auth.callers import NO_CALLER, Caller
from gateway.http.connection_places import ConnectionPlaces
from gateway.http.error_shapes import openai_error
from gateway.http.lingering_close import LingeringTransport
from gateway.http.paced_parser import PacedParser, ReadTurns
from gateway.http.request_limits import MAX_HEADER_BYTES

REQUEST_TIMEOUT_S = 15.0
"""How long a request's line and headers may take to arrive. If the answer is sent before the whole request has
arrived, also how long the rest may take."""
STRANGER_KEEP_ALIVE_S = 15
"""Longest time between two requests on a connection that has shown no key; see Caller.is_stranger."""
KEEP_ALIVE_S = 75
"""Longest time between two requests on other connections. Load balancers keep their connections open for a
minute. If we closed a connection while a load balancer sends a request, the load balancer would report an
error."""

ON_CALLER = "on_caller"
"""Key in the state of each request's scope. Its value is a function. It is called with None before the request's caller
is looked up, and with the caller before the request is served; or with NO_CALLER if the caller is unknown, and the
request is refused."""

TOO_MANY = "TooManyConnections"
NOT_HTTP = "NotHttp"
"""A request that is malformed, or whose headers are too large."""

# uvicorn logs a warning for each malformed request, so clients could fill a disk.
_uvicorns_logger = logging.getLogger(f"{__name__}.uvicorn")
_uvicorns_logger.setLevel(logging.ERROR)


class BoundedH11(H11Protocol):
    """uvicorn's protocol with deadlines, a limit for the number of connections, and errors in the API's
    shape."""

    _request_deadline: asyncio.TimerHandle | None = None
    _write_deadline: asyncio.TimerHandle | None = None
    _waits_for_turn = False
    """Whether the rest of what has arrived follows in a later turn."""
    conn: PacedParser

    def __init__(
        self,
        *args: Any,
        refusal: str | None,
        places: ConnectionPlaces["BoundedH11"],
        turns: ReadTurns,
        write_timeout_s: float,
        on_refused: Callable[[str], None],
        **options: Any,
    ) -> None:
        """`refusal`: the reason for refusing this connection, which the client gets; None accepts the
        connection. `on_refused` receives NOT_HTTP for each malformed request."""
        super().__init__(*args, **options)
        self.conn = PacedParser(h11.SERVER, MAX_HEADER_BYTES)
        self._places = places
        self._turns = turns
        self.app_state = {ON_CALLER: self._begin_request}
        self.timeout_keep_alive = STRANGER_KEEP_ALIVE_S
        self._on_refused = on_refused
        self.logger = _uvicorns_logger
        self.is_over = asyncio.Event()
        """Set when the connection is closed."""
        self._refusal_message = refusal
        self._write_timeout_s = write_timeout_s

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._lingering = LingeringTransport(transport, self._may_get_more, REQUEST_TIMEOUT_S)
        super().connection_made(cast("asyncio.Transport", self._lingering))
        # Writing is paused while this buffer contains data. With 0, TLS would pause writing for an empty
        # buffer, too.
        transport.set_write_buffer_limits(high=1)
        if self._refusal_message is not None:
            self.transport.write(_refusal(self._refusal_message))
            self.transport.close()
        self._update_request_deadline()

    @property
    def is_established(self) -> bool:
        """True after the TLS handshake; without TLS, as soon as the connection has a transport."""
        return self.transport is not None

    def pause_writing(self) -> None:
        """asyncio calls this when the client reads more slowly than we write. Starts the write deadline."""
        super().pause_writing()
        self._write_deadline = self.loop.call_later(self._write_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._cancel_write_deadline()
        self._end_request_if_answered()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        super().data_received(data)
        self._update_request_deadline()

    def handle_events(self) -> None:
        """Handles what has arrived. If a body has more chunks than one turn may read, the rest follows in later turns;
        until then, nothing more is read from the connection."""
        self.conn.begin_turn()
        super().handle_events()
        if not self.conn.has_more or self.transport.is_closing():
            return
        self.transport.pause_reading()
        if not self._waits_for_turn:
            self._waits_for_turn = True
            self._turns.wait(self._read_on)

    def _read_on(self) -> None:
        self._waits_for_turn = False
        if self.transport.is_closing():
            return
        self.handle_events()
        self._update_request_deadline()
        if not (self._waits_for_turn or self.flow.read_paused or self.transport.is_closing()):
            self.transport.resume_reading()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._end_request_if_answered()
        self._update_request_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._lingering.close_now()
        self._places.end_request(self)
        self._cancel_request_deadline()
        self._cancel_write_deadline()
        self.is_over.set()

    def shutdown(self) -> None:
        if self.transport.is_closing() or self.cycle is None or self.cycle.response_complete:
            self._lingering.close_now()
        else:
            super().shutdown()

    def end(self) -> None:
        """Closes the connection because the gateway stops. Refuses a request that has no answer yet, and breaks off a
        partial answer."""
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True  # to the request's handlers, the client has disconnected
            cycle.message_event.set()
            if not cycle.response_started:
                self.transport.write(
                    _refusal("this gateway is stopping; use another one, or try again later")
                )
        self.transport.close()

    def _may_get_more(self) -> bool:
        """Whether the client may still send a part of a request that is already answered, or too malformed to read."""
        return self._refusal_message is not None or self.conn.their_state in (h11.SEND_BODY, h11.ERROR)

    def _begin_request(self, caller: Caller | None) -> None:
        if caller is None:
            self._places.hold(self)
            return
        if caller is NO_CALLER:  # a stranger that reads no refusals must not keep its connection
            self._places.end_request(self)
            return
        self._places.begin_request(self, caller.name, is_stranger=caller.is_stranger)
        if not caller.is_stranger:
            self.timeout_keep_alive = KEEP_ALIVE_S

    def _end_request_if_answered(self) -> None:
        """Ends the request for `ConnectionPlaces` once the client has the whole answer. Then a new connection may
        displace this one."""
        if not self.flow.write_paused and (self.cycle is None or self.cycle.response_complete):
            self._places.end_request(self)

    def send_400_response(self, msg: str) -> None:
        """Sends the status of h11's error, which is more specific than 400, such as 431 for too large
        headers.

        uvicorn calls this method while it handles h11's error. h11 gives unsupported encodings the status
        501. The client made that mistake, so the status becomes 400.
        """
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self._lingering.close_now()  # a part of an answer is already sent, so no error can replace it
            return
        self._on_refused(NOT_HTTP)
        error = sys.exception()
        status = error.error_status_hint if isinstance(error, h11.RemoteProtocolError) else 400
        status = status if status < 500 else 400
        reason = str(error or msg).partition(": bytearray(")[0]  # h11 quotes input as a Python literal
        body = json.dumps(openai_error(status, f"malformed HTTP/1.1 request: {reason}")).encode()
        headers = [
            ("content-type", "application/json"),
            ("content-length", str(len(body))),
            ("connection", "close"),
        ]
        for event in (
            h11.Response(status_code=status, headers=headers, reason=STATUS_PHRASES[status]),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True  # otherwise the request's own answer would follow the error
            self.cycle.message_event.set()
            self._places.end_request(self)

    def _should_upgrade(self) -> bool:
        """No other protocol is supported, so requests to upgrade are served as HTTP/1.1 (RFC 9110, 7.8)."""
        return False

    def _update_request_deadline(self) -> None:
        """Runs the deadline while the client must send data: its first request, the rest of a request, or the
        rest of a body that was already answered."""
        must_send = (self.conn.their_state is h11.IDLE and not self._is_kept_alive) or (
            self.conn.our_state is h11.DONE and self.conn.their_state is h11.SEND_BODY
        )
        if not must_send or self.transport.is_closing():
            self._cancel_request_deadline()
        elif self._request_deadline is None:
            self._request_deadline = self.loop.call_later(REQUEST_TIMEOUT_S, self._lingering.close_now)

    @property
    def _is_kept_alive(self) -> bool:
        """True between two requests: uvicorn's keep-alive timer runs, and no part of the next request has
        arrived."""
        return self.timeout_keep_alive_task is not None and not self.conn.trailing_data[0]

    def _cancel_request_deadline(self) -> None:
        if self._request_deadline is not None:
            self._request_deadline.cancel()
            self._request_deadline = None

    def _cancel_write_deadline(self) -> None:
        if self._write_deadline is not None:
            self._write_deadline.cancel()
            self._write_deadline = None


def _refusal(message: str) -> bytes:
    """A whole response of status 503, in bytes. It is a valid response to every request."""
    body = json.dumps(openai_error(503, message)).encode()
    head = (
        "HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\n"
        f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + body
