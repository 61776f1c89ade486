"""Answers to one call: what the client's deadline ends."""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import cast

import pytest

from baton.errors import DeadlinePassed
from gateway.choices import ChoiceDelta
from gateway.http.generated import answering
from gateway.requests.driver import RequestDriver
from gateway.requests.request import Delta, GatewayRequest
from tests.factories.dispatching import make_request
from tests.factories.virtual_loop import in_virtual_time

TIMEOUT_S = 10.0


class OneDelta:
    """A driver whose answers have one delta, and no end."""

    def __init__(self) -> None:
        self.num_open = 0

    async def generate(self, _request: GatewayRequest) -> AsyncGenerator[Delta, None]:
        self.num_open += 1
        try:
            yield Delta((1,), "a")
            await asyncio.Event().wait()
        finally:
            self.num_open -= 1


@in_virtual_time
@pytest.mark.parametrize("num_answers", [1, 2])
@pytest.mark.parametrize("sending_s", [0.0, 2 * TIMEOUT_S])
async def test_a_deadline_ends_the_wait_for_a_delta_but_not_its_sending(
    num_answers: int, sending_s: float
) -> None:
    driver, sent = OneDelta(), list[ChoiceDelta]()
    deadline = asyncio.get_running_loop().time() + TIMEOUT_S
    requests = [replace(make_request(str(number)), deadline=deadline) for number in range(num_answers)]

    async def send() -> None:
        async with answering(cast("RequestDriver", driver), requests, {}) as batches:
            async for batch in batches:
                await asyncio.sleep(sending_s)
                sent.extend(batch)

    with pytest.raises(DeadlinePassed):
        await send()
    assert len(sent) == num_answers
    assert asyncio.get_running_loop().time() == pytest.approx(max(TIMEOUT_S, sending_s))
    assert driver.num_open == 0
