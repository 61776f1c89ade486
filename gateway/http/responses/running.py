"""RunningResponses: responses that are being generated here and will be stored, so that their callers can end them."""

import asyncio

from gateway.http.responses.store import ResponseStore, StoredResponse


class Running:
    """One response, until it was sent."""

    def __init__(self, all_running: "RunningResponses", caller: str, response_id: str) -> None:
        self._all = all_running
        self._key = (caller, response_id)
        self._kept: asyncio.Future[bytes | None] = asyncio.get_running_loop().create_future()

    async def keep(self, stored: StoredResponse) -> None:
        """Stores the response as it ended; StoreUnavailable."""
        await self._all.store.keep(*self._key, stored)
        if not self._kept.done():
            self._kept.set_result(stored.response)

    def end(self) -> None:
        """It runs no more, stored or not."""
        self._all.remove(self._key)
        if not self._kept.done():
            self._kept.set_result(None)

    async def ended(self) -> bytes | None:
        """What was stored; None if nothing was."""
        return await asyncio.shield(self._kept)


class RunningResponses:
    """Of one gateway."""

    def __init__(self, store: ResponseStore) -> None:
        self.store = store
        self._running: dict[tuple[str, str], Running] = {}

    def begin(self, caller: str, response_id: str) -> Running:
        """`end` must be called, whatever happens."""
        running = self._running[caller, response_id] = Running(self, caller, response_id)
        return running

    def find(self, caller: str, response_id: str) -> Running | None:
        """None if it does not run here, or is another caller's."""
        return self._running.get((caller, response_id))

    def remove(self, key: tuple[str, str]) -> None:
        self._running.pop(key, None)
