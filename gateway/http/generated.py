"""GeneratedResponse: the HTTP response with the answers to one call, whole or as server-sent events."""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from baton.errors import DeadlinePassed
from gateway.choices import ChoiceDelta, batches_of, in_portions, in_turns
from gateway.error_codes import codes_of
from gateway.http.errors import in_terms_of
from gateway.http.event_stream import EventSender, EventStream, while_connected
from gateway.http.whole_json import send_json
from gateway.requests.driver import RequestDriver
from gateway.requests.request import Delta, GatewayRequest

logger = logging.getLogger(__name__)


class Answer(Protocol):
    """Writes the answers to one call in the shape of one API: as a stream's events, or whole.

    The deltas of each answer come in order.
    """

    def ping(self) -> bytes:
        """What a stream sends while no event comes."""

    def opening(self) -> bytes:
        """The events before the first delta. A stream sends them in the same write as that delta."""

    def piece(self, index: int, delta: Delta) -> bytes:
        """The events of a delta of answer `index`."""

    def ending(self) -> bytes:
        """The events after the last delta of all answers."""

    def failure(self, error: Exception) -> bytes:
        """The last event of a stream that fails after its first delta or its first ping."""

    def on_delta(self, index: int, delta: Delta) -> None:
        """Collects a delta of answer `index` for `whole`."""

    def whole(self) -> Iterator[str]:
        """All answers, as JSON in pieces that are each quick to make."""


class GeneratedResponse(Response):
    """Generates the answers while it sends them. If the client disconnects, its requests end on all workers.

    Errors are raised until the status is sent, so the response has an error status. A stream sends its status with the
    first event or the first ping; a later error becomes its last event.
    """

    def __init__(
        self,
        driver: RequestDriver,
        requests: Sequence[GatewayRequest],
        answer: Answer,
        names: Mapping[str, str],
        *,
        is_stream: bool,
    ) -> None:
        """`names`: see `in_terms_of`."""
        super().__init__()
        self._driver = driver
        self._requests = requests
        self._answer = answer
        self._names = names
        self._is_stream = is_stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._is_stream:
            await EventStream(self._stream, self._answer.ping)(scope, receive, send)
        else:
            await while_connected(receive, self._send_whole(send))

    async def _send_whole(self, send: Send) -> None:
        async with answering(self._driver, self._requests, self._names) as batches:
            async for index, delta in in_turns(batches):
                self._answer.on_delta(index, delta)
        await send_json(self._answer.whole(), send)

    async def _stream(self, send: EventSender) -> None:
        """Sends the events of each delta; events that are available together are sent together, up to PORTION_TOKENS
        tokens."""
        answer = self._answer
        is_open = False
        try:
            async with answering(self._driver, self._requests, self._names) as batches:
                async for batch in in_portions(batches):
                    pieces = [] if is_open else [answer.opening()]
                    for index, delta in batch:
                        pieces.append(answer.piece(index, delta))
                    is_open = True
                    await send(b"".join(pieces))
            last = answer.ending()
        except Exception as error:
            if not send.has_begun:
                raise
            log_if_internal(error, self._requests[0].request_id)
            last = answer.failure(error)
        if last:
            await send(last)


@asynccontextmanager
async def answering(
    driver: RequestDriver, requests: Sequence[GatewayRequest], names: Mapping[str, str]
) -> AsyncIterator[AsyncGenerator[Sequence[ChoiceDelta], None]]:
    """Runs the requests of one call and yields their deltas; see `batches_of`. All requests end when the
    context ends.

    Raises DeadlinePassed if the next deltas do not arrive by the client's deadline. Workers know the deadline, too, but
    a worker may no longer respond. `names`: see `in_terms_of`.
    """
    deadline = requests[0].deadline
    async with aclosing(batches_of(driver, requests)) as batches:
        with in_terms_of(names):
            if deadline is None:
                yield batches
                return
            async with aclosing(_arriving_by(deadline, batches)) as timely:
                yield timely


async def _arriving_by(
    deadline: float, batches: AsyncGenerator[Sequence[ChoiceDelta], None]
) -> AsyncGenerator[Sequence[ChoiceDelta], None]:
    """Limits only the time to wait for a batch. If the deadline passes while a batch is sent to a slow client, its
    events must not be cut off: their numbers are used up, and other events follow."""
    while True:
        try:
            async with asyncio.timeout_at(deadline):
                batch = await anext(batches)
        except StopAsyncIteration:
            return
        except TimeoutError:
            raise DeadlinePassed("the request's deadline passed") from None
        yield batch


def log_if_internal(error: Exception, request_id: str) -> None:
    """Logs an error if it is internal: then the client learns only that an error happened."""
    if codes_of(error).is_internal:
        extra = {"request_id": request_id}
        logger.error("the stream of request %s failed", request_id, exc_info=error, extra=extra)
