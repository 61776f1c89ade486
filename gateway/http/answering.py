"""Runs the requests of one HTTP call until the client's deadline; errors name fields as the client does."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager

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
    respond. `names`: the client's names of fields, by the names that errors use.
    """
    try:
        async with (
            asyncio.timeout(requests[0].timeout_s),
            aclosing(_named(batches_of(driver, requests), names)) as batches,
        ):
            yield batches
    except TimeoutError:
        raise DeadlinePassed("the request's deadline passed") from None


def in_terms_of(names: Mapping[str, str], error: InvalidRequest) -> InvalidRequest:
    """The same error, with the client's name of the field."""
    field = names.get(error.field)
    return error if field is None else type(error)(field, error.problem)


async def _named(
    batches: AsyncGenerator[Sequence[ChoiceDelta], None], names: Mapping[str, str]
) -> AsyncGenerator[Sequence[ChoiceDelta], None]:
    try:
        async with aclosing(batches):
            async for batch in batches:
                yield batch
    except InvalidRequest as error:
        raise in_terms_of(names, error) from error
