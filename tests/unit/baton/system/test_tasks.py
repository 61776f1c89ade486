"""Tasks that are ended have ended, whatever they raise meanwhile."""

import asyncio

from baton.system.tasks import end_tasks


def test_it_returns_when_every_task_has_ended_and_raises_none_of_their_errors() -> None:
    ended = []

    async def cleans_up() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append("cleaned up")

    async def fails() -> None:
        raise ValueError("of its own")

    async def run() -> None:
        tasks = asyncio.create_task(cleans_up()), asyncio.create_task(fails())
        await asyncio.sleep(0)
        await end_tasks(*tasks)
        await end_tasks(*tasks)
        await end_tasks()

    asyncio.run(run())
    assert ended == ["cleaned up"]
