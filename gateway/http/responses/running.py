"""RunningResponses: the running responses of this gateway that will be stored. Callers can cancel them."""

import asyncio

from gateway.http.responses.store import ResponseStore, StoredResponse


class Running:
    """One response from its beginning until it was sent."""

    def __init__(self, all_running: "RunningResponses", caller: str, response_id: str) -> None:
        self._all = all_running
        self._key = (caller, response_id)
        self._kept: asyncio.Future[bytes | None] = asyncio.get_running_loop().create_future()

    async def keep(self, stored: StoredResponse) -> None:
        """Stores the response in its final state. Raises StoreUnavailable if the store fails."""
        await self._all.store.keep(*self._key, stored)
        if not self._kept.done():
            self._kept.set_result(stored.response)

    def end(self) -> None:
        """The response no longer runs, whether it was stored or not."""
        self._all.remove(self._key)
        if not self._kept.done():
            self._kept.set_result(None)

    async def ended(self) -> bytes | None:
        """Waits for the response's end. Returns the stored response; None if it was not stored."""
        return await asyncio.shield(self._kept)


class RunningResponses:
    """All running responses of one gateway that will be stored."""

    def __init__(self, store: ResponseStore) -> None:
        self.store = store
        self._running: dict[tuple[str, str], Running] = {}

    def begin(self, caller: str, response_id: str) -> Running:
        """Adds a response. Its `end` must be called, even after an error."""
        running = self._running[caller, response_id] = Running(self, caller, response_id)
        return running

    def find(self, caller: str, response_id: str) -> Running | None:
        """The running response. None if it does not run on this gateway, or belongs to another caller."""
        return self._running.get((caller, response_id))

    def remove(self, key: tuple[str, str]) -> None:
        self._running.pop(key, None)
