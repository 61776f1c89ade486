"""end_tasks: ends tasks of an event loop; does not know what they do."""

import asyncio
from typing import Any


async def end_tasks(*tasks: asyncio.Future[Any]) -> None:
    """Cancels the tasks, and returns once all of them have ended. Raises none of their errors."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
