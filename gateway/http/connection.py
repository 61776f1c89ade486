"""Detects that the client has left, and ends the work for it."""

import asyncio
from collections.abc import Coroutine

from starlette.types import Receive


async def while_connected(receive: Receive, work: Coroutine[None, None, None]) -> None:
    """Runs `work` to its end, or until the client is gone: then `work` is cancelled, and has cleaned up on return.

    Call it once the request's body has been read.
    """
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_gone(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
    finally:
        leaving.cancel()
        working.cancel()
        await asyncio.wait((working, leaving))
    if not working.cancelled():
        working.result()


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
