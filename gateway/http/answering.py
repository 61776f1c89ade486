"""Runs the requests of one HTTP call until the client's deadline; errors name fields as the client does."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager

from baton.errors import DeadlinePassed, InvalidRequest
from gateway.choices import ChoiceDelta, batches_of
from gateway.requests.driver import RequestDriver
from gateway.requests.request import GatewayRequest


@asynccontextmanager
async def answering(
    driver: RequestDriver, requests: Sequence[GatewayRequest], names: Mapping[str, str]
) -> AsyncIterator[AsyncGenerator[Sequence[ChoiceDelta], None]]:
    """Runs the requests of one call and yields their deltas; see `batches_of`. All requests end with the
    block.

    Raises DeadlinePassed at the client's deadline. Workers know the deadline, too, but a worker may no longer
    respond. `names`: see `in_terms_of`.
    """
    try:
        async with (
            asyncio.timeout(requests[0].timeout_s),
            aclosing(batches_of(driver, requests)) as batches,
        ):
            with in_terms_of(names):
                yield batches
    except TimeoutError:
        raise DeadlinePassed("the request's deadline passed") from None


@contextmanager
def in_terms_of(names: Mapping[str, str]) -> Iterator[None]:
    """InvalidRequests of the block name fields as the client does. `names`: the client's names of fields, by
    the names that errors use."""
    try:
        yield
    except InvalidRequest as error:
        if error.field not in names:
            raise
        raise type(error)(names[error.field], error.problem) from error
