"""All answers to one request of a client, as they come: each is a request of its own to the dispatcher."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from gateway.requests.client_request import Delta
from gateway.requests.dispatcher import Dispatcher
from gateway.requests.run import Generation

MAX_CHOICES = 128
"""Answers to one request, over all of its prompts; OpenAI's bound on `n`."""

ChoiceDelta = tuple[int, Delta]
"""Of which answer."""


async def batches_of(
    dispatcher: Dispatcher, generations: Sequence[Generation]
) -> AsyncGenerator[Sequence[ChoiceDelta], None]:
    """Each answer's deltas in order, up to its finish; those that are there at once come at once. If one fails, so do
    all; closing ends all of them everywhere."""
    if len(generations) == 1:
        async with aclosing(dispatcher.generate(generations[0])) as deltas:
            async for delta in deltas:
                yield ((0, delta),)
        return
    waiting: asyncio.Queue[ChoiceDelta | Exception] = asyncio.Queue(len(generations))
    tasks = [
        asyncio.create_task(_pump(dispatcher, index, generation, waiting))
        for index, generation in enumerate(generations)
    ]
    num_open = len(tasks)
    try:
        while num_open:
            items = [await waiting.get()]
            while not waiting.empty():
                items.append(waiting.get_nowait())
            if batch := [item for item in items if not isinstance(item, Exception)]:
                num_open -= sum(delta.finish is not None for _, delta in batch)
                yield batch
            for item in items:
                if isinstance(item, Exception):
                    raise item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def _pump(
    dispatcher: Dispatcher,
    index: int,
    generation: Generation,
    waiting: "asyncio.Queue[ChoiceDelta | Exception]",
) -> None:
    try:
        async with aclosing(dispatcher.generate(generation)) as deltas:
            async for delta in deltas:
                await waiting.put((index, delta))
    except Exception as error:
        await waiting.put(error)
