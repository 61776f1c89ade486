"""The `openai` package as its users have it, as a client of a gateway under test."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionMessageParam

from tests.factories.gateway import GatewayUnderTest, Script, gateway_with


@asynccontextmanager
async def openai_for(under_test: GatewayUnderTest) -> AsyncIterator[AsyncOpenAI]:
    """A client that retries nothing, so that a test sees the first answer."""
    async with AsyncOpenAI(
        base_url=f"{under_test.http_url}/v1", api_key="none", max_retries=0, timeout=20
    ) as client:
        yield client


@asynccontextmanager
async def openai_with(
    folder: Path, decode: Script, prefill: Script | None = None, **config: Any
) -> AsyncIterator[tuple[GatewayUnderTest, AsyncOpenAI]]:
    """A gateway with workers `d0` and, if it has a script, `p0`; and the package as its client."""
    prefills = {} if prefill is None else {"p0": prefill}
    async with (
        gateway_with(folder, prefills, {"d0": decode}, **config) as under_test,
        openai_for(under_test) as client,
    ):
        yield under_test, client


async def raw_events(
    under_test: GatewayUnderTest, messages: Sequence[ChatCompletionMessageParam], **fields: Any
) -> list[str]:
    """The data of every event of a stream, unchanged."""
    url = f"{under_test.http_url}/v1/chat/completions"
    async with httpx2.AsyncClient(timeout=60.0) as client:
        answer = await client.post(url, json={"model": "tiny", "messages": messages, "stream": True} | fields)
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    *events, rest = answer.text.split("\n\n")
    assert rest == ""
    return [event.removeprefix("data: ") for event in events]
