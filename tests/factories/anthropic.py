"""The `anthropic` package as its users have it, as a client of a gateway under test."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from anthropic import AsyncAnthropic

from tests.factories.gateway import GatewayUnderTest, Script, gateway_with


@asynccontextmanager
async def anthropic_for(under_test: GatewayUnderTest, key: str = "none") -> AsyncIterator[AsyncAnthropic]:
    """A client that retries nothing, so that a test sees the first answer, and validates answers strictly."""
    async with AsyncAnthropic(
        base_url=under_test.http_url,
        api_key=key,
        max_retries=0,
        timeout=20,
        _strict_response_validation=True,
    ) as client:
        yield client


@asynccontextmanager
async def anthropic_with(
    folder: Path, decode: Script, prefill: Script | None = None, **config: Any
) -> AsyncIterator[tuple[GatewayUnderTest, AsyncAnthropic]]:
    """A gateway with workers `d0` and, if it has a script, `p0`; and the package as its client."""
    prefills = {} if prefill is None else {"p0": prefill}
    async with (
        gateway_with(folder, prefills, {"d0": decode}, **config) as under_test,
        anthropic_for(under_test) as client,
    ):
        yield under_test, client
