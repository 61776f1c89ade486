"""The `openai` package as its users have it, towards a gateway of ours."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx2
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionMessageParam

from tests.factories.gateway import GatewayUnderTest


@asynccontextmanager
async def openai_for(under_test: GatewayUnderTest) -> AsyncIterator[AsyncOpenAI]:
    """It retries nothing, so that a test sees the first answer."""
    base_url = f"http://127.0.0.1:{under_test.gateway.http_port}/v1"
    async with AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=20) as client:
        yield client


async def raw_events(
    under_test: GatewayUnderTest, messages: Sequence[ChatCompletionMessageParam], **fields: Any
) -> list[str]:
    """The data of every event of a stream, as it came."""
    url = f"http://127.0.0.1:{under_test.gateway.http_port}/v1/chat/completions"
    async with httpx2.AsyncClient(timeout=60.0) as client:
        answer = await client.post(url, json={"model": "tiny", "messages": messages, "stream": True} | fields)
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    *events, rest = answer.text.split("\n\n")
    assert rest == ""
    return [event.removeprefix("data: ") for event in events]
