"""The answers to one call over HTTP while they come: within the client's deadline, errors in the client's terms."""

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
    """Runs the requests of one call and gives their deltas; see `batches_of`. Leaving the block ends all of them.

    DeadlinePassed when the client's time is over. Workers know the deadline, too; this covers a worker that no longer
    responds. `names`: the client's names of fields that errors name differently.
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
    """The same error under the client's name for the field."""
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
